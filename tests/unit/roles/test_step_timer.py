"""Where steps go: by a clock that is set by hand, and by the model of a simulated run."""

from __future__ import annotations

import pytest

from conformance.jobs import make_job, strategy
from polyrhythm.communication.timed import Blocked
from polyrhythm.events import Event, RunEnded, WorkerProgress, WorkerTimings, from_json
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.roles.rehearsal import Rehearsal
from polyrhythm.roles.step_timer import NoTimer, StepTimer, Timekeeping
from polyrhythm.simulation.rehearse import rehearsed
from polyrhythm.simulation.run import simulate
from polyrhythm.simulation.stage import Surroundings
from polyrhythm.training.model_sizes import ModelSizes


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


def progress(time_s: float, step: int) -> WorkerProgress:
    return WorkerProgress(
        time_s=time_s, worker=1, epoch=0, step=step, steps=2, images=8, loss=1.0, learning_rate=0.1
    )


def test_laps_add_up_to_the_step_and_blocked_time_is_taken_off_them() -> None:
    clock = Clock()
    blocked = Blocked(clock)
    timer = StepTimer(clock, blocked, Timekeeping(traced_steps=1))
    clock.sleep(50.0)  # belongs to no step
    for step in (1, 2):
        timer.begin()
        clock.sleep(0.25)
        timer.lap("data")
        clock.sleep(1.0)
        with blocked.by("receive"):  # waits for parameters inside the forward pass
            clock.sleep(0.5)
        timer.lap("forward")
        clock.sleep(2.0)
        timer.lap("backward")
        clock.sleep(0.125)
        with blocked.by("all-reduce"):
            clock.sleep(4.0)
        timer.lap("update")
        clock.sleep(0.0625)
        timer.end_step(step)
        clock.sleep(10.0)  # a report
    told = timer.say(progress(clock.time_s - 100.0, 2), in_step=True)
    assert told == WorkerTimings(
        time_s=clock.time_s - 100.0,
        worker=1,
        step=2,
        steps=2,
        data_s=0.5,
        forward_s=2.0,
        backward_s=4.0,
        update_s=0.25,
        communication_s=9.0,
        other_s=0.125,
        in_step=True,
        communication=[[1, 4.5], [2, 4.5]],
        spans=[
            ["data", 50.0, 50.25],
            ["forward", 50.25, 51.75],
            ["backward", 51.75, 53.75],
            ["update", 53.75, 57.875],
            ["other", 57.875, 57.9375],
            ["communication: receive", 51.25, 51.75],
            ["communication: all-reduce", 53.875, 57.875],
        ],
    )
    assert from_json(told.to_json()) == told
    again = timer.say(progress(80.0, 2), in_step=False)
    assert again == WorkerTimings(time_s=80.0, worker=1, step=2, steps=0)


def test_a_step_that_was_broken_off_is_forgotten() -> None:
    clock = Clock()
    timer = StepTimer(clock, Blocked(clock), Timekeeping())
    timer.begin()
    clock.sleep(3.0)
    timer.lap("forward")
    timer.begin()
    clock.sleep(1.0)
    timer.end_step(1)
    told = timer.say(progress(4.0, 1), in_step=False)
    assert told == WorkerTimings(time_s=4.0, worker=1, step=1, steps=1, other_s=1.0)


def test_a_lap_ends_when_the_device_has_done_its_work() -> None:
    clock = Clock()
    timer = StepTimer(clock, Blocked(clock), Timekeeping(finish=lambda: clock.sleep(1.0)))
    timer.begin()
    timer.lap("forward")
    timer.end_step(1)
    told = timer.say(progress(2.0, 1), in_step=False)
    assert told is not None
    assert (told.forward_s, told.other_s) == (1.0, 1.0)


def test_who_is_not_asked_says_nothing() -> None:
    timer = NoTimer()
    timer.begin()
    timer.lap("data")
    timer.end_step(1)
    assert timer.say(progress(1.0, 1), in_step=True) is None


SIZES = ModelSizes((600_000, 400_000), (0.25, 0.75))
STEPS = 4


def rehearsal(spec: str, workers: int) -> Rehearsal:
    return Rehearsal(
        strategy=strategy(spec), workers=workers, steps=STEPS, sizes=SIZES, batch_size=4, timings=True
    )


def figures_of(events: list[Event]) -> RunFigures:
    assert isinstance(events[-1], RunEnded)
    return RunFigures.of(events)


def test_a_simulated_run_goes_where_its_model_says() -> None:
    """Two workers over one bucket: the slower one never waits, the faster one as long as the other computes longer."""
    job = make_job("synchronous", 2)
    plain = simulate(job, Surroundings(step_s=lambda worker: 0.3))
    assert not figures_of(plain).timings
    assert not any(isinstance(event, WorkerTimings) for event in plain)

    around = Surroundings(step_s=lambda worker: (0.3, 0.9)[worker], latency_s=0.01)
    fast, slow = figures_of(
        rehearsed(rehearsal("parameter_server(consistency=synchronous)", 2), around)
    ).timings.of_workers()
    assert (fast.steps, slow.steps) == (STEPS, STEPS)
    assert fast.seconds["forward"] == pytest.approx(STEPS * 0.1)
    assert fast.seconds["backward"] == pytest.approx(STEPS * 0.2)
    assert slow.seconds["forward"] == pytest.approx(STEPS * 0.3)
    assert slow.seconds["backward"] == pytest.approx(STEPS * 0.6)
    assert slow.seconds["waiting"] == 0
    assert fast.seconds["waiting"] == pytest.approx(STEPS * 0.6, rel=0.02)
    assert fast.seconds["communication"] == pytest.approx(slow.seconds["communication"])
