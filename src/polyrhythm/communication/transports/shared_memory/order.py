"""Works of one rank that must be done in the order of their start.

Whoever waits for one does it, and those before it: inside a host, adding up is itself a computation, and a thread that
did it at once would only take the core, and Python's lock, from what the rank computes meanwhile. But the others
may need this rank's part while it computes for long, or waits for something else. So what has not been done after a
few milliseconds is done by a helper thread.

    this rank   start ─ computes ─ wait: does it              start ─ computes for long ───────── wait
    helper                                                      ········ after 5 ms: does it
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

_HELP_AFTER_S = 5e-3
_AWAKE_S = 1.0
"""So long after the last start the helper goes to sleep; waking it costs more than its looking around."""


class OrderedWork:
    """One work.

    Args:
        order: whose work it is.
        run: does it.
    """

    def __init__(self, order: InOrder, run: Callable[[], None]) -> None:
        self._order = order
        self._run: Callable[[], None] | None = run
        self._error: BaseException | None = None
        self.started_at = time.monotonic()

    def done(self) -> bool:
        """Whether the work has ended."""
        return self._run is None

    def wait(self) -> None:
        """Returns when the work has ended; raises what it raised."""
        while self._run is not None:
            self._order.do_next()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def do(self) -> None:
        """Does the work; what it raises is kept for who waits."""
        assert self._run is not None, "a work is done once"
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._run = None


class InOrder:
    """The works of one rank.

    Args:
        in_background: called with whether works are being done by the helper, whenever that changes.
    """

    def __init__(self, in_background: Callable[[bool], None]) -> None:
        self._in_background = in_background
        self._works: deque[OrderedWork] = deque()
        self._doing = threading.Lock()
        self._wake = threading.Event()
        self._awake = True
        self._closed = False
        self._last_start = 0.0
        self._helper: threading.Thread | None = None

    def start(self, run: Callable[[], None]) -> OrderedWork:
        """Adds a work."""
        work = OrderedWork(self, run)
        self._last_start = work.started_at
        self._works.append(work)
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="collectives", daemon=True)
            self._helper.start()
        elif not self._awake:
            self._wake.set()
        return work

    def do(self, run: Callable[[], None]) -> None:
        """Does a work at once, after all that have been started."""
        if not self._works and self._doing.acquire(blocking=False):
            try:
                if not self._works:
                    run()
                    return
            finally:
                self._doing.release()
        self.start(run).wait()

    def do_next(self) -> None:
        """Does the oldest work, or waits while another thread does one."""
        self._in_background(False)
        with self._doing:
            if self._works:
                self._works.popleft().do()

    def close(self) -> None:
        """Ends the helper; what has not been done is done by those who wait for it."""
        self._closed = True
        self._wake.set()
        if self._helper is not None:
            self._helper.join()

    def _help(self) -> None:
        while not self._closed:
            if not self._works and time.monotonic() - self._last_start > _AWAKE_S:
                self._sleep()
                continue
            time.sleep(_HELP_AFTER_S)
            while self._is_late():
                self._help_out()

    def _is_late(self) -> bool:
        """Whether the oldest work has waited for long; others may do it at any moment."""
        try:
            return time.monotonic() - self._works[0].started_at > _HELP_AFTER_S
        except IndexError:
            return False

    def _sleep(self) -> None:
        self._wake.clear()
        self._awake = False
        if not self._works and not self._closed:  # whoever adds one from here on sees that it must wake us
            self._wake.wait()
        self._awake = True

    def _help_out(self) -> None:
        with self._doing:
            if self._works:
                self._in_background(True)
                try:
                    self._works.popleft().do()
                finally:
                    self._in_background(False)
