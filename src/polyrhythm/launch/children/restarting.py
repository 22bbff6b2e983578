"""A run that loses a rank without which it cannot go on is started again from its last checkpoint.

session 1   |---C---C-----x  server 0 dies: all ranks end          C: checkpoint
session 2           |-----------C---C---|                          what came after the last one is done again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Event, Restarted, WorkerProgress
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.archive import Archive, Snapshot

Emit = Callable[[Event], None]
Play = Callable[[Job, Emit], bool]


class RankLost(RunError):
    """A process of the run is gone, and the others cannot go on without it; the request was right, and so were they.

    Attributes:
        what: became of which rank, in words.
    """

    def __init__(self, what: str, then: str) -> None:
        super().__init__(f"{what}; {then}")
        self.what = what


class Session:
    """What a launcher hears of a run between two starts.

    Args:
        emit: takes the run's events.
        shift_s: since the first start, by which times are moved.
    """

    def __init__(self, emit: Emit, shift_s: float) -> None:
        self.time_s = shift_s
        self.steps: dict[int, int] = {}
        self._emit = emit
        self._shift_s = shift_s

    def on_event(self, event: Event) -> None:
        """Passes an event on, at a time that counts from the first start."""
        event = replace(event, time_s=event.time_s + self._shift_s)
        self.time_s = max(self.time_s, event.time_s)
        if isinstance(event, WorkerProgress):
            self.steps[event.worker] = event.step
        self._emit(event)


def run_restarting(job: Job, play: Play, emit: Emit, restarts: int) -> bool:
    """Runs a job; again from its last checkpoint when a rank is lost that cannot be done without.

    Args:
        job: what to train; it leaves checkpoints where it is to be started again.
        play: runs a job, and gives whether it was preempted.
        emit: takes the run's events.
        restarts: how often at most.

    Raises:
        RunError: the run failed otherwise, or too often.
    """
    shift_s = 0.0
    for restart in range(1, restarts + 2):
        session = Session(emit, shift_s)
        try:
            return play(job, session.on_event)
        except RankLost as loss:
            if restart > restarts:
                raise
            job, notice = _again(job, session, loss, f"restart {restart} of {restarts}")
            shift_s = session.time_s
            emit(notice)
    raise AssertionError("the last time either ends well or raises")


def steps_held(snapshot: Snapshot, worker: int, workers: int) -> int:
    """Gives how many of a worker's steps a checkpoint holds: as the servers have it, where they count all workers."""
    counts = [facts["steps"] for _, facts in snapshot.servers if len(facts.get("steps", ())) == workers]
    if counts:
        return min(int(count[worker]) for count in counts)
    state = snapshot.workers.get(worker)
    return 0 if state is None else state.account.step


def _again(job: Job, session: Session, loss: RankLost, which: str) -> tuple[Job, Restarted]:
    """Gives the job that goes on, and what is to be said."""
    archive_job = replace(job, keeping=replace(job.keeping, resume=True))
    try:
        snapshot = Archive(archive_job).load()
    except RequestError:  # nothing was saved: from the beginning
        held, where, job = {}, "from the beginning, since there is no checkpoint yet", _anew(job)
    else:
        held = {worker: steps_held(snapshot, worker, job.workers) for worker in session.steps}
        where, job = f"from its last checkpoint, epoch {snapshot.epoch}, step {snapshot.step}", archive_job
    lost = sum(max(0, step - held.get(worker, 0)) for worker, step in session.steps.items())
    text = f"{loss.what}; the run is started again ({which}) {where}: {lost} updates since then are lost"
    return job, Restarted(time_s=session.time_s, text=text, updates_lost=lost)


def _anew(job: Job) -> Job:
    return replace(job, keeping=replace(job.keeping, resume=False))
