"""Communicators around another one: what they do not change themselves is forwarded to the inner one.

`RecordingCommunicator` notes whom its rank hears. `TimedCommunicator` adds up for how long its rank stands
still for communication:

    rank        │ forward │ backward      ▓▓│▓▓▓▓│ update │  ▓ inside a call or a wait: blocked
    background            └── all-reduce ──────┘             not the rank's own time: hidden where it is not ▓

A strategy sees no difference, so the time that it waits is known without any strategy reporting it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.communicator import Clock, Communicator, Handle
from polyrhythm.communication.message import Message


class Around:
    """Passes everything on; see `Communicator`.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        """This rank."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._inner.size

    @property
    def clock(self) -> Clock:
        """The inner one's."""
        return self._inner.clock

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since it started."""
        return self._inner.bytes_sent

    def send(self, to: int, message: Message) -> None:
        """Sends."""
        self._inner.send(to, message)

    def start_send(self, to: int, message: Message) -> Handle:
        """Starts to send."""
        return self._inner.start_send(to, message)

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message."""
        return self._inner.receive(source, tag)

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        """Takes a message if one is there."""
        return self._inner.poll(source, tag)

    def start(self, work: Callable[[], Any]) -> Handle:
        """Runs `work` in the background."""
        return self._inner.start(work)

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all ranks."""
        self._inner.all_reduce(tensor)

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Starts to add up over all ranks."""
        return self._inner.start_all_reduce(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites `tensor` with `root`'s."""
        self._inner.broadcast(tensor, root)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._inner.barrier()

    def regrouped(self, name: str, ranks: Sequence[int], incarnations: Sequence[int]) -> Communicator:
        """Makes the communicator of some of these ranks, as they are now."""
        return self._inner.regrouped(name, ranks, incarnations)

    def revoke(self) -> None:
        """Ends the use of this communicator."""
        self._inner.revoke()

    def revoke_here(self) -> None:
        """Ends the use of this communicator on this rank alone."""
        self._inner.revoke_here()

    def revoke_without(self, rank: int) -> None:
        """Ends the use of this communicator on this rank once another is lost."""
        self._inner.revoke_without(rank)

    def shared_vector(self, name: str, like: Tensor, *, later: bool = False) -> Tensor:
        """Gives a vector that all ranks read and write."""
        return self._inner.shared_vector(name, like, later=later)

    def vector_to_sum(self, name: str, like: Tensor) -> Tensor | None:
        """Makes a vector that is added up where it lies."""
        return self._inner.vector_to_sum(name, like)

    def subgroup(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Makes the communicator of some of these ranks."""
        return self._inner.subgroup(name, ranks)


class RecordingCommunicator(Around):
    """Notes whom this rank hears when it would hear anyone. What subgroups receive is not noted.

    Args:
        inner: does the work.
        arrivals: where to note it.
    """

    def __init__(self, inner: Communicator, arrivals: Arrivals) -> None:
        super().__init__(inner)
        self._arrivals = arrivals

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message."""
        found, message = self._inner.receive(source, tag)
        if source is None:
            self._arrivals.note(found, message)
        return found, message


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
