"""A network's pieces have names that its author has given."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.models.architectures.lenet5 import LeNet5
from polyrhythm.partition.chain import Chain
from polyrhythm.partition.stage import given


class Turned(nn.Module):
    """A layer of two operations, neither of which is a layer."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.empty_like(images).copy_(images)


class Written(nn.Module):
    """A network with operations inside a layer of its own, and between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = Turned()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.block = nn.Sequential(nn.Tanh(), Turned())
        self.head = nn.Linear(2 * 36, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = functional.relu(self.first(self.turned(images * 2)))
        return self.head(torch.flatten(self.block(features), 1))


def test_operations_are_named_by_the_module_that_they_are_in_or_by_the_layer_before() -> None:
    chain = Chain(Written(), torch.zeros(1, 1, 6, 6))
    assert chain.names() == [
        "mul",  # before all layers
        "turned",
        "first#1",
        "first#2",
        "block.0",
        "block.1#1",
        "block.1#2",
        "head",
    ]
    behind = {name: given(chain.pieces, [name], 2, "pipeline")[1] for name in ("first", "block", "block.1#1")}
    assert behind == {"first": 4, "block": 7, "block.1#1": 6}


def test_pictures_that_are_copied_first_are_a_layer() -> None:
    model = LeNet5().create(10, (1, 28, 28))
    assert Chain(model, torch.zeros(1, 1, 28, 28)).names()[0] == "0"
