"""A shard's updates by hand: what is counted, and what another begins with."""

from __future__ import annotations

import weakref

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync
from polyrhythm.strategies.parameter_server.serving.rule import Contribution
from polyrhythm.strategies.parameter_server.serving.shard import Handling, ShardRule
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

PLAN = OptimizerPlan("SGD", (Span(0, 2, {"lr": 0.5, "momentum": 0.5}),), 0.5)
CONFIGURE = Message(Kind.CONFIGURE, pack_json(PLAN.to_json()))


def unbegun() -> ShardRule:
    return ShardRule(Softsync(n=1), Handling(), 2, (), 0)


def begun() -> ShardRule:
    made = unbegun()
    made.configure(CONFIGURE)
    made.begin(torch.tensor([1.0, 2.0]))
    return made


def gradient(*values: float, pusher: int = 0, version: int = 0, weight: float = 1.0) -> Contribution:
    return Contribution(pusher, torch.tensor(values), version, 0, weight, 0.5)


def test_what_comes_out_of_order_is_refused() -> None:
    with pytest.raises(RefusedMessage, match="before it had parameters"):
        unbegun().state()
    with pytest.raises(RefusedMessage, match="although training has begun"):
        begun().configure(CONFIGURE)


LARGE = 50_000
OPTIONS = {
    "lr": 0.5,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
}


def large(kind: str, options: dict[str, object]) -> ShardRule:
    made = unbegun()
    plan = OptimizerPlan(kind, (Span(0, LARGE // 2, options), Span(LARGE // 2, LARGE, options)), 0.5)
    made.configure(Message(Kind.CONFIGURE, pack_json(plan.to_json())))
    made.begin(torch.arange(float(LARGE)))
    return made


def drawn(number: int) -> Contribution:
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(number))
    return Contribution(0, values, number, number, 1.0, 0.5)


def test_what_is_shown_is_no_copy_and_the_values_stay_where_they_are_once_nobody_holds_it() -> None:
    made = large("SGD", {"lr": 0.5, "momentum": 0.9})
    place = made.values.data_ptr()
    for number in range(3):
        shown = made.answer(0, number)
        assert shown.data_ptr() == place
        assert made.answer(1, number) is shown
        del shown
        made.apply([drawn(number)], number)
    assert made.values.data_ptr() == place


@pytest.mark.parametrize(("kind", "options"), [("SGD", {"lr": 0.5, "momentum": 0.9}), ("Adam", OPTIONS)])
def test_who_holds_a_part_of_what_was_shown_sees_no_update_and_the_updates_are_the_same(
    kind: str, options: dict[str, object]
) -> None:
    read, unread = large(kind, options), large(kind, options)
    held = []
    for number in range(4):
        if number != 1:
            held.append((read.answer(0, number)[10:20], read.values[10:20].clone()))
        if number == 2:
            read.change(lambda values: values.mul_(0.5))
            unread.change(lambda values: values.mul_(0.5))
        for each in (read, unread):
            each.apply([drawn(number)], number)
        assert torch.equal(read.values, unread.values)
    for part, before in held:
        assert torch.equal(part, before)
    assert len({part.data_ptr() for part, _ in held}) == 3


def test_a_gradient_is_not_held_when_it_has_been_applied() -> None:
    made = large("SGD", {"lr": 0.5, "momentum": 0.9})
    contribution = drawn(0)
    gone = weakref.ref(contribution.gradient)
    made.apply([contribution], 0)
    del contribution
    assert gone() is None


class Memory:
    """Memory in which a test says what is lent: by the addresses of vectors."""

    def __init__(self) -> None:
        self.lent: set[int] = set()
        self.made: list[int] = []

    def vector(self, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(like)
        self.made.append(made.data_ptr())
        return made

    def lends(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.lent


def test_values_that_are_lent_stay_as_they_are_and_updates_go_on_elsewhere() -> None:
    memory = Memory()
    made = ShardRule(Softsync(n=1), Handling(), 2, (), 0, memory)
    plain = large("SGD", {"lr": 0.5, "momentum": 0.9})
    plan = OptimizerPlan("SGD", (Span(0, LARGE, {"lr": 0.5, "momentum": 0.9}),), 0.5)
    made.configure(Message(Kind.CONFIGURE, pack_json(plan.to_json())))
    came = torch.arange(float(LARGE))
    made.begin(came)
    assert memory.made == [made.values.data_ptr()] != [came.data_ptr()]
    for number in range(4):
        before = made.values
        kept = before.clone()
        if number % 2:  # shown, and nothing here holds it: only the receiver does
            made.answer(0, number)
            memory.lent = {before.data_ptr()}
        for each in (made, plain):
            each.apply([drawn(number)], number)
        assert torch.equal(made.values, plain.values)
        assert (made.values is before) == (number % 2 == 0)
        if number % 2:
            assert torch.equal(before, kept)
        memory.lent.clear()
    assert len(memory.made) == 3
