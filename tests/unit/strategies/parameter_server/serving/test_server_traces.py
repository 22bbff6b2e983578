"""Traces of two workers at one server, worked out by plain Python beside it: delay compensation, SSP, softsync."""

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, pack_json, pack_tensors, unpack_tensors
from polyrhythm.strategies.aggregators.coordinate_median import CoordinateMedian
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.merge.delay_compensated import DelayCompensated
from polyrhythm.strategies.parameter_server.merge.staleness_aware import StalenessAware
from polyrhythm.strategies.parameter_server.serving.shard import Handling, shard_session
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

RATE, START = 0.125, 3.0
A, B, C = 0, 1, 2


def plan(momentum=0.0):
    return pack_json(OptimizerPlan("SGD", (Span(0, 1, {"lr": RATE, "momentum": momentum}),), RATE).to_json())


def served(consistency, handling=None, workers=2, start=START):
    made = shard_session(tuple(range(workers)), consistency, handling)
    made.on_message(A, Message(Kind.CONFIGURE, plan()))
    made.on_message(A, Message(Kind.PARAMETERS, torch.tensor([start], dtype=torch.float64)))
    return made


class Worker:
    """Computes the gradient h w of a parabola at what it has read."""

    def __init__(self, server, rank, h=1.0):
        self.server, self.rank, self.h = server, rank, h
        self.step, self.read, self.version = 0, START, 0

    def pull(self):
        self.take(self.server.on_message(self.rank, Message(Kind.PULL)))

    def take(self, replies):
        for to, reply in replies:
            if to == self.rank:
                self.version, self.step = reply.version, reply.step
                if reply.tensor is not None:
                    self.read = reply.tensor.item()

    def push(self, gradient=None, **fields):
        values = torch.tensor([self.h * self.read if gradient is None else gradient], dtype=torch.float64)
        fields = {"learning_rate": RATE, "step": self.step, "version": self.version, **fields}
        replies = self.server.on_message(self.rank, Message(Kind.PUSH, values, **fields))
        self.take(replies)
        return replies


def test_what_was_answered_last_counts_and_not_what_was_there_at_the_push():
    """A reads anew (after an epoch) while B's updates go on: its own push is compared with that read."""
    server = served(Asynchronous(), Handling(DelayCompensated(variant="c", lambda0=1.0)))
    a, b = Worker(server, A), Worker(server, B)
    a.pull()
    b.pull()
    b.push(8.0)  # 3 - 1 = 2
    a.pull()
    b.push(-8.0)  # -8 + 64 (2 - 2) = -8: up to 3
    a.push(2.0)  # 2 + 4 (3 - 2) = 6
    assert server.values.item() == 3 - RATE * 6


def test_staleness_divides_the_rate_also_for_an_optimizer_that_sees_no_length():
    """Adam's first step is the rate itself, however long the gradient."""
    made = shard_session((A, B), Asynchronous(), Handling(StalenessAware()))
    adam = OptimizerPlan("Adam", (Span(0, 1, {"lr": RATE, "eps": 1e-30}),), RATE)
    made.on_message(A, Message(Kind.CONFIGURE, pack_json(adam.to_json())))
    made.on_message(A, Message(Kind.PARAMETERS, torch.tensor([0.0], dtype=torch.float64)))
    push = Message(Kind.PUSH, torch.tensor([5.0], dtype=torch.float64), learning_rate=RATE)
    for step, lost in enumerate((1, 1, 1 / 2, 1 / 3)):  # all computed from version 0
        before = made.values.item()
        made.on_message(A, push._replace(step=step))
        assert before - made.values.item() == pytest.approx(RATE * lost, rel=1e-9)


def test_gradients_of_different_ages_count_by_their_ages_in_one_update():
    server = served(Softsync(n=1), Handling(StalenessAware()), workers=2)
    a, b = Worker(server, A), Worker(server, B)
    for _ in range(4):
        a.push(0.0)
    assert server.version == 2
    a.push(4.0, version=1, weight=0.5)  # one update old
    b.push(8.0, version=0, weight=1.0)  # two
    assert server.values.item() == START - RATE * (0.5 * 4 / 1 + 1.0 * 8 / 2) / 1.5


def test_held_gradients_survive_a_checkpoint():
    """They have been answered, so nobody will push them again."""
    first = served(Softsync(n=1), workers=3)
    a, b = Worker(first, A), Worker(first, B)
    a.push(8.0)
    b.push(16.0, weight=0.5)
    assert first.steps == {A: 1, B: 1, C: 0}
    tensors, facts = unpack_tensors(pack_tensors(*first.state()))
    second = shard_session((A, B, C), Softsync(n=1))
    second.load_state((tensors, facts))
    second.on_message(A, Message(Kind.CONFIGURE, plan()))
    second.on_message(A, Message(Kind.PARAMETERS, torch.zeros(1).double()))
    a.server = second
    [(_, answer)] = a.push(1000.0, step=0)  # it repeats itself
    assert (answer.step, answer.version) == (1, 0)
    Worker(second, C).push(24.0)
    assert second.values.item() == START - RATE * (8 + 8 + 24) / 2.5
    assert second.staleness == {0: 3}


def test_too_few_gradients_for_a_robust_choice_make_no_update():
    server = served(Synchronous(), Handling(aggregator=CoordinateMedian(f=1)), workers=3)
    workers = [Worker(server, rank) for rank in (A, B, C)]
    for worker, weight in zip(workers, (1.0, 1.0, 0.0), strict=True):
        replies = worker.push(8.0, weight=weight)
    assert [(to, reply.version, reply.step) for to, reply in replies] == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    for worker, gradient in zip(workers, (8.0, float("nan"), 16.0), strict=True):
        worker.push(gradient, step=1)
    assert server.values.item() == START - RATE * 16
