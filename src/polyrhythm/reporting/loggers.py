"""Exports of a run's events to other tools: scalars for experiment trackers, spans for Perfetto.

    events ─▶ Scalars: names and numbers ─▶ TensorBoardWriter
           │                             └▶ LoggedRun ─▶ Logger: begin, log, end
           │                                              MLflowLogger, WandbLogger, or one of your own
           └▶ StepTrace: what every worker did when

A logger sees a run of `polyrhythm.train`, of `simulate` and of a user's own loop alike:

    polyrhythm.train(…, observers=[LoggedRun(MLflowLogger())])
    polyrhythm.join(…, report="runs/x", observers=[LoggedRun(WandbLogger(project="digits"))])

Both tools are optional: `pip install mlflow-skinny`, `pip install wandb`.
"""

from __future__ import annotations

import errno
import io
import math
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from polyrhythm.chrome_trace import Record, TraceRank, write_trace
from polyrhythm.claim import UNCLAIMED, Superseded, Unclaimed
from polyrhythm.errors import RequestError
from polyrhythm.events import (
    Evaluated,
    Event,
    Logged,
    RunEnded,
    RunStarted,
    ServerProgress,
    WorkerProgress,
    WorkerTimings,
)
from polyrhythm.reporting.figures import RunFigures, Staleness

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class Scalars:
    """Turns the events of one run into scalars over the images that all workers together have seen.

    `loss/worker_N`, `learning_rate/worker_N`, `images_per_s/worker_N`, `waiting_share/worker_N`,
    `staleness/server_N` (mean since its last report), `test_loss`, `test_top1` and `test_top5` (fractions), and
    whatever a user's loop logs by its own names.
    """

    def __init__(self) -> None:
        self._figures = RunFigures()
        self._tests = False

    @property
    def images_seen(self) -> int:
        """Images that all workers together have seen; after a test, those before its model."""
        return self._figures.tested_images if self._tests else self._figures.images_seen

    def of(self, event: Event) -> dict[str, float]:
        """Return the scalars of the next event; maybe none."""
        self._figures.add(event)
        self._tests = isinstance(event, Evaluated)
        match event:
            case WorkerProgress():
                last = self._figures.workers[event.worker].last
                names = ("loss", "learning_rate", "images_per_s", "waiting_share")
                return {f"{name}/worker_{event.worker}": getattr(last, name) for name in names}
            case ServerProgress() if event.staleness:
                latest = Staleness()
                latest.add(event.staleness)
                return {f"staleness/server_{event.server}": latest.mean}
            case Evaluated():
                return {name: getattr(event, name) for name in ("test_loss", "test_top1", "test_top5")}
            case Logged():
                return dict(event.values)
        return {}


_FORMAT = "brain.Event:2"


class TensorBoardWriter:
    """Writes one TensorBoard file; its step is the number of images that all workers together have seen.

    For what it writes see `Scalars`.

    Raises:
        OSError: the folder or the file cannot be made.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        # TensorBoard takes half a second to import. Its record format is written directly, since its own
        # EventFileWriter imports TensorFlow where that is installed, and writes from a thread.
        from tensorboard.summary.writer import record_writer

        self._clock = clock
        self._zero_s = clock()
        self._scalars = Scalars()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{int(self._zero_s):010d}.{os.getpid()}"
        self._file = path.open("ab", buffering=0)
        self._record_writer = record_writer.RecordWriter
        self._write(self._zero_s, file_version=_FORMAT)

    def on_event(self, event: Event) -> None:
        """Write the scalars of one event, if it has any, at once."""
        scalars = self._scalars.of(event)
        if isinstance(event, RunStarted):
            self._zero_s = self._clock() - event.time_s
        if scalars:
            values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
            # Placed by the run's clock, so that a simulated run shows its own time.
            placed_s = self._zero_s + event.time_s
            self._write(placed_s, step=self._scalars.images_seen, summary={"value": values})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, wall_time_s: float, **content: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        record = io.BytesIO()
        self._record_writer(record).write(
            event_pb2.Event(wall_time=wall_time_s, **content).SerializeToString()
        )
        end = self._file.seek(0, os.SEEK_END)
        if self._file.write(record.getvalue()) != len(record.getvalue()):
            self._file.truncate(end)  # half a record would make the rest unreadable
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Logger(Protocol):
    """An experiment tracker; called in the process of worker 0, or in the one that started the run."""

    def begin(self, options: Mapping[str, Any]) -> None:
        """Begin a run.

        Args:
            options: description of the run: strategy, data, model, workers, servers, epochs, and others.
        """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log finite numbers.

        Args:
            step: images that all workers together have seen.
            scalars: values by name; see `Scalars`.
        """

    def end(self, outcome: str, figures: Mapping[str, Any]) -> None:
        """End the run.

        Args:
            outcome: `done`, `interrupted` or `failed`.
            figures: results of the run, as `train --json` prints them.
        """


_NOT_OPTIONS = ("time_s", "begun", "deal")


class LoggedRun:
    """An observer of a run that passes it on to a logger.

    Args:
        logger: begun with the run.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._scalars = Scalars()
        self._begun = False

    def on_event(self, event: Event) -> None:
        """Pass one event on."""
        scalars = self._scalars.of(event)
        if isinstance(event, RunStarted) and not self._begun:
            self._begun = True
            self._logger.begin({key: value for key, value in vars(event).items() if key not in _NOT_OPTIONS})
        finite = {name: float(value) for name, value in scalars.items() if math.isfinite(value)}
        if finite and self._begun:
            self._logger.log(self._scalars.images_seen, finite)
        if isinstance(event, RunEnded) and self._begun:
            self._begun = False
            self._logger.end(event.outcome, event.result)

    def close(self) -> None:
        """End the run, if no end was logged."""
        if self._begun:
            self._begun = False
            self._logger.end("failed", {})


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class MLflowLogger:
    """Logs to MLflow: parameters, metrics by images seen, and the run's figures as metrics `final/…`.

    Args:
        uri: address of the server or database, such as `sqlite:///mlruns.db`; None: MLflow's own setting.
        experiment: name of the experiment.
        run_name: shown for the run; None: MLflow draws one.

    Raises:
        RequestError: MLflow is not installed.
    """

    def __init__(
        self, uri: str | None = None, experiment: str = "polyrhythm", run_name: str | None = None
    ) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise RequestError("MLflow is not installed: pip install mlflow-skinny") from None
        self._client = MlflowClient(tracking_uri=uri)
        self._experiment = experiment
        self._run_name = run_name
        self._run = ""

    def begin(self, options: Mapping[str, Any]) -> None:
        """Create the run, in its experiment."""
        found = self._client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(number, run_name=self._run_name).info.run_id
        for name, value in options.items():
            self._client.log_param(self._run, name, str(value)[:6000])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log metrics."""
        for name, value in scalars.items():
            self._client.log_metric(self._run, name, value, step=step)

    def end(self, outcome: str, figures: Mapping[str, Any]) -> None:
        """Log the run's figures, and set its status."""
        for name, value in _numbers(figures).items():
            self._client.log_metric(self._run, f"final/{name}", value)
        status = {"done": "FINISHED", "interrupted": "KILLED"}.get(outcome, "FAILED")
        self._client.set_terminated(self._run, status)


class WandbLogger:
    """Logs to Weights & Biases, by default offline: `wandb sync` uploads it later.

    Args:
        project: project of the run.
        folder: folder for the files.
        mode: `offline`, `online` or `disabled`.
        **options: options of `wandb.init`.

    Raises:
        RequestError: Weights & Biases is not installed.
    """

    def __init__(
        self, project: str = "polyrhythm", folder: str = ".", mode: str = "offline", **options: Any
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise RequestError("Weights & Biases is not installed: pip install wandb") from None
        self._wandb: Any = wandb
        self._options = {"project": project, "dir": folder, "mode": mode, **options}
        self._run: Any = None

    def begin(self, options: Mapping[str, Any]) -> None:
        """Begin a run with these options as its configuration."""
        self._run = self._wandb.init(config=dict(options), **self._options)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log numbers, with the images seen as one of them."""
        self._run.log({**scalars, "images_seen": step})

    def end(self, outcome: str, figures: Mapping[str, Any]) -> None:
        """Write the run's figures into its summary, and finish it."""
        self._run.summary.update({"outcome": outcome, **_numbers(figures)})
        self._run.finish(exit_code=0 if outcome == "done" else 1)


TRACE_FILE = "trace.json"


class StepTrace:
    """Writes the trace of a real run's first steps, what every worker did when, at its end: one line a span.

    Time is every worker's own since training started, which all do at about the same moment.
    """

    def __init__(self, path: Path, claim: Unclaimed = UNCLAIMED) -> None:
        self._path = path
        self._claim = claim
        self._name = ""
        self._spans: dict[int, list[Record]] = {}

    def on_event(self, event: Event) -> None:
        """Handle one event."""
        if isinstance(event, RunStarted):
            self._name = f"{event.model} on {event.data}: {event.strategy}"
        if isinstance(event, WorkerTimings) and event.spans:
            spans = self._spans.setdefault(event.worker, [])
            spans += [TraceRank(0, event.worker).does(what, start, end) for what, start, end in event.spans]

    def close(self) -> None:
        """Write the file."""
        if not self._spans or not self._claim.holds():
            return
        records: list[Record] = []
        for worker, spans in sorted(self._spans.items()):
            records += TraceRank(0, worker).named(self._name, f"worker {worker}") + spans
        with suppress(Superseded):
            write_trace(self._claim.draft(self._path), records)
            self._claim.publish(self._path)
