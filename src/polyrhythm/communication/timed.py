"""A communicator that adds up for how long its rank stands still for it.

    rank        │ forward │ backward      ▓▓│▓▓▓▓│ update │        ▓ inside a call or a wait: blocked
    background            └── all-reduce ──────┘                   not the rank's own time: hidden where it is not ▓

A strategy sees no difference, so what it waits for is known without any strategy saying so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from polyrhythm.communication.around import Around
from polyrhythm.communication.clock import Clock
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Message

# Both a thread of a real rank and a greenlet of a simulated one have a context of their own.
_in_background: ContextVar[bool] = ContextVar("in_background", default=False)


class Blocked:
    """How long a rank has been inside its communicators, background tasks left out.

    Args:
        clock: the rank's.

    Attributes:
        seconds: since it was made.
        spans: what it waited for, from when to when on that clock; None where nobody wants to know.
    """

    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self.spans: list[tuple[str, float, float]] | None = None
        self._clock = clock
        self._deep = False

    @contextmanager
    def by(self, what: str) -> Iterator[None]:
        """Adds the time of a `with`; of one inside another, once."""
        if self._deep or _in_background.get():
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


class TimedCommunicator(Around):
    """Adds up the time inside it and inside its subgroups.

    Args:
        inner: does the work.
        blocked: where to add.
    """

    def __init__(self, inner: Communicator, blocked: Blocked) -> None:
        super().__init__(inner)
        self._blocked = blocked

    def send(self, to: int, message: Message) -> None:
        """Sends."""
        with self._blocked.by("send"):
            self._inner.send(to, message)

    def start_send(self, to: int, message: Message) -> Handle:
        """Starts to send."""
        with self._blocked.by("send"):
            return self._timed(self._inner.start_send(to, message), "send")

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message."""
        with self._blocked.by("receive"):
            return self._inner.receive(source, tag)

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        """Takes a message if one is there."""
        with self._blocked.by("receive"):
            return self._inner.poll(source, tag)

    def start(self, work: Callable[[], Any]) -> Handle:
        """Runs `work` in the background: only waiting for it blocks."""

        def hidden() -> Any:
            before = _in_background.set(True)
            try:
                return work()
            finally:
                _in_background.reset(before)

        with self._blocked.by("background work"):
            return self._timed(self._inner.start(hidden), "background work")

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all ranks."""
        with self._blocked.by("all-reduce"):
            self._inner.all_reduce(tensor)

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Starts to add up over all ranks."""
        with self._blocked.by("all-reduce"):
            return self._timed(self._inner.start_all_reduce(tensor), "all-reduce")

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites `tensor` with `root`'s."""
        with self._blocked.by("broadcast"):
            self._inner.broadcast(tensor, root)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        with self._blocked.by("barrier"):
            self._inner.barrier()

    def regrouped(self, name: str, ranks: Sequence[int], incarnations: Sequence[int]) -> Communicator:
        """Makes the communicator of some of these ranks, as they are now; timed as well."""
        return TimedCommunicator(self._inner.regrouped(name, ranks, incarnations), self._blocked)

    def subgroup(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Makes the communicator of some of these ranks; timed as well."""
        return TimedCommunicator(self._inner.subgroup(name, ranks), self._blocked)

    def _timed(self, handle: Handle, what: str) -> Handle:
        return _TimedHandle(handle, self._blocked, what)


class _TimedHandle:
    __slots__ = ("_blocked", "_inner", "_what")

    def __init__(self, inner: Handle, blocked: Blocked, what: str) -> None:
        self._inner = inner
        self._blocked = blocked
        self._what = what

    def done(self) -> bool:
        """Whether it is."""
        return self._inner.done()

    def wait(self) -> Any:
        """Waits; that is blocked time."""
        with self._blocked.by(self._what):
            return self._inner.wait()
