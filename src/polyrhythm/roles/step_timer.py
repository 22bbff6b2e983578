"""Where a worker's step goes: a stopwatch whose laps add up to the step.

    begin          lap("data")   lap("forward")   lap("backward")   lap("update")   end_step
      │    data        │    forward    │▓│  backward  │  ▓▓▓▓▓ update  │   other     │
                                        ▓ inside the communicator: counted as communication, not as what is under way

What lies between `end_step` and the next `begin` (reports, tests, checkpoints, regrouping) belongs to no step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from polyrhythm.communication.clock import Clock
from polyrhythm.communication.timed import Blocked
from polyrhythm.events import WorkerProgress, WorkerTimings

TRACED_STEPS = 100
"""Steps of a real run whose parts are kept for its trace."""

Lap = Literal["data", "forward", "backward", "update", "other"]
_COMMUNICATION = "communication"


def finish_work(device: torch.device) -> None:
    """Returns when a device has done what it was told; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timer(Protocol):
    """Is told what a worker has just done."""

    def start(self, elapsed_s: float = 0.0) -> None:
        """Training starts now: times count from here.

        Args:
            elapsed_s: for how long the others have been training.
        """

    def begin(self) -> None:
        """A step begins; whatever was told of one that was broken off is forgotten."""

    def lap(self, done: Lap) -> None:
        """Something is over, which began where the one before it ended."""

    def end_step(self, step: int) -> None:
        """A step is over: the rest of it was `other`.

        Args:
            step: steps done since the run began.
        """

    def say(self, progress: WorkerProgress, *, in_step: bool) -> WorkerTimings | None:
        """Gives what the steps since the last call went into, or None where nobody wants to know.

        Args:
            progress: said of the same steps.
            in_step: whether workers take their steps together.
        """


class NoTimer:
    """Nobody wants to know; see `Timer`."""

    def start(self, elapsed_s: float = 0.0) -> None:
        """Nothing to do."""

    def begin(self) -> None:
        """Nothing to do."""

    def lap(self, done: Lap) -> None:
        """Nothing to do."""

    def end_step(self, step: int) -> None:
        """Nothing to do."""

    def say(self, progress: WorkerProgress, *, in_step: bool) -> WorkerTimings | None:
        """Nothing to say."""
        return None


@dataclass(frozen=True, kw_only=True)
class Timekeeping:
    """How a timer goes about it.

    Attributes:
        finish: returns when the device has done what it was told, so that a lap holds its own work; a CPU always has.
        forward_share: of the two passes' time, where they are played in one piece; None: each takes its own.
        traced_steps: the first so many steps are told span by span.
    """

    finish: Callable[[], None] = lambda: None
    forward_share: float | None = None
    traced_steps: int = 0


@dataclass
class _Steps:
    """What steps went into, in seconds."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    communication: list[list[float]] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


class StepTimer:
    """Tells the time; see `Timer`.

    Args:
        clock: the worker's.
        blocked: what this worker's communicators add up, and nothing else does.
        keeping: how it goes about it.
    """

    def __init__(self, clock: Clock, blocked: Blocked, keeping: Timekeeping) -> None:
        self._clock = clock
        self._blocked = blocked
        self._keeping = keeping
        self._said = _Steps()
        self._step = _Steps()
        self._to_trace = keeping.traced_steps
        self._started_s = self._mark_s = clock.now()
        self._blocked_mark_s = blocked.seconds

    def start(self, elapsed_s: float = 0.0) -> None:
        """Training starts now."""
        self._started_s = self._clock.now() - elapsed_s

    def begin(self) -> None:
        """A step begins."""
        self._step = _Steps()
        self._blocked.spans = [] if self._to_trace else None
        self._mark()

    def lap(self, done: Lap) -> None:
        """Something is over."""
        self._keeping.finish()
        blocked_s = self._blocked.seconds - self._blocked_mark_s
        began_s = self._mark_s
        self._mark()
        self._step.add(_COMMUNICATION, blocked_s)
        self._step.add(done, max(0.0, self._mark_s - began_s - blocked_s))  # sums round
        if self._to_trace:
            self._step.spans.append((done, began_s, self._mark_s))

    def end_step(self, step: int) -> None:
        """A step is over."""
        self.lap("other")
        taken = self._step
        self._share_out(taken.seconds)
        for part, seconds in taken.seconds.items():
            self._said.add(part, seconds)
        self._said.steps += 1
        self._said.communication.append([step, taken.seconds[_COMMUNICATION]])
        if self._to_trace:
            self._to_trace -= 1
            self._said.spans += taken.spans
            blocked = self._blocked.spans or []
            self._said.spans += [(f"communication: {what}", start, end) for what, start, end in blocked]

    def say(self, progress: WorkerProgress, *, in_step: bool) -> WorkerTimings | None:
        """Gives what the steps since the last call went into."""
        said, self._said = self._said, _Steps()
        return WorkerTimings(
            time_s=self._mark_s - self._started_s,
            worker=progress.worker,
            step=progress.step,
            steps=said.steps,
            **{f"{part}_s": seconds for part, seconds in said.seconds.items()},
            in_step=in_step,
            communication=said.communication if in_step else [],
            spans=[[what, start - self._started_s, end - self._started_s] for what, start, end in said.spans],
        )

    def _mark(self) -> None:
        self._mark_s = self._clock.now()
        self._blocked_mark_s = self._blocked.seconds

    def _share_out(self, seconds: dict[str, float]) -> None:
        share = self._keeping.forward_share
        if share is not None and "backward" in seconds:
            both = seconds.get("forward", 0.0) + seconds["backward"]
            seconds["forward"], seconds["backward"] = both * share, both * (1 - share)
