"""Whole runs of AD-PSGD, replayed from nothing but the order in which workers met and had their gradients."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import nn

from conformance.jobs import blobs, make_job, simulated, uneven, vector_of
from equivalence.arrivals import Workers
from polyrhythm.communication.message import Kind
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.strategies.gossip.pairing.keeper import Keeper


class Taken(NamedTuple):
    """A message that a worker's keeper took.

    Attributes:
        worker: whose keeper.
        source: the sender.
        kind: of the message.
        step: that it is about.
        ready: whether the keeper has parameters.
    """

    worker: int
    source: int
    kind: Kind
    step: int
    ready: bool


@pytest.fixture
def taken(monkeypatch):
    """Fills while a job runs."""
    seen: list[Taken] = []
    inner = Keeper.on_message

    def on_message(self, source, message):
        seen.append(Taken(self.place.rank, source, message.kind, message.step, self.ready))
        return inner(self, source, message)

    monkeypatch.setattr(Keeper, "on_message", on_message)
    return seen


class Pairs:
    """x_i, x_j <- (x_i + x_j) / 2 at a meeting; x_i <- x_i - lr g_i, g_i taken at what i read when its step began."""

    def __init__(self, job):
        self.workers = Workers(job, 1)
        self.x = [nn.Parameter(self.workers.start.clone()) for _ in range(job.workers)]
        self.optimizers = [job.learning.optimizer.create([each]) for each in self.x]
        self.asks: dict[int, int] = {}
        self.late: dict[int, int] = {}
        self.met: list[tuple[int, int, int]] = []
        self.averages = [0] * job.workers
        self.read_at = [0] * job.workers
        self.staleness = [Counter() for _ in self.x]

    def replay(self, taken):
        """Takes all meetings and gradients; gives the mean of all workers in the end."""
        for worker, source, kind, step, ready in taken:
            assert ready or kind is Kind.PULL
            if kind is Kind.VECTOR:
                self.meet(source, worker, step)
            elif kind is Kind.PULL:
                self.read(worker)
            elif kind is Kind.DIFFERENCE and worker == source:
                self.asks[worker] = step
            elif kind is Kind.DIFFERENCE:  # its question has been answered
                del self.asks[worker]
                if worker in self.late:
                    self.update(worker, self.late.pop(worker))
            elif kind is Kind.PUSH and worker in self.asks:
                self.late[worker] = step
            elif kind is Kind.PUSH:
                self.update(worker, step)
        assert (self.asks, self.late) == ({}, {})
        return torch.stack([each.detach() for each in self.x]).mean(0)

    def meet(self, one, other, step):
        assert self.asks[one] == step
        middle = (self.x[one].detach() + self.x[other].detach()) / 2
        for each in (one, other):
            self.x[each].data.copy_(middle)
            self.averages[each] += 1
        self.met.append((one, other, step))

    def update(self, worker, step):
        if self.workers.samples(worker, step):
            self.x[worker].grad = self.workers.gradient(worker, step)
            self.optimizers[worker].param_groups[0]["lr"] = self.workers.rate(step)
            self.optimizers[worker].step()
            self.staleness[worker][self.averages[worker] - self.read_at[worker]] += 1
        self.read(worker)

    def read(self, worker):
        self.workers.copies[worker] = self.x[worker].detach().clone()
        self.read_at[worker] = self.averages[worker]


@pytest.mark.parametrize(
    "optimizer", ["sgd(lr=0.2, momentum=0)", "sgd(lr=0.05, momentum=0.8)", "adam(lr=0.01)"]
)
@pytest.mark.parametrize("latency_s", [0.0, 0.003, 0.017])
@pytest.mark.parametrize(("topology", "workers"), [("ring", 4), ("complete", 5)])
def test_a_run_is_its_meetings(topology, workers, latency_s, optimizer, taken):
    """The last step of an epoch has empty batches; an answer may come after the gradient that waits for it."""
    around = ConstantCluster(step_s=uneven, latency_s=latency_s)
    images = blobs(train=16 * workers + 2)
    job = make_job(
        f"ad_psgd(topology={topology})", workers, dtype=torch.float64, dataset=images, optimizer=optimizer
    )
    trained = simulated(job, around)
    reference = Pairs(job)
    expected, found = reference.replay(taken), vector_of(trained.models[0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    told = trained.result["staleness"]["histogram"]
    assert {int(age): count for age, count in told.items()} == sum(reference.staleness, Counter())
    assert (reference.workers.start - found).abs().max() > 0.02
    steps = 2 * job.steps_per_epoch
    active = range(1, workers, 2)
    assert sorted((one, step) for one, _, step in reference.met) == [
        (one, step) for one in active for step in range(steps)
    ]
    around_it = {one: {(one - 1) % workers, (one + 1) % workers} for one in active}
    for one, other, _ in reference.met:
        assert other % 2 == 0
        assert topology == "complete" or other in around_it[one]
    assert len({(one, other) for one, other, _ in reference.met}) > len(active)  # not always the same one
