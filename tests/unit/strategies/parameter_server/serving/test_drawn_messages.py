"""Servers take drawn messages, repeated steps and losses; a few lines of plain Python say what they hold."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.downpour import sum_session
from polyrhythm.strategies.parameter_server.elastic.averaging import ElasticRule, center_session
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import shard_session
from polyrhythm.training.optimizer_plan import OptimizerPlan, Span

SIZE, RATE = 3, 0.5
PLAN = OptimizerPlan("SGD", (Span(0, SIZE, {"lr": RATE}),), RATE)
BLOCKS = range(10)
SEEDS = 100  # a block


def begun(made: ServerSession) -> ServerSession:
    made.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
    made.on_message(0, Message(Kind.PARAMETERS, torch.zeros(SIZE)))
    return made


def drawn(random: Random) -> list[float]:
    """Whole numbers, of which every sum and half is exact."""
    return [float(random.randrange(-64, 64)) for _ in range(SIZE)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("answered", [True, False])
def test_every_gradient_counts_once_at_its_staleness(block: int, answered: bool) -> None:
    """Gradients to an asynchronous server, which are answered, and sums to one of Downpour, which are not."""
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        random = Random(seed)
        workers = tuple(range(random.randrange(1, 5)))
        made = begun(shard_session(workers, Asynchronous()) if answered else sum_session(workers, 0))
        values, version, staleness = [0.0] * SIZE, 0, Counter[int]()
        steps, read = [0] * len(workers), [0] * len(workers)
        for _ in range(30):
            worker = random.choice(workers)
            if random.random() < 0.1:
                assert made.on_loss(worker) == []
            if random.random() < 0.3:
                [(to, reply)] = made.on_message(worker, Message(Kind.PULL))
                assert (to, reply.tensor.tolist(), reply.version) == (worker, values, version)
                read[worker] = version
                continue
            repeated = steps[worker] > 0 and random.random() < 0.2
            step, weight, gradient = steps[worker] - repeated, float(random.randrange(3)), drawn(random)
            push = Message(Kind.PUSH, torch.tensor(gradient), read[worker], step, weight, RATE)
            replies = made.on_message(worker, push)
            if not repeated and weight:
                values = [value - RATE * each for value, each in zip(values, gradient, strict=True)]
                staleness[version - read[worker]] += 1 if answered else int(weight)
                version += 1
            steps[worker] += not repeated
            assert len(replies) == answered
            for to, reply in replies:
                assert (to, reply.tensor.tolist()) == (worker, values)
                assert (reply.version, reply.step) == (version, steps[worker])
                read[worker] = version
        assert (made.values.tolist(), made.version, made.staleness) == (values, version, staleness)
        assert made.steps == dict(zip(workers, steps, strict=True))


@pytest.mark.parametrize("block", BLOCKS)
def test_what_a_worker_loses_the_center_gains(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        random = Random(seed)
        workers = tuple(range(random.randrange(1, 5)))
        made = center_session(workers, ElasticRule(alpha=0.5, tau=1, together=False))
        made.on_message(0, Message(Kind.PARAMETERS, torch.zeros(SIZE)))
        center = [0.0] * SIZE
        for number in range(8):  # as many halvings as a float has room for
            worker, own = random.choice(workers), drawn(random)
            [(to, reply)] = made.on_message(worker, Message(Kind.VECTOR, torch.tensor(own), step=number))
            given = [(mine - its) / 2 for mine, its in zip(own, center, strict=True)]
            center = [its + each for its, each in zip(center, given, strict=True)]
            assert (to, reply.kind, reply.tensor.tolist()) == (worker, Kind.DIFFERENCE, given)
        assert (made.values.tolist(), made.version) == (center, 8)
