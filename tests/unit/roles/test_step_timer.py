"""Where steps go, by a clock that is set by hand; whole runs are in `tests/simulation` and `tests/on_processes`."""

from __future__ import annotations

from polyrhythm.communication.activity import Blocked
from polyrhythm.events import WorkerProgress, WorkerTimings, from_json
from polyrhythm.roles.step_metrics import StepTimer, Timekeeping


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
    timer.start(50.0)
    clock.sleep(1.0)  # belongs to no step
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
    told = timer.report(progress(81.0, 2), in_step=True)
    assert told == WorkerTimings(
        time_s=50.0 + 1.0 + 7.9375 + 10.0 + 7.9375,
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
            ["data", 51.0, 51.25],
            ["forward", 51.25, 52.75],
            ["backward", 52.75, 54.75],
            ["update", 54.75, 58.875],
            ["other", 58.875, 58.9375],
            ["communication: receive", 52.25, 52.75],
            ["communication: all-reduce", 54.875, 58.875],
        ],
    )
    assert from_json(told.to_json()) == told
    again = timer.report(progress(81.0, 2), in_step=False)
    assert again == WorkerTimings(time_s=told.time_s, worker=1, step=2, steps=0)
