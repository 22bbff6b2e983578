"""A loop of one's own that saves what is needed to go on, and goes on from it.

resumed_loop_task.py STRATEGY FOLDER FIRST LAST     steps FIRST to LAST; saved after every step as step-<n>-<worker>.pt
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn


def main(strategy: str, folder: Path, first: int, last: int) -> None:
    import polyrhythm

    torch.manual_seed(2)
    model = nn.Linear(6, 3).double()
    with polyrhythm.join(strategy) as group:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, distributed = group.distribute(model, optimizer)
        if first:
            saved = torch.load(folder / f"step-{first}-{group.rank}.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            distributed.load_state_dict(saved["optimizer"])
        for step in range(first, last):
            torch.manual_seed(100 * step + group.rank)
            nn.functional.cross_entropy(model(torch.randn(4, 6).double()), torch.arange(4) % 3).backward()
            distributed.step()
            state = {"model": model.state_dict(), "optimizer": distributed.state_dict()}
            torch.save(state, folder / f"step-{step + 1}-{group.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
