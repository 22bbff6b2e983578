"""Gradients that are not finite, at servers that do not wait for all."""

from math import inf, nan

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json
from polyrhythm.strategies.aggregators.coordinate_median import CoordinateMedian
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.bounded_staleness import BoundedStaleness
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.shard import Handling, shard_session
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.flat_parameters import is_finite
from polyrhythm.training.optimizer_plan import OptimizerPlan

A, B = 0, 3  # ranks
START = torch.tensor([1.0, 2.0])
BAD = [nan, 1.0]


def server(consistency, eject_after=3, **handling):
    made = shard_session((A, B), consistency, Handling(eject_after=eject_after, **handling))
    plan = OptimizerPlan("SGD", (Span(0, 2, {"lr": 0.5, "momentum": 0.5}),), 0.5)
    made.on_message(A, Message(Kind.CONFIGURE, pack_json(plan.to_json())))
    made.on_message(A, Message(Kind.PARAMETERS, START.clone()))
    return made


def push(values, step, version=0):
    return Message(Kind.PUSH, torch.tensor(values), version=version, step=step, learning_rate=0.5)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("consistency", [Asynchronous(), BoundedStaleness(s=2)])
def test_it_is_left_out_and_its_worker_goes_on(consistency, bad):
    made = server(consistency)
    [(to, answer)] = made.on_message(B, push([bad, 1.0], 0))
    assert (to, answer.tensor.tolist(), answer.version, answer.step) == (B, [1.0, 2.0], 0, 1)
    [(_, answer)] = made.on_message(B, push([1.0, 1.0], 1))
    assert answer.tensor.tolist() == [0.5, 1.5]  # and momentum knows nothing of what was left out
    assert (made.stats().not_finite, made.stats().ejected, made.version) == (1, 0, 1)
    assert made.staleness == {0: 1}


def test_of_several_gradients_it_counts_for_nothing():
    made = server(Softsync(n=1))  # of two pushers: an update of two
    made.on_message(A, push(BAD, 0))
    made.on_message(B, push([2.0, 4.0], 0))
    assert made.values.tolist() == [0.0, 0.0]  # 1 - 0.5 * 2, 2 - 0.5 * 4
    assert made.stats().not_finite == 1


def test_after_so_many_in_a_row_its_worker_is_let_go_and_a_successor_repeats_the_last():
    made = server(Asynchronous())
    for step in range(2):
        made.on_message(B, push(BAD, step))
    made.on_message(B, push([0.0, 0.0], 2))  # one that is finite: the row is broken
    for step in (3, 4):
        assert [reply.kind for _, reply in made.on_message(B, push(BAD, step))] == [Kind.PARAMETERS]
    [(to, answer)] = made.on_message(B, push(BAD, 5))
    assert (to, answer) == (B, Message(Kind.DISMISSED))
    assert (made.stats().not_finite, made.stats().ejected, made.steps) == (5, 1, {A: 0, B: 5})
    with pytest.raises(RefusedMessage) as refusal:
        made.on_message(B, push([1.0, 1.0], 5))
    assert refusal.value.reason is Reason.SENDER
    made.on_loss(B)  # its process has ended
    [(_, answer)] = made.on_message(B, Message(Kind.PULL))
    assert answer.step == 5
    made.on_message(B, push(BAD, 5))  # the successor has a row of its own
    assert made.stats().ejected == 1
    [(_, answer)] = made.on_message(B, push([1.0, 1.0], 6, version=answer.version))
    assert answer.kind is Kind.PARAMETERS


def test_others_that_waited_for_it_go_on():
    made = server(BoundedStaleness(s=1), eject_after=1)
    made.on_message(A, push([0.0, 0.0], 0))
    assert made.on_message(A, push([0.0, 0.0], 1)) == []  # A is too far ahead of B
    replies = made.on_message(B, push(BAD, 0))
    assert [(rank, reply.kind) for rank, reply in replies] == [(A, Kind.PARAMETERS), (B, Kind.DISMISSED)]


@pytest.mark.parametrize(
    ("consistency", "handling"),
    [(Synchronous(), {}), (Softsync(n=1), {"aggregator": CoordinateMedian(f=0)})],
)
def test_those_that_wait_for_all_and_robust_aggregators_take_it_as_it_is(consistency, handling):
    made = server(consistency, **handling)
    made.on_message(A, push(BAD, 0))
    made.on_message(B, push([2.0, 4.0], 0))
    assert made.version == 1
    assert made.stats().not_finite == 0


def test_large_numbers_are_finite_though_their_sum_is_not():
    assert is_finite(torch.full((4,), 3e38))
    assert is_finite(torch.full((1000,), 60000.0, dtype=torch.float16))
    assert not is_finite(torch.tensor([3e38, 3e38, inf]))
    assert not is_finite(torch.tensor([inf, -inf, 1.0]))
    assert not is_finite(torch.tensor([1.0, nan]))
