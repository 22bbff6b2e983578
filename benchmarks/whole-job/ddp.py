"""The job with DistributedDataParallel, started by torchrun."""

import sys

import job
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = job.read("train", int(sys.argv[1]))
sampler = DistributedSampler(data, seed=job.SEED)
loader = DataLoader(data, job.BATCH_SIZE, sampler=sampler)
network = job.network()
model = DistributedDataParallel(network)
optimizer = job.optimizer_of(model)
for epoch in range(int(sys.argv[2])):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    print(job.accuracy(network))
dist.destroy_process_group()
