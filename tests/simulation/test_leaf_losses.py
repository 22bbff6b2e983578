"""Leaves of hierarchical servers lose workers, and get them back, at every moment of a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from conformance.jobs import blobs, make_job, result_of, strategy
from polyrhythm.communication.message import Kind, Message
from polyrhythm.events import RunEnded
from polyrhythm.simulation.trials import try_seeds
from polyrhythm.strategies.parameter_server.hierarchical import LeafGate, LeafRule, LeafSession
from polyrhythm.strategies.parameter_server.serving.rule import Applied, Contribution, Reply
from sample import failures_of
from simulation.deaths import events_of
from simulation.trying import layers, trial

WORKERS, IMAGES, BATCH_SIZE, LENGTH, LOST = 4, 70, 4, 5, 3
STEPS = 2 * LENGTH
MOMENTS = [0.021, 0.048, 0.1, 0.13]
SPECS = [
    "hierarchical",
    "hierarchical(groups=3, servers=2)",
    "hierarchical(groups=3, servers=2, consistency=asynchronous)",
    "hierarchical(consistency=bounded_staleness(s=1), groups=3)",
    "hierarchical(groups=3, consistency=backup(spare=1))",
]


@pytest.mark.parametrize("pause_s", [None, 0.0005, 0.03])
@pytest.mark.parametrize("spec", ["hierarchical", "hierarchical(servers=2, consistency=asynchronous)"])
@pytest.mark.parametrize("at_s", MOMENTS)
def test_a_leaf_goes_on_without_a_worker_or_with_its_successor(
    at_s: float, spec: str, pause_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[int] = set()
    on_message = LeafSession.on_message

    def noted(self: LeafSession, source: int, message: Message) -> list[Reply]:
        replies = on_message(self, source, message)
        if source == LOST and message.kind is Kind.PUSH:
            taken.add(message.step)
        return replies

    monkeypatch.setattr(LeafSession, "on_message", noted)
    job = make_job(spec, WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE)
    back = [] if pause_s is None else [(at_s + pause_s, LOST)]
    events = events_of(job, [(at_s, LOST)], back)
    result = result_of(events)
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].outcome, result["steps"]) == ("done", STEPS)
    missed = [job.calendar.images(step, LOST) for step in range(STEPS) if step not in taken]
    assert result["images_not_seen"] == sum(missed)
    if pause_s is not None and at_s < 0.1:
        assert result["workers_joined"] == 1


@pytest.mark.parametrize("at_s", MOMENTS[1:3])
def test_a_group_that_all_are_lost_of_leaves_the_roots_and_comes_back(at_s: float) -> None:
    job = make_job("hierarchical(servers=2)", WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE)
    events = events_of(job, [(at_s, 2), (at_s + 0.001, 3)], [(at_s + 0.015, 2)])
    assert result_of(events)["steps"] == STEPS
    assert result_of(events)["workers_joined"] == 1
    alone = events_of(job, [(at_s, 2), (at_s, 3)])
    assert (result_of(alone)["steps"], result_of(alone)["workers_lost"]) == (STEPS, 2)


@pytest.mark.parametrize("spec", SPECS)
def test_what_roots_hold_is_the_sum_of_what_leaves_took_under_many_seeds(spec: str) -> None:
    assert failures_of(trial(spec, workers=6, steps=6), range(12)) == ()


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_passed_on_bucket_by_bucket_counts_once_whoever_is_lost(spec: str) -> None:
    assert failures_of(layers(spec, workers=6), range(10)) == ()


def test_a_mean_without_what_a_lost_worker_had_pushed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = LeafRule.apply

    def without(self: LeafRule, batch: Sequence[Contribution], version: int) -> Applied:
        assert isinstance(self.gate, LeafGate)
        there = [entry for entry in batch if entry.pusher in self.gate.present]
        return apply(self, there or batch, version)

    monkeypatch.setattr(LeafRule, "apply", without)
    assert try_seeds(trial("hierarchical", workers=6, steps=6), range(12)).failures


def test_the_loss_of_a_leaf_ends_the_run() -> None:
    made = strategy("hierarchical(consistency=asynchronous)")
    assert made.faults(4).continues
    assert made.faults(4).leader
    assert [made.faults(4).keeps_shards([0]), made.faults(1).continues, made.faults(1).leader] == [False] * 3
    assert strategy(SPECS[-1]).faults(6).spares == 1
