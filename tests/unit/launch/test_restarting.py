"""A run that loses a rank is started again: from which checkpoint, how often, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.jobs import blobs, make_job, simulated
from polyrhythm.errors import RunError
from polyrhythm.events import Event, Notice, Restarted, WorkerProgress
from polyrhythm.launch.children import RankLost, run_restarting
from polyrhythm.roles.checkpointing.archive import Archive, Snapshot
from polyrhythm.roles.job import Job
from polyrhythm.simulation.simulated_run import ConstantCluster

Emit = Callable[[Event], None]
LOST = RankLost("server 0 (rank 2) was killed by SIGKILL", "continue with --resume a")


def progress(worker: int, step: int, time_s: float = 1.0) -> WorkerProgress:
    return WorkerProgress(
        time_s=time_s,
        worker=worker,
        epoch=0,
        step=step,
        steps=1,
        images=1,
        loss=1.0,
        learning_rate=0.1,
        wait_s=0.0,
    )


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job("parameter_server(servers=2)", 2, dataset=blobs(24), batch_size=4, folder=tmp_path / "a")


def test_it_goes_on_from_the_last_checkpoint_and_counts_what_is_lost(job: Job) -> None:
    simulated(job, ConstantCluster(stop_at_s=0.025))
    (held, *others) = [facts["steps"] for _, facts in _saved(job).servers]
    assert others == [held]
    played: list[bool] = []
    events: list[Event] = []

    def play(session: Job, emit: Emit) -> bool:
        played.append(session.checkpointing.resume)
        emit(progress(0, held[0] + 3, time_s=4.0))
        emit(progress(1, held[1] + 2, time_s=5.0))
        if len(played) == 1:
            raise LOST
        return False

    assert run_restarting(job, play, events.append, restarts=3) is False
    assert played == [False, True]
    (again,) = [event for event in events if isinstance(event, Restarted)]
    assert again.updates_lost == 3 + 2
    assert again.text.startswith(
        "server 0 (rank 2) was killed by SIGKILL; the run is started again (restart 1 of 3) from"
    )
    assert again.text.endswith(f"step {_saved(job).step}: 5 updates since then are lost")
    assert [event.time_s for event in events] == [4.0, 5.0, 5.0, 9.0, 10.0]  # seconds since the first start


def test_without_a_checkpoint_it_begins_anew(job: Job) -> None:
    played: list[bool] = []
    events: list[Event] = []

    def play(session: Job, emit: Emit) -> bool:
        played.append(session.checkpointing.resume)
        emit(progress(0, 7))
        if len(played) == 1:
            raise LOST
        return True

    assert run_restarting(job, play, events.append, restarts=1) is True
    assert played == [False, False]
    (again,) = [event for event in events if isinstance(event, Notice)]
    assert again.text.endswith(
        "from the beginning, since there is no checkpoint yet: 7 updates since then are lost"
    )


@pytest.mark.parametrize("restarts", [0, 2])
def test_it_gives_up_after_as_many_times_as_asked(restarts: int, job: Job) -> None:
    played: list[Job] = []

    def play(session: Job, emit: Emit) -> bool:
        played.append(session)
        emit(progress(0, 1))
        raise LOST

    with pytest.raises(
        RunError, match=r"^server 0 \(rank 2\) was killed by SIGKILL; continue with --resume a$"
    ):
        run_restarting(job, play, lambda event: None, restarts)
    assert len(played) == restarts + 1


def test_what_dies_before_it_has_begun_is_tried_as_often(job: Job) -> None:
    played: list[bool] = []
    events: list[Event] = []

    def play(session: Job, emit: Emit) -> bool:
        played.append(session.checkpointing.resume)
        raise LOST

    with pytest.raises(RankLost):
        run_restarting(job, play, events.append, restarts=2)
    assert played == [False] * 3
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert [text.partition("; ")[2] for text in texts] == [
        f"the run is started again (restart {number} of 2) from the beginning, since there is no checkpoint yet: "
        "0 updates since then are lost"
        for number in (1, 2)
    ]


def test_other_failures_are_not_tried_again(job: Job) -> None:
    played: list[Job] = []

    def play(session: Job, emit: Emit) -> bool:
        played.append(session)
        raise RunError("worker 0 (rank 0): a bug")

    with pytest.raises(RunError, match="a bug"):
        run_restarting(job, play, lambda event: None, restarts=3)
    assert len(played) == 1


def _saved(job: Job) -> Snapshot:
    return Archive(job).load()
