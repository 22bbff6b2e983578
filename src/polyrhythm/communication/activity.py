"""Current activity of a real rank, for others to query when it seems to hang, and its blocked time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import median
from typing import Any, NamedTuple

from polyrhythm.communication.communicator import Clock, Handle

_STEPS_KEPT = 32
COMPUTING = "computing"


# Both a thread of a real rank and a greenlet of a simulated one have a context of their own.
in_background: ContextVar[bool] = ContextVar("in_background", default=False)


class Blocked:
    """Time for which a rank was blocked by others, or was inside its communicators, background tasks excluded.

    Attributes:
        seconds: blocked time since this object was made.
        spans: waits, with beginning and end on that clock; None where they are not recorded.
    """

    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self.spans: list[tuple[str, float, float]] | None = None
        self._clock = clock
        self._deep = False

    def computed_s(self) -> float:
        """Return the seconds of the clock in which the rank has not stood still."""
        return self._clock.now() - self.seconds

    @contextmanager
    def by(self, what: str) -> Iterator[None]:
        """Add the time of a `with`; of one inside another, once."""
        # A subgroup's calls are timed as well, and some calls are made of others: only the outermost counts.
        if self._deep or in_background.get():
            yield
            return
        self._deep, began_s = True, self._clock.now()
        try:
            yield
        finally:
            ended_s = self._clock.now()
            self._deep = False
            self.seconds += ended_s - began_s
            if self.spans is not None:
                self.spans.append((what, began_s, ended_s))


class RankActivity(NamedTuple):
    """An activity of a rank.

    Attributes:
        what: activity in words.
        since_s: start on this host's monotonic clock.
        takes_long: whether it may well take long, as a test does.
    """

    what: str
    since_s: float
    takes_long: bool = False


class Activity:
    """Kept by the rank, on all its threads; read by its watchdog.

    Args:
        clock: clock of a rank that records its waits; None: no recording.

    Attributes:
        step: steps that a worker has done.
        thread: the rank's main thread, which takes the steps or serves.
        blocked: blocked time of that thread; None: waits are not recorded.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.step = 0
        self.thread = threading.get_ident()
        self.blocked = None if clock is None else Blocked(clock)
        self._began_s = time.monotonic()
        self._durations_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._doing: dict[int, RankActivity] = {}

    def step_done(self, step: int) -> None:
        """Note that another step is over."""
        now_s = time.monotonic()
        self._durations_s.append(now_s - self._began_s)
        self._began_s, self.step = now_s, step

    def median_step_s(self) -> float | None:
        """Return the median duration of recent steps, in seconds; None before there are a few."""
        return median(self._durations_s) if len(self._durations_s) > 2 else None

    def now(self) -> RankActivity:
        """Return the activity of the main thread."""
        return self._doing.get(self.thread) or RankActivity(COMPUTING, self._began_s)

    def doing(self, what: str, *, takes_long: bool = False) -> _Noted:
        """Note, for the time of a `with`, what this thread does."""
        return _Noted(self, self._doing, what, takes_long)

    def noted(self, handle: Handle, what: str) -> Handle:
        """Return a handle that records its waits."""
        return _NotedHandle(handle, self, what)


class _Noted:
    # No generator: every receive that waits passes through here, and making one takes twice as long.
    __slots__ = ("_activity", "_before", "_doing", "_takes_long", "_what")

    def __init__(
        self, activity: Activity, doing: dict[int, RankActivity], what: str, takes_long: bool
    ) -> None:
        self._activity, self._doing, self._what, self._takes_long = activity, doing, what, takes_long
        self._before: RankActivity | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._before = self._doing.get(thread)
        self._doing[thread] = RankActivity(self._what, time.monotonic(), self._takes_long)

    def __exit__(self, *_: object) -> None:
        thread, before, blocked = threading.get_ident(), self._before, self._activity.blocked
        over = self._doing.pop(thread)
        if before is not None:
            self._doing[thread] = before
        # A test is no waiting, but what it waits for is; of one wait inside another, the outer counts.
        waits = not over.takes_long and (before is None or before.takes_long)
        if waits and blocked is not None and thread == self._activity.thread:
            blocked.seconds += time.monotonic() - over.since_s


class _NotedHandle:
    def __init__(self, inner: Handle, activity: Activity, what: str) -> None:
        self._inner = inner
        self._activity = activity
        self._what = what

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> Any:
        with self._activity.doing(self._what):
            return self._inner.wait()
