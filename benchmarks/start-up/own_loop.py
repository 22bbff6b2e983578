"""A user's loop that writes when it starts, and when a replacement takes its first step, into its folder."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm

torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.05)
data = TensorDataset(torch.rand(20_000, 1, 28, 28), torch.arange(20_000) % 10)
replaces = int(os.environ["POLYRHYTHM_GENERATION"]) > 0
first = True
with polyrhythm.join("synchronous") as group:
    model, optimizer = group.distribute(model, optimizer)
    shard = group.shard(DataLoader(data, batch_size=64, shuffle=True))
    for _ in group.epochs(1000):
        for images, labels in shard:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if first and (replaces or os.environ["RANK"] == "0"):
                with Path(sys.argv[1], "events.jsonl").open("a") as events:
                    events.write("WorkerJoined\n" if replaces else "RunStarted\n")
            first = False
