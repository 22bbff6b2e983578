"""A run's folder, its event log and its other observers, from its first event to its report."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyrhythm.api import run_folder
from polyrhythm.claim import Superseded, Unclaimed
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import PolyrhythmError, RequestError
from polyrhythm.events import Event, Notice, Restarted, RunEnded, WorkerProgress
from polyrhythm.launch.preemption import Preempted
from polyrhythm.reporting.counting.figures import RunFigures
from polyrhythm.reporting.counting.held_back import held_back
from polyrhythm.reporting.event_log import LOG_FILE, EventLog, read_events
from polyrhythm.reporting.observer import Observer
from polyrhythm.reporting.pages.report import write_report
from polyrhythm.roles.job import Job

_CHECK_EVERY_S = 1.0


@dataclass(frozen=True)
class Run:
    """A run that is over.

    Attributes:
        folder: all that it left.
        outcome: `done` or `interrupted`.
        figures: as `train --json` prints them.
        preempted: whether it was interrupted because its host is taken away.
        before: whether it had ended already, and nothing was left to do.
    """

    folder: Path
    outcome: str
    figures: dict[str, Any]
    preempted: bool = False
    before: bool = False


@contextmanager
def observed_run(job: Job, config: RunConfig, observers: Sequence[Observer]) -> Iterator[ObservedRun]:
    """Makes the run folder, and the run in it; removes the folder if the request is refused before the first event.

    Args:
        job: with the folder to be.
        config: written into it.
        observers: get every event, as the log does.
    """
    folder = job.keeping.folder
    assert folder is not None
    begun = (folder / LOG_FILE).exists()
    claim = run_folder.create(folder, config, job)
    with observed_run_in(folder, config, observers, claim, resumed=begun or job.keeping.resume) as observed:
        if begun and not job.keeping.resume:
            observed.on_event(Notice(time_s=0, text=f"{folder} has no checkpoint yet: the run begins anew"))
        yield observed


@contextmanager
def observed_run_in(
    folder: Path, config: RunConfig, observers: Sequence[Observer], claim: Unclaimed, *, resumed: bool = False
) -> Iterator[ObservedRun]:
    """Does what `observed_run` does in a folder that exists; the folder of a resumed run is never removed."""
    try:
        observed = _begun(folder, config, observers, claim)
        try:
            with observed:
                yield observed
        except (RequestError, KeyboardInterrupt):
            if not observed.begun and not resumed and claim.holds():
                run_folder.discard(folder)
            raise
    finally:
        claim.release()


def _begun(folder: Path, config: RunConfig, observers: Sequence[Observer], claim: Unclaimed) -> ObservedRun:
    try:
        return ObservedRun(folder, config, observers, claim)
    except OSError as error:
        raise RequestError(
            f"cannot write into {folder}: {error.strerror or error}; make room there"
        ) from None


class ObservedRun:
    """Passes a run's events to its observers, the event log first; when it ends or fails, writes the report.

    Args:
        folder: of the run.
        config: says whether TensorBoard is wanted.
        observers: those beside the log.
        claim: to the folder; the run ends when a later start has it.

    Attributes:
        claim: to the folder.
        skips_report: whether there is no time to write one.
    """

    def __init__(
        self, folder: Path, config: RunConfig, observers: Sequence[Observer], claim: Unclaimed
    ) -> None:
        self._folder = folder
        self.claim = claim
        self.skips_report = False
        self._checked_s = time.monotonic()
        self._last: Event | None = None
        self._figures = RunFigures()
        self._observers: list[Observer] = [EventLog(folder / LOG_FILE, claim), *observers]
        if config.tensorboard:
            from polyrhythm.reporting.tensorboard import TensorBoardWriter

            self._observers.append(TensorBoardWriter(folder / "tensorboard"))

    def claimed(self, job: Job) -> Job:
        """Gives a job that writes into the folder as this start of the run does."""
        return replace(job, keeping=replace(job.keeping, claim=self.claim))

    def add_observer(self, observer: Observer) -> None:
        """Passes events to one more observer from now on."""
        self._observers.append(observer)

    @property
    def begun(self) -> bool:
        """Whether anything has happened yet."""
        return self._last is not None

    def on_event(self, event: Event) -> None:
        """Passes an event to all observers.

        Raises:
            Superseded: a later start has the folder.
        """
        if isinstance(event, WorkerProgress) and time.monotonic() - self._checked_s > _CHECK_EVERY_S:
            self._checked_s = time.monotonic()
            self.claim.check()
        self._last = event
        self._figures.add(event)
        for observer in self._observers:
            observer.on_event(event)

    def __enter__(self) -> ObservedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PolyrhythmError) and self._last is not None:
            result = {"error": str(error).splitlines()[0]}
            self.on_event(RunEnded(time_s=self._last.time_s, outcome="failed", result=result))
        with ExitStack() as stack:  # each is closed, even if another fails
            for observer in self._observers:
                stack.callback(observer.close)
        if self.begun and not self.skips_report and not isinstance(error, Preempted) and self.claim.holds():
            self._write_report()

    def _write_report(self) -> None:
        try:
            write_report(self._folder, self.claim)
        except Superseded:  # between the two
            return
        except OSError as error:  # what the run has come to is more than its report
            reason = f"cannot write the report of {self._folder}: {error.strerror or error}"
            print(f"polyrhythm: {reason}", file=sys.stderr, flush=True)

    def run(self) -> Run:
        """Gives the run, once it is over."""
        assert isinstance(self._last, RunEnded), "a run that did not fail ends with RunEnded"
        restarts = [notice for notice in self._figures.notices if isinstance(notice, Restarted)]
        if restarts:  # what was done twice counts once
            self._figures = RunFigures.of(read_events(self._folder / LOG_FILE))
        return run_of(self._folder, self._last, self._figures, restarts)


def run_of(folder: Path, end: RunEnded, seen: RunFigures, restarts: Sequence[Restarted]) -> Run:
    """Gives a run that is over, with what its leader knew of it and what its events add up to.

    Args:
        folder: of the run.
        end: of the run, in the leader's words.
        seen: all events.
        restarts: every time that it was started again.
    """
    found = held_back(seen)
    figures = end.result | {"held_back": found.to_json() if found is not None else None}
    figures["restarts"] = len(restarts)
    figures["updates_lost"] = sum(notice.updates_lost for notice in restarts)
    figures["stragglers"] = {str(worker): times for worker, times in seen.stragglers.items()}
    if seen.cache:
        figures["cache"] = seen.cache.to_json()
    if seen.timings:
        figures["timings"] = seen.timings.to_json()
    return Run(folder, end.outcome, figures)
