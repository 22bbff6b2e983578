"""What a real rank is doing, for others to ask when it seems to hang."""

from __future__ import annotations

import threading
import time
from collections import deque
from statistics import median
from typing import Any, NamedTuple

from polyrhythm.communication.communicator import Handle

_STEPS_KEPT = 32
COMPUTING = "computing"


class Doing(NamedTuple):
    """Something that a rank does.

    Attributes:
        what: in words.
        since_s: when it began, on this host's monotonic clock.
        takes_long: whether it may well take long, as a test does.
    """

    what: str
    since_s: float
    takes_long: bool = False


class Activity:
    """Kept by the rank, on all its threads; read by its watchdog.

    Attributes:
        step: steps that a worker has done.
        thread: the rank's main thread, which takes the steps or serves.
    """

    def __init__(self) -> None:
        self.step = 0
        self.thread = threading.get_ident()
        self._began_s = time.monotonic()
        self._durations_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._doing: dict[int, Doing] = {}

    def step_done(self, step: int) -> None:
        """Note that another step is over."""
        now_s = time.monotonic()
        self._durations_s.append(now_s - self._began_s)
        self._began_s, self.step = now_s, step

    def median_step_s(self) -> float | None:
        """Return the median duration of recent steps, in seconds; None before there are a few."""
        return median(self._durations_s) if len(self._durations_s) > 2 else None

    def now(self) -> Doing:
        """Return what the main thread is doing."""
        return self._doing.get(self.thread) or Doing(COMPUTING, self._began_s)

    def doing(self, what: str, *, takes_long: bool = False) -> _Noted:
        """Note, for the time of a `with`, what this thread does."""
        return _Noted(self._doing, what, takes_long)

    def noted(self, handle: Handle, what: str) -> Handle:
        """Return a handle whose waiting is noted."""
        return _NotedHandle(handle, self, what)


class _Noted:
    # No generator: every receive that waits passes through here, and making one takes twice as long.
    __slots__ = ("_before", "_doing", "_takes_long", "_what")

    def __init__(self, doing: dict[int, Doing], what: str, takes_long: bool) -> None:
        self._doing, self._what, self._takes_long = doing, what, takes_long
        self._before: Doing | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._before = self._doing.get(thread)
        self._doing[thread] = Doing(self._what, time.monotonic(), self._takes_long)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            self._doing.pop(threading.get_ident(), None)
        else:
            self._doing[threading.get_ident()] = self._before


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
