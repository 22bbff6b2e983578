"""torch's DistributedDataParallel with a snapshot every EVERY steps, as in torch's tutorial on torchrun."""

import sys
from itertools import islice
from pathlib import Path

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

folder, every = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(job.Paced(folder))
diary = job.Diary(folder)
optimizer = torch.optim.SGD(model.parameters(), job.RATE)
data = TensorDataset(*job.dataset())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=job.BATCH, sampler=sampler)
snapshot, done = Path(f"{folder}-snapshot.pt"), 0
if snapshot.exists():
    saved = torch.load(snapshot)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
for epoch in range(done // job.STEPS_PER_EPOCH, job.EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in islice(loader, done % job.STEPS_PER_EPOCH, None):
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        diary.write(1, images)
        if done % every == 0 and dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
            torch.save(state, f"{snapshot}.new")
            Path(f"{snapshot}.new").rename(snapshot)
dist.destroy_process_group()
