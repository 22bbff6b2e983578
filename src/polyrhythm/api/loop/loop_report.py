"""The run folder of a user's own loop: events, timings, TensorBoard files and the report, as `train` leaves them.

    every worker   LoopMeter   shard, passes and steps ─▶ WorkerProgress, WorkerTimings ─▶ rank 0
    rank 0         LoopLog     events of all ranks ─▶ events.jsonl, tensorboard/, report.html, observers

The phases of a step are determined by the position of the loop:

    begin ── shard hands a batch out ── model's forward pass is over ── backward pass is over ── step is over
      │ data          │        forward             │    backward (with the loss)     │  update     │
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.api.observed_run import ObservedRun, claimed_folder
from polyrhythm.claim import Claim
from polyrhythm.errors import PolyrhythmError, RequestError
from polyrhythm.events import Event, Logged, RunEnded, RunStarted
from polyrhythm.reporting.event_log import LOG_FILE, Observer, read_events
from polyrhythm.roles.control_plane import ControlPlane
from polyrhythm.roles.step_metrics import Lap, Tally, finish_work
from polyrhythm.roles.world import World

_Place = tuple[int, int]


class LoopMeter:
    """Measures one worker's loop, and reports it to the coordinator at intervals.

    Attributes:
        device: device of the model.
        loss: last loss that the loop has logged; NaN before.
        epoch: current epoch.
        tally: tally of its steps; None before training begins.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.loss = float("nan")
        self.epoch = 0
        self.tally: Tally | None = None
        self._world: World | None = None
        self._control: ControlPlane | None = None
        self._in_step = False
        self._images = 0
        self._waited_s = 0.0
        self._taken: tuple[int, float] | None = None  # of the last step; its loss may be logged later

    def in_world(self, world: World) -> World:
        """Return a context that measures this worker's blocking time."""
        self._world = world.timed(lambda: finish_work(self.device))
        return self._world

    def begin(self, control: ControlPlane, worker: int, elapsed_s: float, *, in_step: bool) -> None:
        """Note that training starts.

        Args:
            control: receiver of reports.
            worker: index of this worker.
            elapsed_s: seconds for which the other workers have been training.
            in_step: whether workers are synchronous.
        """
        assert self._world is not None, "it is in a world"
        self._control, self._in_step = control, in_step
        self.tally = Tally(worker, self._world.clock, workers=len(self._world.roles.workers))
        self.tally.begin(elapsed_s)
        timer = self._world.timer
        assert timer is not None, "the world is timed"
        timer.start(elapsed_s)
        timer.begin()

    def rest(self) -> None:
        """Exclude the time since the last step, as a new share of an epoch begins."""
        if self.tally is not None and self._world is not None and self._world.timer is not None:
            self._world.timer.begin()

    def took(self, batch: Any) -> None:
        """Note that a batch was returned for training."""
        self._add()
        self._images += images_in(batch)
        self.lap("data")

    def lap(self, done: Lap) -> None:
        """Note that a phase of the step has ended."""
        if self.tally is not None and self._world is not None and self._world.timer is not None:
            self._world.timer.lap(done)

    def waiting(
        self, inner: Callable[[_Place | None], AbstractContextManager[None]], place: _Place | None
    ) -> AbstractContextManager[None]:
        """Record the time of an exchange inside another measured phase."""

        @contextmanager
        def both() -> Iterator[None]:
            assert self._world is not None, "it is in a world"
            since = self._world.clock.now()
            with inner(place):
                yield
            self._waited_s += self._world.clock.now() - since

        return both()

    def step_done(self, steps: int, learning_rate: float) -> None:
        """Note that a step has ended.

        Args:
            steps: number of steps of this worker since the run began.
            learning_rate: learning rate of the first param group.
        """
        world, tally = self._world, self.tally
        if tally is None or world is None or world.timer is None:
            return
        self.lap("update")
        self._add()
        if tally.due:  # of previous steps
            self.report(steps - 1, learning_rate)
        world.timer.end_step(steps)
        self._taken = self._images, self._waited_s
        self._images, self._waited_s = 0, 0.0
        world.timer.begin()

    def _add(self) -> None:
        taken, self._taken = self._taken, None
        if taken is not None and self.tally is not None:
            images, waited_s = taken
            self.tally.add(images, self.loss if images else 0.0, waited_s)

    def end(self, steps: int, learning_rate: float) -> None:
        """Note that no step follows: report the remaining measurements; see `step_done`."""
        self._add()
        self.report(steps, learning_rate)

    def report(self, steps: int, learning_rate: float) -> None:
        """Report unreported measurements, up to this step."""
        world, tally, control = self._world, self.tally, self._control
        if tally is None or world is None or world.timer is None or control is None or not tally.unsaid:
            return
        progress = tally.report(self.epoch, steps, learning_rate)
        control.report(progress)
        control.report(world.timer.report(progress, in_step=self._in_step))

    def log(self, worker: int, steps: int, values: dict[str, float]) -> None:
        """Report the user's own numbers."""
        if self.tally is not None and self._control is not None:
            event = Logged(time_s=self.tally.elapsed_s, worker=worker, step=steps, values=values)
            self._control.report(event)


def images_in(batch: Any) -> int:
    """Return the number of images in a batch: the length of the first tensor in it; 0 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((found for found in map(images_in, parts) if found), 0)


class LoopLog:
    """Writes the run folder, on the coordinator.

    Args:
        folder: new or empty folder, or that of a run that is resumed or taken over by this replacement.
        observers: observers of the user; they receive every event.
        succeeds: whether this worker replaces a failed coordinator.

    Attributes:
        folder: the argument of that name.
        began_s: seconds of the run that are already in the log, if this worker takes it over.

    Raises:
        RequestError: the folder holds something else.
    """

    def __init__(self, folder: Path, observers: Sequence[Observer], *, succeeds: bool) -> None:
        self.folder = folder
        self.began_s = 0.0
        self._observers = observers
        self._succeeds = succeeds
        self._lock = threading.Lock()  # a watch reports from a thread of its own
        self._observed: ObservedRun | None = None
        self._claim: Claim | None = None
        self._holds_run = (folder / LOG_FILE).is_file()
        if folder.exists() and not folder.is_dir():
            raise RequestError(f"{folder} is a file: name a folder for the report")
        if folder.is_dir() and not self._holds_run and any(folder.iterdir()):
            raise RequestError(f"{folder} is not empty, and holds no run: name another for the report")

    def begin(self, started: RunStarted, *, resumed: bool, threads: int) -> None:
        """Note that training starts.

        Args:
            started: first event.
            resumed: whether the run continues an earlier one.
            threads: compute threads of this worker.

        Raises:
            RequestError: the folder holds another run, or cannot be written.
        """
        if self._holds_run and not (resumed or self._succeeds):
            raise RequestError(
                f"{self.folder} already holds another run: name another folder for the report, or continue that run "
                "by group.load"
            )
        device = "cpu"
        self._claim = claimed_folder(self.folder, threads, device)
        self._observed = ObservedRun(self.folder, True, self._observers, self._claim)
        if self._holds_run and self._succeeds:
            self.began_s = max((each.time_s for each in read_events(self.folder / LOG_FILE)), default=0.0)
        else:
            self.on_event(started)

    def on_event(self, event: Event) -> None:
        """Write one event."""
        if self._observed is not None:
            with self._lock:
                self._observed.on_event(event)

    def end(self, event: RunEnded, error: BaseException | None) -> None:
        """Write the last event and the report.

        Args:
            event: last event.
            error: exception that ended the loop.
        """
        observed, self._observed = self._observed, None
        if observed is None or self._claim is None:
            return
        if error is not None and not isinstance(error, PolyrhythmError):
            reason = " ".join(str(error).split())
            event = replace(
                event, outcome="failed", result={"error": f"{type(error).__name__}: {reason}"[:300]}
            )
        with self._lock:
            if error is None or not isinstance(error, PolyrhythmError):
                observed.on_event(event)
            observed.__exit__(None if error is None else type(error), error, None)
            self._claim.release()
