"""The job as a loop with `polyrhythm.join`, started by `polyrhythm run`."""

import sys

import job
from torch import nn
from torch.utils.data import DataLoader

import polyrhythm

model = job.network()
optimizer = job.optimizer_of(model)
loader = DataLoader(job.read("train", int(sys.argv[1])), job.BATCH_SIZE, shuffle=True)
with polyrhythm.join("synchronous") as group:
    model, optimizer = group.distribute(model, optimizer)
    shard = group.shard(loader)
    for _ in group.epochs(int(sys.argv[2])):
        for images, labels in shard:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
if group.leads:
    print(job.accuracy(model))
