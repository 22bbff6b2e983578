"""What loops of a user's own are made of, in tests: a network, its batches, and how far a loop has come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, EPOCHS = 6, 3


class Network(nn.Module):
    """Has a branch that a pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk = nn.Linear(6, 8)
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        if branch:
            if saves is None:
                hidden = hidden + torch.tanh(self.branch(hidden))
            else:
                hidden = hidden + torch.tanh(checkpoint(self.branch, hidden, use_reentrant=saves))
        return self.head(hidden)


@dataclass
class Loop:
    """What a variation works with."""

    model: Network
    optimizer: torch.optim.Optimizer
    batches: Any
    group: Any = None
    seen: list[float] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    def steps(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield epoch, step of the epoch and batch."""
        for epoch in range(EPOCHS):
            for step, (x, y) in enumerate(self.batches):
                yield epoch, step, x, y

    def loss(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        return nn.functional.cross_entropy(self.model(x, **options), y)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def with_gradients(self) -> list[Any]:
        return [each for each in self.parameters() if each.grad is not None]

    def mean(self) -> None:
        """Have the workers' mean gradient, where they have it only if asked."""
        if self.group is not None:
            self.group.mean_gradients()

    def average(self, value: Tensor, weight: float) -> float:
        value = value.detach()
        return float(value) if self.group is None else self.group.average(value, weight)

    def accumulate(self) -> Any:
        return nullcontext() if self.group is None else self.group.accumulate()


def loader(batch_size: int, workers: int) -> DataLoader[Any]:
    """Return a shuffled loader of 3 full steps and a ragged one, in which worker 0 has one point more than others."""
    count = 3 * BATCH_SIZE * workers + 2 * workers + 1
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    labels = (inputs @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)
    return DataLoader(TensorDataset(inputs, labels), batch_size, shuffle=True, generator=generator)
