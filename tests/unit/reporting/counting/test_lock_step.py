"""What lockstep would have cost, from events made by hand; and beside a lockstep run of the same cluster."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from conformance.jobs import blobs, make_job, simulated
from polyrhythm.events import ServerProgress
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.held_back import LockStep, held_back
from polyrhythm.simulation.run import ConstantCluster
from unit.reporting.counting.ten_steps import ten_steps


def compared(
    workers: list[tuple[float, float]], *, busy: float, updating_s: float, staleness: int = 1
) -> LockStep | None:
    """Ten steps a worker: each computes and waits for so many seconds in all; one server of ten seconds."""
    figures = ten_steps(workers, servers=1)
    figures.add(
        ServerProgress(
            time_s=10,
            server=0,
            version=20,
            staleness={staleness: 10 * len(workers)},
            seconds=10.0,
            busy_share=busy,
            queue=2.0,
            updating_s=updating_s,
        )
    )
    told = held_back(figures)
    assert told is not None
    if told.lock_step is not None:
        assert told.text.endswith(f"; {told.lock_step.text}")
        assert asdict(told)["lock_step"]["lock_step_s"] == told.lock_step.lock_step_s
    return told.lock_step


@pytest.mark.parametrize(
    ("workers", "busy", "updating_s"),
    [([(1.0, 9.0), (1.0, 9.0)], 1.0, 9.0), ([(1.0, 9.0), (1.0, 0.0)], 0.0, 0.0)],
)
def test_a_lower_bound_of_lock_step_is_no_reason_to_call_a_run_slower(
    workers: list[tuple[float, float]], busy: float, updating_s: float
) -> None:
    """1 s, and 0.182 s, for a gradient of every worker, where lockstep would take at least 0.65 s and 0.1 s."""
    assert compared(workers, busy=busy, updating_s=updating_s) is None


def test_a_straggler_makes_it_quicker_than_lock_step() -> None:
    """10 steps in 10 s, and in 40 s: 1.25 steps a second of two, while lockstep waits for 3.9 s every time."""
    found = compared([(9.0, 1.0), (39.0, 1.0)], busy=0.1, updating_s=0.5)
    assert found is not None
    assert found.free_running_s == pytest.approx(2 / (1 + 0.25))
    assert found.lock_step_s == pytest.approx(3.9 + max(2 * 0.025 + 0.025, 0.1 - 0.025))
    assert "synchronous training would take about 3.98 s or more" in found.text


def test_in_lock_step_and_alone_nothing_is_compared() -> None:
    assert compared([(1.0, 9.0), (1.0, 9.0)], busy=1.0, updating_s=9.0, staleness=0) is None
    assert compared([(1.0, 9.0)], busy=1.0, updating_s=9.0) is None


@pytest.mark.parametrize("bandwidth_bytes_per_s", [1e9, 1e5])
def test_what_it_says_of_lock_step_is_what_lock_step_takes(bandwidth_bytes_per_s: float) -> None:
    """A slow worker and a network, quick or slow, in virtual time: updates take none, so only those count."""

    def step_s(worker: int) -> float:
        return 0.03 if worker == 1 else 0.01

    around = ConstantCluster(step_s=step_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    free, together = (
        simulated(make_job(f"parameter_server(consistency={name})", 3, dataset=blobs(train=600)), around)
        for name in ("asynchronous", "synchronous")
    )
    told = held_back(RunFigures.of(free.events))
    assert told is not None
    assert told.lock_step is not None
    taken = together.result["seconds"] / together.result["steps"]
    assert told.lock_step.lock_step_s == pytest.approx(taken, rel=0.25)
    assert told.lock_step.free_running_s < told.lock_step.lock_step_s
