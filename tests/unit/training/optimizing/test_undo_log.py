"""A step of every elementwise optimizer, taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.training.flat_optimizer import ELEMENTWISE, FlatOptimizer, UndoLog
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

SIZE = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
}


def made(kind: str) -> tuple[Tensor, FlatOptimizer]:
    model = nn.ParameterList([torch.linspace(-1.0, 1.0, SIZE)])
    flat = FlatParameters(model)
    optimizer = ELEMENTWISE[kind](model.parameters(), lr=0.1, **OPTIONS.get(kind, {}))  # type: ignore[call-arg]
    return flat.vector, OptimizerPlan.of(optimizer, flat).build(flat.vector)


def gradient(step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
def test_who_takes_steps_back_goes_on_with_the_bits_of_who_never_made_them(kind: str) -> None:
    (straight, plain), (vector, optimizer) = made(kind), made(kind)
    log = UndoLog(vector, optimizer)
    for step in range(4):
        log.note()
        before = vector.clone()
        optimizer.step(-gradient(10 + step), 0.3)
        assert not torch.equal(vector, before)
        log.restore()
        assert torch.equal(vector, before)
        log.note()  # as if there had been a step that was not taken back
        for each in (plain, optimizer):
            each.step(gradient(step), 0.1)
        assert torch.equal(vector, straight)
    tensors, facts = optimizer.state()
    expected, expected_facts = plain.state()
    assert facts == expected_facts
    assert list(tensors) == list(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_copies_are_made_in_the_same_memory_at_every_step() -> None:
    vector, optimizer = made("Adam")
    log = UndoLog(vector, optimizer)
    places = set()
    for step in range(4):
        log.note()
        if step:
            places.add(tuple(value.data_ptr() for value in log._states[0].values()))
        optimizer.step(gradient(step), 0.1)
    assert len(places) == 1


def test_where_nothing_is_trained_there_is_nothing_to_take_back() -> None:
    vector = torch.ones(3)
    log = UndoLog(vector, OptimizerPlan("SGD", (), 0.1).build(vector))
    log.note()
    log.restore()
    assert vector.tolist() == [1.0] * 3
