"""The job as a loop with `polyrhythm.join`, started by `polyrhythm run`."""

import sys

import job
from torch import nn
from torch.utils.data import DataLoader

import polyrhythm

count, epochs = map(int, sys.argv[-2:])
model = job.network()
optimizer = job.optimizer_of(model)
loader = DataLoader(job.read("train", count), job.BATCH_SIZE, shuffle=True)
with polyrhythm.join("synchronous") as group:
    model, optimizer = group.distribute(model, optimizer, channels_last="channels_last" in sys.argv)
    shard = group.shard(loader)
    for _ in group.epochs(epochs):
        for images, labels in shard:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
if group.leads:
    print(job.accuracy(model))
