"""The job with DistributedDataParallel, started by torchrun."""

import sys

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

count, epochs = map(int, sys.argv[-2:])
memory_format = torch.channels_last if "channels_last" in sys.argv else torch.preserve_format
dist.init_process_group("gloo")
data = job.read("train", count)
sampler = DistributedSampler(data, seed=job.SEED)
loader = DataLoader(data, job.BATCH_SIZE, sampler=sampler)
network = job.network().to(memory_format=memory_format)
model = DistributedDataParallel(network)
optimizer = job.optimizer_of(model)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        images = images.to(memory_format=memory_format)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    print(job.accuracy(network))
dist.destroy_process_group()
