"""Communicators around another one: what they do not change themselves is forwarded to the inner one.

`RecordingCommunicator` records the senders of its rank's messages. `TimedCommunicator` adds up for how long
its rank is blocked by communication:

    rank        │ forward │ backward      ▓▓│▓▓▓▓│ update │  ▓ inside a call or a wait: blocked
    background            └── all-reduce ──────┘             not the rank's own time: hidden where it is not ▓

A strategy sees no difference, so the time that it waits is known without any strategy reporting it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from polyrhythm.communication.activity import Blocked, in_background
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Message

P = ParamSpec("P")
T = TypeVar("T")


class ForwardingCommunicator:
    """Another communicator's operations, as attributes; see `Communicator`.

    Each is bound once, so that a call of one that a subclass does not replace goes straight to the inner communicator.
    Subclasses replace attributes when they are made.
    """

    def __init__(self, inner: Communicator) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.clock = inner.clock
        self.traffic = inner.traffic
        self.send = inner.send
        self.start_send = inner.start_send
        self.receive = inner.receive
        self.receive_into = inner.receive_into
        self.poll = inner.poll
        self.start = inner.start
        self.all_reduce = inner.all_reduce
        self.start_all_reduce = inner.start_all_reduce
        self.broadcast = inner.broadcast
        self.barrier = inner.barrier
        self.revoke = inner.revoke
        self.revoke_here = inner.revoke_here
        self.revoke_without = inner.revoke_without
        self.shared_vector = inner.shared_vector
        self.vector_to_sum = inner.vector_to_sum
        self.lent_memory = inner.lent_memory
        self.subgroup = inner.subgroup
        self.regrouped = inner.regrouped


class RecordingCommunicator(ForwardingCommunicator):
    """Records the sender of each message received from any sender. Receives of subgroups are not recorded."""

    def __init__(self, inner: Communicator, arrivals: Arrivals) -> None:
        super().__init__(inner)

        def receive(source: int | None = None, tag: int = 0) -> tuple[int, Message]:
            found, message = inner.receive(source, tag)
            if source is None:
                arrivals.note(found, message)
            return found, message

        self.receive = receive


class TimedCommunicator(ForwardingCommunicator):
    """Adds up the time inside it and inside its subgroups."""

    def __init__(self, inner: Communicator, blocked: Blocked) -> None:
        super().__init__(inner)

        def timed(what: str, call: Callable[P, T]) -> Callable[P, T]:
            def call_timed(*args: P.args, **options: P.kwargs) -> T:
                with blocked.by(what):
                    return call(*args, **options)

            return call_timed

        def started(what: str, call: Callable[P, Handle]) -> Callable[P, Handle]:
            def call_timed(*args: P.args, **options: P.kwargs) -> Handle:
                with blocked.by(what):
                    return _TimedHandle(call(*args, **options), blocked, what)

            return call_timed

        def wrapped(make: Callable[P, Communicator]) -> Callable[P, Communicator]:
            def make_timed(*args: P.args, **options: P.kwargs) -> Communicator:
                return TimedCommunicator(make(*args, **options), blocked)

            return make_timed

        def start(work: Callable[[], Any]) -> Handle:
            def hidden() -> Any:  # only waiting for it blocks
                before = in_background.set(True)
                try:
                    return work()
                finally:
                    in_background.reset(before)

            with blocked.by("background work"):
                return _TimedHandle(inner.start(hidden), blocked, "background work")

        self.send = timed("send", inner.send)
        self.start_send = started("send", inner.start_send)
        self.receive = timed("receive", inner.receive)
        self.receive_into = timed("receive", inner.receive_into)
        self.poll = timed("receive", inner.poll)
        self.start = start
        self.all_reduce = timed("all-reduce", inner.all_reduce)
        self.start_all_reduce = started("all-reduce", inner.start_all_reduce)
        self.broadcast = timed("broadcast", inner.broadcast)
        self.barrier = timed("barrier", inner.barrier)
        self.subgroup = wrapped(inner.subgroup)
        self.regrouped = wrapped(inner.regrouped)


class _TimedHandle:
    __slots__ = ("_blocked", "_inner", "_what")

    def __init__(self, inner: Handle, blocked: Blocked, what: str) -> None:
        self._inner = inner
        self._blocked = blocked
        self._what = what

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> Any:
        with self._blocked.by(self._what):
            return self._inner.wait()
