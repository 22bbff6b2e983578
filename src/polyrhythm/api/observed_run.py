"""Output of a run on disk: its folder, its event log and its other observers, up to its report.

The folder holds `config.yaml`, a complete recipe of this run, `data.json`, a record of the data (`data/record.py`), and
`environment.json`, a description of the machine.
It is claimed by the start that writes into it. A new run's folder is removed if the request is
refused before the first event.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from polyrhythm.claim import Claim, Superseded, Unclaimed, claim, is_staging, open_new
from polyrhythm.config.recipe import CONFIG_FILE, ENVIRONMENT_FILE, RUN_FORMAT, write_recipe
from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.stages import Stages
from polyrhythm.data.dataset import Dataset
from polyrhythm.data.record import DATA_FILE, DataRecord, read_record
from polyrhythm.errors import PolyrhythmError, RequestError
from polyrhythm.evaluation.target import Target
from polyrhythm.events import Evaluated, Event, Notice, Restarted, RunEnded, RunStarted, WorkerProgress
from polyrhythm.launch.devices import available_cores
from polyrhythm.launch.energy import EnergyCounter
from polyrhythm.launch.process import lost_output
from polyrhythm.launch.signals import Preempted, asked_to_stop
from polyrhythm.reporting.event_log import LOG_FILE, EventLog, Observer, read_events
from polyrhythm.reporting.figures import RunFigures, noise_scale
from polyrhythm.reporting.held_back import held_back
from polyrhythm.reporting.pages.report import write_report
from polyrhythm.reporting.quantities import counted
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.roles.checkpointing.recording import processor
from polyrhythm.roles.job import Job
from polyrhythm.run_files import MOST_LISTING_BYTES, check_folder_in_run, exists_in_run, read_in_run
from polyrhythm.user_files import check_is_file, check_new_folder

_CHECK_EVERY_S = 1.0
_WRITTEN_FIRST = (DATA_FILE, CONFIG_FILE, ENVIRONMENT_FILE)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: output folder of the run.
        outcome: `done` or `interrupted`.
        figures: results as `train --json` prints them.
        preempted: whether it was interrupted because its host is taken away.
        before: whether it had ended already, and there was nothing left to do.
    """

    folder: Path
    outcome: str
    figures: dict[str, Any]
    preempted: bool = False
    before: bool = False


@contextmanager
def observed_run(job: Job, config: RunConfig, observers: Sequence[Observer]) -> Iterator[ObservedRun]:
    """Make the run folder, and the run in it; remove the folder if the request is refused before the first event.

    Args:
        job: job with the path of the folder.
        config: written into it.
        observers: receivers of every event, as the log does.
    """
    folder = job.checkpointing.folder
    assert folder is not None
    begun = (folder / LOG_FILE).exists()
    claim = create_folder(folder, config, job)
    with observed_run_in(
        folder, config, observers, claim, resumed=begun or job.checkpointing.resume
    ) as observed:
        if begun and not job.checkpointing.resume:
            observed.on_event(Notice(time_s=0, text=f"{folder} has no checkpoint yet: the run starts again"))
        yield observed


@contextmanager
def observed_run_in(
    folder: Path, config: RunConfig, observers: Sequence[Observer], claim: Unclaimed, *, resumed: bool = False
) -> Iterator[ObservedRun]:
    """Like `observed_run` in a folder that exists; the folder of a resumed run is never removed."""
    try:
        with asked_to_stop():  # before and after the run they wait: files are written whole
            observed = _begun(folder, config, observers, claim)
            try:
                with observed:
                    yield observed
            except (RequestError, KeyboardInterrupt):
                if not observed.begun and not resumed and claim.holds():
                    discard_folder(folder)
                raise
    finally:
        claim.release()


def _begun(folder: Path, config: RunConfig, observers: Sequence[Observer], claim: Unclaimed) -> ObservedRun:
    try:
        return ObservedRun(folder, config.tensorboard, observers, claim)
    except OSError as error:
        raise RequestError(
            f"cannot write into {folder}: {error.strerror or error}; make room there"
        ) from None


class ObservedRun:
    """Passes a run's events to its observers, the event log first; writes the report when the run ends or fails.

    Args:
        folder: folder of the run.
        tensorboard: whether to write TensorBoard files.
        observers: observers in addition to the log.
        claim: claim to the folder; the run ends when a later start has claimed it.

    Attributes:
        claim: claim to the folder.
        skips_report: whether there is no time to write one.
        energy: energy of this host; None where the run's clock is another's.
    """

    def __init__(
        self, folder: Path, tensorboard: bool, observers: Sequence[Observer], claim: Unclaimed
    ) -> None:
        self._folder = folder
        self.claim = claim
        self.skips_report = False
        self.energy: EnergyCounter | None = None
        self._checked_s = time.monotonic()
        self._last: Event | None = None
        self._unwritten: dict[str, tuple[int, OSError]] = {}  # by observer: how often, and why at first
        self._figures = RunFigures()
        self._files = {
            path: read_in_run(path, MOST_LISTING_BYTES)
            for path in map(folder.joinpath, _WRITTEN_FIRST)
            if exists_in_run(path)
        }
        self._log = EventLog(folder / LOG_FILE, claim)
        self._observers: list[Observer] = [self._log, *observers]
        if tensorboard:
            from polyrhythm.reporting.loggers import TensorBoardWriter

            check_folder_in_run(folder / "tensorboard")
            self._observers.append(TensorBoardWriter(folder / "tensorboard"))

    def claimed(self, job: Job) -> Job:
        """Return the job with this start's claim to the folder."""
        return replace(job, checkpointing=replace(job.checkpointing, claim=self.claim))

    def reserve(self, path: Path, nbytes: int) -> None:
        """Allocate disk space for a file that is written at the end, before a log takes the last of it.

        Raises:
            RequestError: there is no room for it.
        """
        draft = self.claim.draft(path)
        try:
            with open_new(draft) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # some file systems cannot
                return
            with suppress(OSError):
                draft.unlink()
            raise RequestError(
                f"{self._folder} has no room for the model, {nbytes:,} bytes ({error.strerror}): make some, or name "
                "another folder with --out"
            ) from None

    def add_observer(self, observer: Observer) -> None:
        """Pass events to one more observer from now on."""
        self._observers.append(observer)

    @property
    def begun(self) -> bool:
        """Whether there has been any event."""
        return self._last is not None

    def on_event(self, event: Event) -> None:
        """Pass an event to all observers.

        Raises:
            Superseded: a later start has claimed the folder.
        """
        # Checked once a second at most: it is a system call, and a run may lie on a network file system.
        if isinstance(event, WorkerProgress) and time.monotonic() - self._checked_s > _CHECK_EVERY_S:
            self._checked_s = time.monotonic()
            self._look_after_folder(event.time_s)
            if self.energy is not None:
                self.energy.look()
        if isinstance(event, RunEnded):  # which stays the last event
            event = self._with_energy(event)
            self._look_after_folder(event.time_s)
            for text in self._unwritten_texts():
                self._log.on_event(Notice(time_s=event.time_s, text=text))
        self._last = event
        self._figures.add(event)
        for observer in self._observers:
            self._try(observer, lambda observer=observer: observer.on_event(event))  # type: ignore[misc]

    def _with_energy(self, end: RunEnded) -> RunEnded:
        """Return the end of a run with what this host took in the meantime, if that is known."""
        if self.energy is None:
            return end
        self.energy.look()
        taken = {"energy_j": self.energy.joules, "gpu_energy_j": self.energy.gpu_joules}
        known = {name: joules for name, joules in taken.items() if joules is not None}
        return replace(end, result={**end.result, **known}) if known else end

    def _look_after_folder(self, time_s: float) -> None:
        """Make the folder again if it was deleted, renamed or unmounted, with all that this process has of it."""
        self.claim.check()
        if self._log.in_place:
            return
        if self._try(self._log, self._write_again):
            text = (
                f"{self._folder} was deleted, renamed or unmounted: it is created again, and the run continues; "
                "earlier "
                "checkpoints are not in it"
            )
            self.on_event(Notice(time_s=time_s, text=text))

    def _write_again(self) -> None:
        for path, content in self._files.items():
            with open_new(self.claim.draft(path)) as file:
                file.write(content)
            self.claim.publish(path)
        self._log.write_again()

    def _try(self, observer: Observer, act: Callable[[], None]) -> bool:
        """Let an observer act; what it cannot write ends no run."""
        try:
            act()
        except OSError as error:
            name = type(observer).__name__
            count, first = self._unwritten.get(name, (0, error))
            self._unwritten[name] = count + 1, first
            return False
        return True

    def __enter__(self) -> ObservedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PolyrhythmError) and self._last is not None:
            result = {"error": str(error).splitlines()[0]}
            self.on_event(RunEnded(time_s=self._last.time_s, outcome="failed", result=result))
        with ExitStack() as stack:  # each is closed, even if another fails
            for observer in self._observers:
                stack.callback(self._try, observer, observer.close)
        for text in self._unwritten_texts():
            print(f"polyrhythm: {text}; the run continued", file=sys.stderr, flush=True)
        if self.begun and not self.skips_report and not isinstance(error, Preempted) and self.claim.holds():
            self._write_report()

    def _unwritten_texts(self) -> list[str]:
        texts = [
            f"{name} could not write {counted(count, 'time')} ({error.strerror or error})"
            for name, (count, error) in self._unwritten.items()
        ]
        if (lost := lost_output(2)) is not None:
            texts.append(f"{lost[0]} bytes could not be written to standard error ({lost[1].strerror})")
        return texts

    def _write_report(self) -> None:
        try:
            write_report(self._folder, self.claim)
        except (Superseded, RequestError):  # between the two; or it failed again before it had started
            return
        except OSError as error:  # the run's result matters more than its report
            reason = f"cannot write the report of {self._folder}: {error.strerror or error}"
            print(f"polyrhythm: {reason}", file=sys.stderr, flush=True)

    def run(self) -> Run:
        """Return the run, once it is over."""
        assert isinstance(self._last, RunEnded), "a run that did not fail ends with RunEnded"
        restarts = [notice for notice in self._figures.notices if isinstance(notice, Restarted)]
        started = self._figures.started
        # Repeated work counts once, and work before a resume as the report has it.
        if restarts or (started is not None and started.resumed_step is not None):
            self._figures = RunFigures.of(read_events(self._folder / LOG_FILE))
        return run_of(self._folder, self._last, self._figures, restarts)


def run_of(folder: Path, end: RunEnded, seen: RunFigures, restarts: Sequence[Restarted]) -> Run:
    """Return a run that is over, with the leader's figures and those that follow from its events.

    Args:
        folder: folder of the run.
        end: the last event.
        seen: figures of all events.
        restarts: restarts of the run.
    """
    found = held_back(seen)
    figures = end.result | {"held_back": asdict(found) if found is not None else None}
    sustained = seen.sustained_images_per_s
    figures["sustained_images_per_s"] = None if math.isnan(sustained) else sustained
    if seen.evaluations:
        highest = max(seen.evaluations, key=lambda each: each.test_top1)
        figures["best"] = {"epoch": highest.epoch, "test_top1": highest.test_top1}
    figures["restarts"] = len(restarts)
    figures["updates_lost"] = sum(notice.updates_lost for notice in restarts)
    figures["images_unreadable"] = len(seen.left_out)
    figures["stragglers"] = {str(worker): times for worker, times in seen.stragglers.items()}
    if noise := noise_scale(seen.noise):
        figures["noise_scale"] = noise
    if seen.cache:
        figures["cache"] = seen.cache.to_json()
    if seen.timings:
        figures["timings"] = seen.timings.to_json()
    return Run(folder, end.outcome, figures)


def tested_epochs(folder: Path, until: str | None) -> int:
    """Return the number of epochs after which the run of a folder was tested last; 0: not yet.

    A test that has reached the target does not count: a run that was killed after it ends by it again.

    Raises:
        RequestError: the log is damaged, or the target cannot be read.
    """
    target = None if until is None else Target.parse(until)
    log = folder / LOG_FILE
    tests = [event for event in read_events(log) if isinstance(event, Evaluated)] if log.exists() else []
    return max((test.epoch for test in tests if target is None or not target.reached_by(test)), default=0)


def finished_run(folder: Path) -> Run | None:
    """Return the run of a folder if it has ended well, with its figures; None if it has not.

    Raises:
        RequestError: the log is damaged.
    """
    log = folder / LOG_FILE
    events = read_events(log) if log.exists() else []
    last = next((event for event in reversed(events) if isinstance(event, RunStarted | RunEnded)), None)
    if not isinstance(last, RunEnded) or last.outcome != "done":
        return None
    again = [event for event in events if isinstance(event, Restarted)]
    return replace(run_of(folder, last, RunFigures.of(events), again), before=True)


RUNS = Path("runs")


def choose_folder(out: str | Path | None, name: str) -> Path:
    """Choose the folder of a new run, without creating it.

    Args:
        out: path given by the user; None: a new one under `runs/`.
        name: name for that one.

    Raises:
        RequestError: the folder is in use.
    """
    if out is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        candidates = (
            RUNS / f"{stamp}-{name}{suffix}" for suffix in ["", *(f"-{number}" for number in range(2, 100))]
        )
        return next(folder for folder in candidates if not folder.exists())
    folder = Path(out)
    check_is_file(folder, "the run folder")
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file: name a folder with --out")
    if folder.is_dir() and not _is_bare(folder):
        if not (folder / CONFIG_FILE).exists():
            raise RequestError(f"{folder} is not empty, and holds no run: name another with --out")
        raise RequestError(
            f"{folder} already holds another run: name another with --out, or continue it with --resume {folder}"
        )
    check_new_folder(folder)
    return folder


def _is_bare(folder: Path) -> bool:
    """Whether a folder is empty, or holds only what a start left that was killed before it wrote anything."""
    return all(
        is_staging(path) or (path.name == FOLDER and path.is_dir() and all(map(is_staging, path.iterdir())))
        for path in folder.iterdir()
    )


def create_folder(folder: Path, config: RunConfig, job: Job) -> Claim:
    """Create the folder of a job with `config.yaml` and `environment.json`, and claim it.

    Raises:
        RequestError: it cannot be written.
        Superseded: a later start has claimed it.
    """
    return create_folder_for(folder, _settled(config, job), str(job.device), job.dataset)


def create_folder_for(folder: Path, config: RunConfig, device: str, dataset: Dataset | None = None) -> Claim:
    """Create a folder with `data.json`, `config.yaml` and `environment.json`, and claim it.

    Args:
        folder: new or empty.
        config: configuration with all automatic choices filled in.
        device: device of the replicas.
        dataset: dataset of the run; None: it has none of its own, and no `data.json`.

    Raises:
        RequestError: it cannot be written.
        Superseded: a later start has claimed it.
    """
    existed, own = folder.exists(), None
    path, environment = folder / CONFIG_FILE, folder / ENVIRONMENT_FILE
    try:
        own = claim(folder, [FOLDER] if config.keep_checkpoints else [])
        if dataset is not None:  # before the recipe, by which others know that the run has begun
            record = DataRecord.of(dataset).with_earlier(read_record(folder))
            own.write(folder / DATA_FILE, record.file_text())
        write_recipe(config, own.draft(path))
        own.publish(path)
        text = json.dumps(_environment(config.threads or "a share of the cores", device), indent=2) + "\n"
        own.write(environment, text)
        return own
    except OSError as error:
        if own is not None:
            own.release()
        if not existed:
            discard_folder(folder)
        raise RequestError(
            f"cannot write into {folder}: {error.strerror}; name another folder with --out"
        ) from None


def claimed_folder(folder: Path, threads: int, device: str) -> Claim:
    """Create a folder with `environment.json`, unless it exists, and claim it.

    Args:
        folder: folder of a run that no recipe can repeat.
        threads: threads of a worker.
        device: device of the replicas.

    Raises:
        RequestError: it cannot be written.
    """
    own, path = None, folder / ENVIRONMENT_FILE
    try:
        own = claim(folder, [])
        text = json.dumps(_environment(threads, device), indent=2) + "\n"
        own.write(path, text)
        return own
    except OSError as error:
        if own is not None:
            own.release()
        raise RequestError(f"cannot write into {folder}: {error.strerror}; name another folder") from None


def discard_folder(folder: Path) -> None:
    """Remove the folder of a new run that has not started."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # others' runs are in there, or it is not ours
        RUNS.rmdir()


def _settled(config: RunConfig, job: Job) -> RunConfig:
    """Fill in the automatic choices, so that the recipe repeats this run even if defaults change."""
    if config.fine_tuning in ("head", "staged"):  # which choose for every round
        return config
    # Each stage has a default of its own.
    staged = Stages.parse(str(config.strategy)) is not None
    chosen: dict[str, Any] = {} if staged else {"optimizer": str(job.learning.optimizer)}
    if job.learning.updates is None:
        chosen["epochs"] = job.learning.planned_epochs
    return config.model_copy(update=chosen)


def _environment(threads: int | str, device: str) -> dict[str, Any]:
    return {
        "format": RUN_FORMAT,
        "polyrhythm": version("polyrhythm"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": processor(),
        "cores": available_cores(),
        "device": device,
        "threads_per_worker": threads,
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "process": os.getpid(),
    }
