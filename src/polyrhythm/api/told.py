"""A run being told to its observers, from its folder to its report."""

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

_LOOK_EVERY_S = 1.0


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
def told_run(job: Job, config: RunConfig, observers: Sequence[Observer]) -> Iterator[Told]:
    """Makes the run folder, and removes it again if the request proves wrong before anything has happened.

    Args:
        job: with the folder to be.
        config: written into it.
        observers: are told every event, besides the log.
    """
    folder = job.keeping.folder
    assert folder is not None
    begun = (folder / LOG_FILE).exists()
    claim = run_folder.create(folder, config, job)
    with told_in(folder, config, observers, claim, resumed=begun or job.keeping.resume) as told:
        if begun and not job.keeping.resume:
            told.on_event(Notice(time_s=0, text=f"{folder} has no checkpoint yet: the run begins anew"))
        yield told


@contextmanager
def told_in(
    folder: Path, config: RunConfig, observers: Sequence[Observer], claim: Unclaimed, *, resumed: bool = False
) -> Iterator[Told]:
    """Tells a run whose folder is there; it is removed like that of `told_run`, unless the run is a resumed one."""
    try:
        told = _begun(folder, config, observers, claim)
        try:
            with told:
                yield told
        except (RequestError, KeyboardInterrupt):
            if not told.begun and not resumed and claim.holds():
                run_folder.discard(folder)
            raise
    finally:
        claim.release()


def _begun(folder: Path, config: RunConfig, observers: Sequence[Observer], claim: Unclaimed) -> Told:
    try:
        return Told(folder, config, observers, claim)
    except OSError as error:
        raise RequestError(
            f"cannot write into {folder}: {error.strerror or error}; make room there"
        ) from None


class Told:
    """A run as its observers hear of it; at its end, however that is, the report is written.

    Args:
        folder: of the run.
        config: says whether TensorBoard is wanted.
        observers: besides the log.
        claim: to the folder; the run ends when a later start has it.

    Attributes:
        claim: to the folder.
        hurries: whether there is no time for a report.
    """

    def __init__(
        self, folder: Path, config: RunConfig, observers: Sequence[Observer], claim: Unclaimed
    ) -> None:
        self._folder = folder
        self.claim = claim
        self.hurries = False
        self._looked_s = time.monotonic()
        self._last: Event | None = None
        self._figures = RunFigures()
        self._observers: list[Observer] = [EventLog(folder / LOG_FILE, claim), *observers]
        if config.tensorboard:
            from polyrhythm.reporting.tensorboard import TensorBoardWriter

            self._observers.append(TensorBoardWriter(folder / "tensorboard"))

    def claimed(self, job: Job) -> Job:
        """Gives a job that writes into the folder as this start of the run does."""
        return replace(job, keeping=replace(job.keeping, claim=self.claim))

    def tell(self, observer: Observer) -> None:
        """Tells one more observer, from now on."""
        self._observers.append(observer)

    @property
    def begun(self) -> bool:
        """Whether anything has happened yet."""
        return self._last is not None

    def on_event(self, event: Event) -> None:
        """Tells all observers.

        Raises:
            Superseded: a later start has the folder.
        """
        if isinstance(event, WorkerProgress) and time.monotonic() - self._looked_s > _LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            self.claim.check()
        self._last = event
        self._figures.add(event)
        for observer in self._observers:
            observer.on_event(event)

    def __enter__(self) -> Told:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PolyrhythmError) and self._last is not None:
            result = {"error": str(error).splitlines()[0]}
            self.on_event(RunEnded(time_s=self._last.time_s, outcome="failed", result=result))
        with ExitStack() as stack:  # each is closed, even if another fails
            for observer in self._observers:
                stack.callback(observer.close)
        if self.begun and not self.hurries and not isinstance(error, Preempted) and self.claim.holds():
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
        again = [notice for notice in self._figures.notices if isinstance(notice, Restarted)]
        if again:  # what was done twice counts once
            self._figures = RunFigures.of(read_events(self._folder / LOG_FILE))
        return run_of(self._folder, self._last, self._figures, again)


def run_of(folder: Path, end: RunEnded, seen: RunFigures, again: Sequence[Restarted]) -> Run:
    """Gives a run that is over, with what its leader knew of it and what its events add up to.

    Args:
        folder: of the run.
        end: of the run, in the leader's words.
        seen: all events.
        again: each time that it was started again.
    """
    found = held_back(seen)
    figures = end.result | {"held_back": found.to_json() if found is not None else None}
    figures["restarts"] = len(again)
    figures["updates_lost"] = sum(notice.updates_lost for notice in again)
    figures["stragglers"] = {str(worker): times for worker, times in seen.stragglers.items()}
    if seen.cache:
        figures["cache"] = seen.cache.to_json()
    if seen.timings:
        figures["timings"] = seen.timings.to_json()
    return Run(folder, end.outcome, figures)
