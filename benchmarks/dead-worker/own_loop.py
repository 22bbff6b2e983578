"""A user's own loop with `polyrhythm.join`, started by `polyrhythm run --restarts 10`."""

import sys

import job
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm

torch.manual_seed(0)
model: nn.Module = job.Paced(sys.argv[1])
diary = job.Diary(sys.argv[1])
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), job.RATE)
loader = DataLoader(TensorDataset(*job.dataset()), batch_size=job.BATCH, shuffle=True)
with polyrhythm.join("synchronous", threads=1) as group:
    model, optimizer = group.distribute(model, optimizer)
    shard = group.shard(loader)
    for _ in group.epochs(job.EPOCHS):
        for images, labels in shard:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            diary.write(1, images if shard.weight else images[:0])  # a repeated batch does not count
