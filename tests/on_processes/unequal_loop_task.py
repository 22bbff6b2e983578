"""A loop of one's own in which every worker has a model like no other's between two exchanges.

    unequal_loop_task.py STRATEGY FOLDER

Each worker saves its final model in the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS, RATE, MOMENTUM = 10, 0.1, 0.9


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    """Gives the loss of a worker's batch, which nobody else has."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1))


def main(strategy: str, folder: Path) -> None:
    import polyrhythm

    with polyrhythm.join(strategy) as group:
        model = network()
        model, optimizer = group.distribute(model, optimizer_of(model))
        for step in range(STEPS):
            loss_of(model, group.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model.state_dict(), folder / f"worker-{group.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
