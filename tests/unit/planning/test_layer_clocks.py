"""Layer clocks, against a clock that a layer moves by a known time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyrhythm.planning.step import LayerClocks


class Taking(torch.autograd.Function):
    """Moves the clock in both passes."""

    @staticmethod
    def forward(context, value, clock, forward_s, backward_s):
        clock[0] += forward_s
        context.clock, context.backward_s = clock, backward_s
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        context.clock[0] += context.backward_s
        return gradient, None, None, None


class Slow(nn.Linear):
    """A layer that takes its time."""

    def __init__(self, clock: list[float], forward_s: float, backward_s: float) -> None:
        super().__init__(2, 2)
        self.taking = (clock, forward_s, backward_s)

    def forward(self, value: Tensor) -> Tensor:
        taken: Tensor = Taking.apply(value @ self.weight, *self.taking)
        return taken + self.bias.sum() * 0


def test_every_layer_takes_its_own_time() -> None:
    clock = [100.0]
    model = nn.Sequential(Slow(clock, 1.0, 2.0), nn.ReLU(), Slow(clock, 4.0, 8.0))
    layers = LayerClocks(model, lambda: clock[0])
    layers.watch()
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        assert layers.end_step() + 10.0 == clock[0]
    first, relu, last = layers.read(skip=1)
    assert [first.name, relu.name, last.name] == ["0", "1", "2"]
    assert [layer.forward_s for layer in (first, relu, last)] == [1.0, 0.0, 4.0]
    assert [layer.backward_s for layer in (first, relu, last)] == [2.0, 0.0, 8.0]
    assert (first.kind, first.parameters, relu.parameters) == ("Slow", 6, 0)
