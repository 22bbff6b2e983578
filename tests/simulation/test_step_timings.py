"""Where simulated steps go: the figures are those of the model, compute times and links, to rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.jobs import make_job, named, result_of, strategies, strategy
from polyrhythm.communication.forwarding import TimedCommunicator
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.events import Event, WorkerTimings
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.timings import StepParts
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.run import dry_events, simulate
from polyrhythm.simulation.simulated_run import ConstantCluster
from polyrhythm.training.model_sizes import ModelSizes

SIZES = ModelSizes((6_000, 4_000), (0.25, 0.75))
STEPS = 6
SERVED_IN_STEP = "parameter_server(consistency=synchronous)"


def dry_run(spec: str, workers: int) -> DryRun:
    return DryRun(
        strategy=strategy(spec), workers=workers, steps=STEPS, sizes=SIZES, batch_size=4, timings=True
    )


def parts_of(events: list[Event]) -> list[StepParts]:
    return RunFigures.of(events).timings.of_workers()


@pytest.mark.parametrize("spec", named(strategies()))
def test_compute_is_the_models_and_all_else_communication(spec: str) -> None:
    """Nothing but computing and the network takes virtual time, and steps follow each other without a gap."""
    around = ConstantCluster(
        step_s=lambda worker: 0.3 + 0.03 * worker, latency_s=0.005, bandwidth_bytes_per_s=1e6
    )
    events = dry_events(dry_run(spec, 4), around)
    over_s = {event.worker: event.time_s for event in events if isinstance(event, WorkerTimings)}
    found = parts_of(events)
    assert [parts.worker for parts in found] == [0, 1, 2, 3]
    for parts in found:
        step_s = around.step_s(parts.worker)
        assert parts.seconds["forward"] == pytest.approx(parts.steps * step_s / 3)
        assert parts.seconds["backward"] == pytest.approx(parts.steps * step_s * 2 / 3)
        assert [parts.seconds[name] for name in ("data", "update", "other")] == pytest.approx([0, 0, 0])
        assert parts.seconds["communication"] + parts.seconds["waiting"] == pytest.approx(
            over_s[parts.worker] - parts.steps * step_s, abs=1e-9
        )


def test_a_slower_worker_is_waited_for_and_waits_for_nobody() -> None:
    """Links have latency only: a push and an answer a step. The fast worker computes 0.6 s less."""
    around = ConstantCluster(
        step_s=lambda worker: (0.3, 0.9)[worker], latency_s=0.01, bandwidth_bytes_per_s=float("inf")
    )
    fast, slow = parts_of(dry_events(dry_run(SERVED_IN_STEP, 2), around))
    assert (fast.steps, slow.steps) == (STEPS, STEPS)
    assert slow.seconds["waiting"] == pytest.approx(0, abs=1e-9)
    assert fast.seconds["waiting"] == pytest.approx(STEPS * 0.6)
    for parts in (fast, slow):
        assert parts.seconds["communication"] == pytest.approx(STEPS * 2 * 0.01)
        assert parts.total_s == pytest.approx(STEPS * 0.92)


def test_who_is_slow_in_turn_waits_in_turn() -> None:
    """Each step takes 0.5 s of one worker and 0.2 s of the other, who then waits 0.3 s."""
    turns = {0: 0, 1: 1}

    def step_s(worker: int) -> float:
        turns[worker] += 1
        return 0.5 if turns[worker] % 2 else 0.2

    around = ConstantCluster(step_s=step_s, latency_s=0.01, bandwidth_bytes_per_s=float("inf"))
    for parts in parts_of(dry_events(dry_run(SERVED_IN_STEP, 2), around)):
        assert parts.seconds["waiting"] == pytest.approx(STEPS / 2 * 0.3)
        assert parts.seconds["communication"] == pytest.approx(STEPS * 0.02)


def test_a_free_running_worker_alone_pays_for_both_ways() -> None:
    """A push leaves and arrives, an answer comes: both of the model's size, over a link of 1 MB/s and 5 ms."""
    around = ConstantCluster(step_s=lambda worker: 0.3, latency_s=0.005, bandwidth_bytes_per_s=1e6)
    events = dry_events(dry_run("parameter_server(consistency=asynchronous)", 1), around)
    (parts,) = parts_of(events)
    one_way_s = (HEADER_BYTES + 4 * 10_000) / 1e6 + 0.005
    assert parts.seconds["communication"] == pytest.approx(STEPS * 2 * one_way_s, rel=1e-3)


def test_training_tells_the_same_and_learns_the_same() -> None:
    job = make_job("synchronous", 2, epochs=1)
    around = ConstantCluster(step_s=lambda worker: (0.3, 0.9)[worker])
    plain, told = simulate(job, around), simulate(replace(job, timings=True), around)
    assert result_of(told)["parameters_sha256"] == result_of(plain)["parameters_sha256"]
    assert not any(isinstance(event, WorkerTimings) for event in plain)
    fast, slow = parts_of(told)
    steps = job.steps_per_epoch
    assert (fast.steps, slow.steps) == (steps, steps)
    assert [fast.seconds["forward"], slow.seconds["forward"]] == pytest.approx([steps * 0.1, steps * 0.3])
    assert fast.total_s == pytest.approx(slow.total_s, rel=0.01)
    assert fast.seconds["waiting"] == pytest.approx(steps * 0.6, rel=0.01)


def test_a_run_that_is_not_asked_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("wrapped")

    monkeypatch.setattr(TimedCommunicator, "__init__", refuse)
    job = make_job("synchronous", 2, epochs=1)
    result_of(simulate(job, ConstantCluster()))
    dry_events(replace(dry_run("synchronous", 2), timings=False), ConstantCluster())
    with pytest.raises(AssertionError, match="wrapped"):
        simulate(replace(job, timings=True), ConstantCluster())
    with pytest.raises(AssertionError, match="wrapped"):
        dry_events(dry_run("synchronous", 2), ConstantCluster())
