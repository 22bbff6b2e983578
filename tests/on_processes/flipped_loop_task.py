"""A loop of one's own in which a bit of one worker's parameters flips; every worker prints a hash of its final ones."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

import polyrhythm

STRATEGY, VICTIM, AFTER, STEPS, EVERY = sys.argv[1], int(sys.argv[2]), 12, 32, 5

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
with polyrhythm.join(STRATEGY) as group:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = group.distribute(model, optimizer, digest_every=EVERY)
    for step in range(STEPS):
        if step == AFTER and group.rank == VICTIM:
            with torch.no_grad():
                model[0].weight.view(torch.int32)[3, 3] ^= 1 << 20
        torch.manual_seed(100 * step + group.rank)
        loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(3, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rank = group.rank
    bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy().tobytes()
print(f"rank {rank} has {hashlib.sha256(bits).hexdigest()}", flush=True)
