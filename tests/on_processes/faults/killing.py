"""A process of a run is killed, or stopped and continued."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

from conformance.jobs import strategy
from on_processes.faults.play import (
    SILENCE_S,
    WORKERS,
    Paced,
    Stage,
    ask_to_stop,
    job_of,
    nothing,
    of,
    played,
    process_of,
    progress,
    said,
    steps_of,
    to_and_fro,
)
from on_processes.faults.seen import Seen, going_on_s, median_step_s, step_times
from polyrhythm.api.faults import Outcome
from polyrhythm.errors import RunError
from polyrhythm.events import CheckpointSaved, Event, Notice, WorkerJoined, WorkerLost
from polyrhythm.roles.job import Job
from polyrhythm.strategies.role_assignment import roles_in_order

PAUSE_S = 0.01
STOPPED = 1


class Death:
    """Kills a rank, and notes when, and who lived then.

    Args:
        rank: of whom.
        steps: where processes note when they began their steps.
    """

    def __init__(self, rank: int, steps: Path) -> None:
        self.rank, self._steps = rank, steps
        self.at_s = 0.0
        self._others: list[int] = []

    def strike(self) -> None:
        self._others = [process_of(worker) for worker in range(WORKERS) if worker != self.rank]
        victim = process_of(self.rank)
        self.at_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)

    def borne(self, text: str, *, waited: bool) -> Seen:
        """Gives what was seen, where the others went on, maybe with a successor that they had to wait for."""
        times = [step_times(self._steps, process) for process in self._others]
        step_s = median_step_s(times, self.at_s)
        return Seen(Outcome.CONTINUES, text, going_on_s(times, self.at_s), step_s, waited)


def paced(job: Job, steps: Path) -> Job:
    """Gives the job with a model that takes its time, and notes when its steps began."""
    steps.mkdir()
    return replace(job, make_model=lambda: Paced(steps, PAUSE_S))


def killed(spec: str, rank: int, folder: Path) -> Seen:
    """Kills a rank, behind the first checkpoint; the run may start one successor."""
    job = paced(
        job_of(spec, folder / "run", restarts=1), folder / "steps"
    )  # a watchdog's word would take minutes
    roles = roles_in_order(WORKERS, job.strategy.traits(WORKERS).servers)
    role = f"worker {rank}" if rank in roles.workers else f"server {roles.servers.index(rank)}"
    words = rf"^{role} \(rank {rank}\) was killed by SIGKILL"
    death = Death(rank, folder / "steps")
    joined = ((of(WorkerJoined), nothing),) if rank in roles.workers[1:] else ()
    after: tuple[Stage, ...] = (
        (said(words), nothing),
        *joined,
        *progress(roles.workers),
        (steps_of(0), ask_to_stop),
    )
    try:
        events = played(job, (of(CheckpointSaved), death.strike), *after)
    except RunError as error:
        text = str(error)
    else:
        _was_asked_to_stop(events)
        return death.borne(_first(words, events), waited=rank == 0 and job.strategy.faults(WORKERS).regroups)
    assert re.search(rf"{words}; continue with --resume", text), text
    return Seen(Outcome.STOPS, text)


def worker_killed(spec: str, folder: Path) -> Seen:
    return killed(spec, WORKERS - 1, folder)


def leader_killed(spec: str, folder: Path) -> Seen:
    return killed(spec, 0, folder)


def server_killed(spec: str, folder: Path) -> Seen:
    assert strategy(spec).traits(1).servers
    return killed(spec, WORKERS, folder)


def stopped(spec: str, folder: Path) -> Seen:
    """Stops a worker until it has been named, and continues it: all go on, and nobody was lost."""
    stages = (*to_and_fro(STOPPED), *progress(range(WORKERS)), (steps_of(0), ask_to_stop))
    events = played(job_of(spec, folder, silence_s=SILENCE_S), *stages)
    _was_asked_to_stop(events)
    assert not [event for event in events if isinstance(event, WorkerLost)]
    return Seen(Outcome.NAMED, _first("has been silent for", events))


def _was_asked_to_stop(events: list[Event]) -> None:
    assert events[-1].to_json()["outcome"] == "interrupted", events[-1]


def _first(words: str, events: list[Event]) -> str:
    """Gives the first notice with such words."""
    return next(str(event.text) for event in events if isinstance(event, Notice) and said(words)(event))
