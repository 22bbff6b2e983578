"""A worker's measurements and reports of its steps: where their time goes, and its progress.

`StepTimer` is a stopwatch; its laps sum to the step:

    begin          lap("data")   lap("forward")   lap("backward")   lap("update")   end_step
      │    data        │    forward    │▓│  backward  │  ▓▓▓▓▓ update  │   other     │
                                        ▓ inside the communicator: counted as communication, not as the current lap

The time between `end_step` and the next `begin` (reports, tests, checkpoints, regrouping) belongs to no
step. `Tally` adds up steps, images, loss and waiting, and turns them into events every `REPORT_EVERY_S`
seconds.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Literal

import torch

from polyrhythm.communication.activity import Blocked
from polyrhythm.communication.communicator import Clock
from polyrhythm.events import WorkerProgress, WorkerTimings

TRACED_STEPS = 100
"""Number of steps of a real run with phases in its trace."""

Lap = Literal["data", "forward", "backward", "update", "other"]
_COMMUNICATION = "communication"


def finish_work(device: torch.device) -> None:
    """Wait until a device has finished its queued work; a no-op for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Timekeeping:
    """Settings of a timer.

    Attributes:
        finish: returns when the device has finished its queued work, so that a lap holds its own; immediate on a CPU.
        forward_share: forward pass's share of both passes' time, where they are simulated in one piece; None: each
            takes its own.
        traced_steps: number of steps, from the first, that are traced span by span.
    """

    finish: Callable[[], None] = lambda: None
    forward_share: float | None = None
    traced_steps: int = 0


@dataclass
class _Steps:
    """Phases of steps, in seconds."""

    steps: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    communication: list[list[float]] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)


class StepTimer:
    """Measures the phases of a worker's steps.

    Args:
        clock: clock of the worker.
        blocked: blocked time of this worker's communicators alone.
        keeping: settings of the timer.
    """

    def __init__(self, clock: Clock, blocked: Blocked, keeping: Timekeeping) -> None:
        self._clock = clock
        self._blocked = blocked
        self._keeping = keeping
        self._reported = _Steps()
        self._step = _Steps()
        self._to_trace = keeping.traced_steps
        self._started_s = self._mark_s = clock.now()
        self._blocked_mark_s = blocked.seconds

    def start(self, elapsed_s: float = 0.0) -> None:
        """Note that training starts now: times count from here.

        Args:
            elapsed_s: seconds for which the other workers have been training.
        """
        self._started_s = self._clock.now() - elapsed_s

    def begin(self) -> None:
        """Begin a step; measurements of an interrupted one are dropped."""
        self._step = _Steps()
        self._blocked.spans = [] if self._to_trace else None
        self._mark()

    def lap(self, done: Lap, what: str = "") -> None:
        """End a part of the step, which began where the one before it ended.

        Args:
            done: phase to which it is added.
            what: name in a trace; empty for that of the phase.
        """
        self._keeping.finish()
        blocked_s = self._blocked.seconds - self._blocked_mark_s
        began_s = self._mark_s
        self._mark()
        self._step.seconds[_COMMUNICATION] += blocked_s
        self._step.seconds[done] += max(0.0, self._mark_s - began_s - blocked_s)  # sums round
        if self._to_trace:
            self._step.spans.append((what or done, began_s, self._mark_s))

    def end_step(self, step: int) -> None:
        """End the step; the rest of it was `other`.

        Args:
            step: steps done since the run began.
        """
        self.lap("other")
        taken = self._step
        self._share_out(taken.seconds)
        for part, seconds in taken.seconds.items():
            self._reported.seconds[part] += seconds
        self._reported.steps += 1
        self._reported.communication.append([step, taken.seconds[_COMMUNICATION]])
        if self._to_trace:
            self._to_trace -= 1
            self._reported.spans += taken.spans
            blocked = self._blocked.spans or []
            self._reported.spans += [(f"communication: {what}", start, end) for what, start, end in blocked]

    def report(self, progress: WorkerProgress, *, in_step: bool) -> WorkerTimings:
        """Return the phases of the steps since the last call.

        Args:
            progress: progress report of the same steps.
            in_step: whether workers are synchronous.
        """
        earlier, self._reported = self._reported, _Steps()
        return WorkerTimings(
            time_s=self._mark_s - self._started_s,
            worker=progress.worker,
            step=progress.step,
            steps=earlier.steps,
            **{f"{part}_s": seconds for part, seconds in earlier.seconds.items()},
            in_step=in_step,
            communication=earlier.communication if in_step else [],
            spans=[
                [what, start - self._started_s, end - self._started_s] for what, start, end in earlier.spans
            ],
        )

    def _mark(self) -> None:
        self._mark_s = self._clock.now()
        self._blocked_mark_s = self._blocked.seconds

    def _share_out(self, seconds: dict[str, float]) -> None:
        share = self._keeping.forward_share
        if share is not None and "backward" in seconds:
            both = seconds.get("forward", 0.0) + seconds["backward"]
            seconds["forward"], seconds["backward"] = both * share, both * (1 - share)


REPORT_EVERY_S = 0.5
_REPORTING_AT_ONCE = 64
"""Number of workers up to which each reports as often; more share the same number of reports a second."""


def report_interval_s(workers: int) -> float:
    """Return the seconds between two reports of a worker; the coordinator reads those of all `workers`."""
    return REPORT_EVERY_S * max(1.0, workers / _REPORTING_AT_ONCE)


class ProcessorWait:
    """Reads for how many seconds the calling thread was ready while processors were busy with others; 0 if unknown.

    Linux counts it in `/proc/thread-self/schedstat`. The file stays open between reads.
    """

    __slots__ = ("_file", "_thread")

    def __init__(self) -> None:
        self._file, self._thread = -1, 0

    def __call__(self) -> float:
        """Return the seconds since the thread began."""
        try:
            if self._thread != get_ident():
                self.close()
                self._file, self._thread = os.open("/proc/thread-self/schedstat", os.O_RDONLY), get_ident()
            return int(os.pread(self._file, 100, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # another system, or one that does not count
            return 0.0

    def close(self) -> None:
        """Close the file; another read opens it again."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._thread = -1, 0

    __del__ = close


class Tally:
    """Adds up steps, images, loss and waiting, and turns them into events at intervals.

    Args:
        worker: index of the worker.
        clock: clock of the worker.
        processor_wait: returns for how many seconds this thread has waited for a processor; None: it does not wait.
        last_of: number of workers that meet in each step's exchange, where one is the last to arrive; 0: not every step
            has an exchange, so the time of exchanges alone is unknown.
        workers: number of workers that report to the same coordinator.

    Attributes:
        images: images seen since the tally was made.
        steps: steps taken since then.
        loss_sum: sum of `loss * images` over the images of the current epoch.
    """

    __slots__ = (
        "_clock",
        "_every_s",
        "_images_before_epoch",
        "_last_of",
        "_loss",
        "_processor_wait",
        "_queued_waiting_s",
        "_reported_at",
        "_reported_images",
        "_reported_processor_s",
        "_reported_steps",
        "_stage_s",
        "_started_at",
        "_wait_s",
        "_waits_s",
        "_worker",
        "epoch_loss",
        "images",
        "steps",
    )

    def __init__(
        self,
        worker: int,
        clock: Clock,
        processor_wait: Callable[[], float] | None = None,
        last_of: int = 0,
        workers: int = 1,
    ) -> None:
        self._worker = worker
        self._every_s = report_interval_s(workers)
        self._clock = clock
        self._processor_wait, self._last_of = processor_wait, last_of
        self._waits_s: list[tuple[float, float]] = []
        self._reported_processor_s = self._queued_waiting_s = 0.0
        self._look_at_processor()
        self._started_at = self._reported_at = clock.now()
        self.steps = 0
        self._reported_steps = 0
        self._reported_images = 0
        self._loss = 0.0
        self._wait_s = self._stage_s = 0.0
        self.images = 0
        self._images_before_epoch = 0
        self.epoch_loss = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since training started."""
        return self._clock.now() - self._started_at

    @property
    def epoch_images(self) -> int:
        """Images seen in the current epoch."""
        return self.images - self._images_before_epoch

    @property
    def due(self) -> bool:
        """Whether a report is due."""
        return self._clock.now() - self._reported_at >= self._every_s

    @property
    def unsaid(self) -> bool:
        """Whether there are steps that have not been reported."""
        return self.steps > self._reported_steps

    def begin(self, elapsed_s: float = 0.0) -> None:
        """Note that training starts, on all ranks at about the same moment: event times count from here.

        Args:
            elapsed_s: seconds for which the other workers have been training.
        """
        self._reported_at = self._clock.now()
        self._started_at = self._reported_at - elapsed_s
        self._look_at_processor()

    def begin_epoch(self) -> None:
        """Reset the epoch's mean loss."""
        self._images_before_epoch = self.images
        self.epoch_loss = 0.0

    def add(
        self,
        images: int,
        loss: float,
        wait_s: float,
        stage_s: float = 0.0,
        queued_waiting_s: float = 0.0,
    ) -> None:
        """Add a step.

        Args:
            images: images of the step.
            loss: mean loss of these images.
            wait_s: seconds in which the worker waited for others.
            stage_s: part of these, for other stages of a pipeline.
            queued_waiting_s: seconds of the time of `wait_s` for which this thread waited for a processor.
        """
        self.steps += 1
        self.images += images
        losses = loss * images
        self._loss += losses
        self.epoch_loss += losses
        self._wait_s += wait_s
        self._stage_s += stage_s
        self._queued_waiting_s += queued_waiting_s
        if self._last_of:
            self._waits_s.append((wait_s - stage_s, queued_waiting_s))

    def report(self, epoch: int, step: int, learning_rate: float) -> WorkerProgress:
        """Return the sums since the last call, and reset them."""
        now = self._clock.now()
        images = self.images - self._reported_images
        processor_s = self._look_at_processor()
        exchange_s, exchange_processor_s = self._exchange_s()
        event = WorkerProgress(
            time_s=now - self._started_at,
            worker=self._worker,
            epoch=epoch,
            step=step,
            steps=self.steps - self._reported_steps,
            images=images,
            loss=self._loss / max(1, images),
            learning_rate=learning_rate,
            wait_s=self._wait_s,
            stage_s=self._stage_s,
            exchange_s=exchange_s,
            exchange_processor_s=exchange_processor_s,
            processor_s=processor_s,
        )
        self._reported_at = now
        self._reported_steps, self._reported_images = self.steps, self.images
        self._loss = self._wait_s = self._stage_s = 0.0
        return event

    def _look_at_processor(self) -> float:
        """Return the seconds of waiting for the processor since the last call, without those of waiting for others.

        A thread that is about to check whether messages of slower workers have arrived waits for a processor as well,
        and loses nothing.
        """
        if self._processor_wait is None:
            return 0.0
        queued_s = self._processor_wait()
        found_s = queued_s - self._reported_processor_s - self._queued_waiting_s
        self._reported_processor_s, self._queued_waiting_s = queued_s, 0.0
        return max(0.0, found_s)

    def _exchange_s(self) -> tuple[float, float]:
        """Return the seconds that exchanges took by themselves since the last call, and those without a processor.

        Each of N equal workers is the last one in one step of N, and then waits for the exchange alone. The median of
        these waits is the lower 2N-quantile of all its waits. In an exchange that all have reached, a wait for a
        processor delays all.
        """
        waits_s, self._waits_s = sorted(self._waits_s), []
        if not waits_s:
            return 0.0, 0.0
        last = waits_s[: max(1, len(waits_s) // self._last_of)]
        exchange_s = len(waits_s) * waits_s[len(waits_s) // (2 * self._last_of)][0]
        queued = sum(queued_s for _, queued_s in last) / max(sum(wait_s for wait_s, _ in last), 1e-12)
        return exchange_s, exchange_s * min(1.0, queued)
