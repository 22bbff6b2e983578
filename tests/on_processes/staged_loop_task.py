"""A loop of one's own through stages of strategies: staged_loop_task.py STRATEGY FOLDER."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))  # of a script that is its folder alone

from on_processes.own_loop_task import BATCH_SIZE, network, optimizer_of, points

EPOCHS, WORKERS = 3, 2


def train(model: nn.Module, optimizer: Any, batches: Any, epochs: Any, scheduler: Any) -> None:
    for _ in epochs:
        for x, y in batches:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


def loader(size: int) -> DataLoader[Any]:
    return DataLoader(points(4 * BATCH_SIZE * WORKERS), size)


def plain_parameters(workers: Sequence[int] = (WORKERS,) * EPOCHS) -> Tensor:
    """Trains without any distribution, on batches as large as those of an epoch's workers together; gives `(n,)`."""
    model = network()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for each in workers:
        train(model, optimizer, loader(each * BATCH_SIZE), range(1), scheduler)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def main(strategy: str, folder: Path) -> None:
    import polyrhythm

    with polyrhythm.join(strategy) as group:
        model = network()
        model, optimizer = group.distribute(model, optimizer_of(model))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        shard = group.shard(loader(BATCH_SIZE))
        train(model, optimizer, shard, group.epochs(EPOCHS, scheduler), scheduler)
    torch.save({"model": model.state_dict(), "steps": optimizer.steps}, folder / f"worker-{group.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
