"""A loop of one's own whose workers draw their batches; worker 1 is slow.

    drawn_loop_task.py STRATEGY FOLDER

Each worker saves the pictures that it saw of every epoch in the folder.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, IMAGES, BATCH_SIZE = 2, 403, 4
STEP_S = 0.004, 0.04


def main(strategy: str, folder: Path) -> None:
    import polyrhythm

    torch.manual_seed(3)
    data = TensorDataset(torch.randn(IMAGES, 5), torch.arange(IMAGES))
    with polyrhythm.join(strategy) as group:
        model = nn.Linear(5, 2)
        model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
        shard = group.shard(DataLoader(data, BATCH_SIZE, shuffle=True), batches="dynamic")
        seen: list[list[int]] = []
        for _ in group.epochs(EPOCHS):
            seen.append([])
            for x, numbers in shard:
                time.sleep(STEP_S[group.rank])
                functional.cross_entropy(model(x), numbers % 2).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen[-1] += numbers.tolist()
    (folder / f"seen-{group.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
