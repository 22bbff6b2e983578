"""torchft's DDP by its README: a replica group per worker, each under a torchrun of its own.

The batch follows from `manager.current_step()`, so that a replacement continues at the step of the others.
"""

import os
import sys

import job
import torch
import torchft
from torch import nn

folder = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
images, labels = job.dataset()
model = job.Paced(folder)
diary = job.Diary(folder)
inner = torch.optim.SGD(model.parameters(), job.RATE)


def load_state_dict(state: dict) -> None:  # type: ignore[type-arg]
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(),
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    replica_id=f"worker_{os.environ['REPLICA_GROUP_ID']}_",
)
wrapped = torchft.DistributedDataParallel(manager, model)
optimizer = torchft.Optimizer(manager, inner)
steps = job.EPOCHS * job.STEPS_PER_EPOCH
while manager.current_step() < steps:
    optimizer.zero_grad()  # starts a quorum, which a replacement waits for: it may change the step
    manager.wait_quorum()
    step = manager.current_step()
    order = torch.randperm(job.IMAGES, generator=torch.Generator().manual_seed(step // job.STEPS_PER_EPOCH))
    start = (step % job.STEPS_PER_EPOCH * job.WORKERS + job.rank()) * job.BATCH
    batch = order[start : start + job.BATCH]
    nn.functional.cross_entropy(wrapped(images[batch]), labels[batch]).backward()
    optimizer.step()
    if manager.current_step() > step:
        diary.write(1, images[batch])
manager.shutdown(wait=False)
