"""A loop of one's own that many tests run: distributed as a script, or plain as a function.

    own_loop_task.py STRATEGY FOLDER [PLACE]

Each worker saves its final model in the folder. PLACE makes worker 1 fail there: `body`, or `killed`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

BATCH_SIZE = 8


def points(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(
        inputs, (inputs @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)
    )


class Cut(Sampler[list[int]]):
    """Batches of given sizes."""

    def __init__(self, sampler: RandomSampler, sizes: list[int]) -> None:
        self._sampler = sampler
        self._sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(list(self._sampler))
        for size in self._sizes:
            yield list(islice(order, size))


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loaders(workers: int, plain: bool) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Gives a shuffled loader with one point too many, and one in which every second step is an update.

    A last step of one point is less than two for each worker, so that it shares those of the step before.
    """
    size = BATCH_SIZE * workers if plain else BATCH_SIZE
    generator = torch.Generator().manual_seed(3)
    data, last = points(2 * BATCH_SIZE * workers + 1), BATCH_SIZE * workers + 1
    every = DataLoader(points(4 * BATCH_SIZE * workers), size)
    if not plain:
        return DataLoader(data, size, shuffle=True, generator=generator), every
    cut = Cut(RandomSampler(data, generator=generator), [size, last - last // 2, last // 2])
    return DataLoader(data, batch_sampler=cut, generator=generator), every


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, pairs: Any, disturb: Callable[[], None]
) -> None:
    """Three epochs of an update a batch and a rate that falls, then one of an update every two batches."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
    criterion = nn.CrossEntropyLoss()
    for _ in range(3):
        for x, y in batches:
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        disturb()
    for number, (x, y) in enumerate(pairs):
        (criterion(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            model.zero_grad()


def optimizer_of(model: nn.Sequential) -> torch.optim.Optimizer:
    groups = [{"params": model[2].parameters(), "lr": 0.05}, {"params": model[0].parameters()}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def plain_parameters(workers: int) -> Tensor:
    """Trains without any distribution, on batches as large as all workers' together; gives `(n,)`."""
    model = network()
    train(model, optimizer_of(model), *loaders(workers, plain=True), lambda: None)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def main(strategy: str, folder: Path, failure: str = "") -> None:
    import polyrhythm

    with polyrhythm.join(strategy) as group:

        def disturb() -> None:
            if failure and group.rank == 1:
                if failure == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("worker 1 has had enough")

        model = network()
        if group.rank > 0:  # only worker 0's parameters count
            torch.nn.init.zeros_(model[0].weight)
        model, optimizer = group.distribute(model, optimizer_of(model))
        one_left, pairs = loaders(group.workers, plain=False)
        train(model, optimizer, group.shard(one_left), group.shard(pairs), disturb)
        mean = group.average(float(group.rank), weight=group.rank + 1)
    facts = {"mean": mean, "staleness": dict(group.staleness), "steps": optimizer.steps, "leads": group.leads}
    torch.save({"model": model.state_dict(), **facts}, folder / f"worker-{group.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
