"""A shard's updates by hand: what is counted, and what another begins with."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json
from polyrhythm.strategies.parameter_server.serving.shard import Handling, Pushed, Updates
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

PLAN = OptimizerPlan("SGD", (Span(0, 2, {"lr": 0.5, "momentum": 0.5}),), 0.5)


def begun() -> Updates:
    made = Updates(Handling())
    made.configure(Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
    made.begin(torch.tensor([1.0, 2.0]))
    return made


def gradient(*values: float, pusher: int = 0, version: int = 0, weight: float = 1.0) -> Pushed:
    return Pushed(pusher, Message(Kind.PUSH, torch.tensor(values), version, 0, weight, 0.5), None)


def values(made: Updates) -> list[float]:
    assert made.shard is not None
    return made.shard.values.tolist()


def test_one_gradient_and_the_mean_of_two() -> None:
    made = begun()
    assert made.make([gradient(2.0, 0.0)], None)
    assert values(made) == [0.0, 2.0]
    assert made.make([gradient(2.0, 4.0, version=1), gradient(0.0, 0.0, pusher=1)], None)
    assert values(made) == [-1.0, 1.0]  # the velocity: 0.5 * [2, 0] + [1, 2]
    assert (made.version, made.staleness) == (2, {0: 2, 1: 1})


def test_empty_batches_are_no_update() -> None:
    made = begun()
    assert not made.make([gradient(0.0, 0.0, weight=0.0)], None)
    assert not made.make([gradient(0.0, 0.0, weight=0.0), gradient(0.0, 0.0, pusher=1, weight=0.0)], None)
    assert (made.version, made.staleness, values(made)) == (0, {}, [1.0, 2.0])


def test_the_latest_staleness_is_told_once() -> None:
    made = begun()
    made.make([gradient(1.0, 0.0)], None)
    assert made.latest_staleness() == {0: 1}
    made.make([gradient(1.0, 0.0)], None)
    assert made.latest_staleness() == {1: 1}
    assert made.latest_staleness() == {}
    assert made.staleness == {0: 1, 1: 1}


def test_a_resumed_one_takes_its_own_parameters_and_the_optimisers_state() -> None:
    first, second = begun(), Updates(Handling())
    first.make([gradient(2.0, 0.0)], None)
    tensors, facts = first.state()
    second.load_state(({name: tensor.clone() for name, tensor in tensors.items()}, facts | first.counts()))
    second.configure(Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
    second.begin(torch.tensor([7.0, 7.0]))
    assert (values(second), second.version, second.staleness) == ([0.0, 2.0], 1, {0: 1})
    for made in first, second:
        made.make([gradient(1.0, 1.0, version=1)], None)
    assert values(second) == values(first) == [-1.0, 1.5]  # the velocity: 0.5 * [2, 0] + [1, 1]


def test_what_comes_out_of_order_is_refused() -> None:
    with pytest.raises(RefusedMessage, match="before it had parameters"):
        Updates(Handling()).state()
    with pytest.raises(RefusedMessage, match="although training has begun"):
        begun().configure(Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
