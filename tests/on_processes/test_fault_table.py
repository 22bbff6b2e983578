"""The table of faults: every strategy's processes are stopped, continued, killed, and made to err."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.jobs import result_of, strategy
from on_processes.faults.cells import CELLS
from on_processes.faults.killing import STOPPED
from on_processes.faults.play import (
    SILENCE_S,
    WORKERS,
    ask_to_stop,
    job_of,
    nothing,
    of,
    played,
    progress,
    send,
    steps_of,
    to_and_fro,
)
from polyrhythm.api.faults import VARIATIONS, Fault, Outcome, is_tested, outcomes
from polyrhythm.errors import RunError
from polyrhythm.events import WorkerLost
from polyrhythm.launch import watchdog
from simulation.traces import default_strategies

KILLED = 2
STRATEGIES = [*default_strategies(), *VARIATIONS]
APART = (Fault.STOPPED, Fault.WORKER_KILLED, Fault.CUT_OFF)
"""One run of a strategy shows the first two, one after the other; hosts are cut off in a file of their own."""
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")

TESTED = [
    pytest.param(spec, fault, marks=NEEDS_ROOT if fault is Fault.DISK_FULL else ())
    for spec in STRATEGIES
    for fault, outcome in outcomes(strategy(spec), WORKERS).items()
    if fault not in APART and outcome is not Outcome.NONE and is_tested(spec, fault)
]


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    gc.collect()  # an error that an earlier test caught holds its run's store, which no child could tear down
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture
def _long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is taken for lost, however late a busy machine continues whoever has been stopped."""
    monkeypatch.setattr(watchdog, "LOST_AFTER", 100)


@pytest.mark.usefixtures("_long_silence")
@pytest.mark.parametrize("spec", STRATEGIES)
def test_a_worker_is_stopped_and_continued_and_another_is_killed(spec: str, tmp_path: Path) -> None:
    expected = outcomes(strategy(spec), WORKERS)
    assert expected[Fault.STOPPED] is Outcome.NAMED
    job = job_of(spec, tmp_path, silence_s=SILENCE_S)
    stages = to_and_fro(STOPPED, then=send(KILLED, signal.SIGKILL))
    if expected[Fault.WORKER_KILLED] is Outcome.STOPS:
        with pytest.raises(RunError, match=r"^worker 2 \(rank 2\) was killed by SIGKILL; continue with"):
            played(job, *stages)
        return
    after = (*progress((0, STOPPED)), (steps_of(0), ask_to_stop))
    events = played(job, *stages, (of(WorkerLost), nothing), *after)
    assert events[-1].to_json()["outcome"] == "interrupted"
    assert [(event.worker, event.rank) for event in events if isinstance(event, WorkerLost)] == [(2, 2)]
    assert result_of(events)["workers_lost"] == 1


@pytest.mark.parametrize(("spec", "fault"), TESTED)
def test_the_outcome_is_the_declared_one(spec: str, fault: Fault, tmp_path: Path) -> None:
    seen = CELLS[fault](spec, tmp_path)
    assert seen.fits(outcomes(strategy(spec), WORKERS)[fault])
    assert seen.in_time
