"""All collectives of one member that are under way, over its connections to the others.

Whoever waits for a collective moves its bytes; a helper thread does where nobody waits but others may need this member:

    this rank   start ── computes ────────────────────── wait ▓▓       ▓ waits for the helper
    helper          └ sends, receives, adds up, hands on ──┘

    this rank   start, sends ── wait: receives, adds up                small: no other thread is woken
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from polyrhythm.communication.transports.between_hosts.addition import Addition, Outgoing
from polyrhythm.communication.transports.between_hosts.frames import Frame, Shape
from polyrhythm.communication.transports.between_hosts.stream import Stream
from polyrhythm.communication.transports.collective_broken import CollectiveBroken
from polyrhythm.communication.transports.tcp.sockets import TcpSocket
from polyrhythm.errors import PolyrhythmError, RunError

_AT_ONCE_MS, _FOREVER_MS = 0, -1


class Exchange:
    """One member's side.

    Args:
        member: this one.
        ranks: of all members, among all ranks of the run.
        connections: to the other members, by their numbers.
    """

    def __init__(self, member: int, ranks: Sequence[int], connections: dict[int, TcpSocket]) -> None:
        self._member = member
        self._ranks = ranks
        self._lock = threading.Lock()
        self._driving = threading.Lock()
        self._needed = threading.Event()
        self._helper: threading.Thread | None = None
        self._additions: dict[int, Addition] = {}
        self._started = 0
        self._broken: PolyrhythmError | None = None
        self._closed = False
        self._poll = select.epoll()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._news, select.EPOLLIN)
        self._streams: dict[int, Stream] = {}
        self._sending: set[int] = set()
        for other, connection in connections.items():
            self._streams[connection.fileno()] = Stream(connection, other, self, self._note_sent)
            self._poll.register(connection, select.EPOLLIN)
        self._stream_to = {stream.member: stream for stream in self._streams.values()}

    def start(self, vector: Tensor, contributors: Sequence[int]) -> Addition:
        """Starts to add up the vectors of some members; all members must start the same in the same order.

        Args:
            vector: `(n,)`, contiguous, at least one number; it gets the sum.
            contributors: whose vectors count.

        Raises:
            CollectiveBroken: a member is gone.
            RunError: members disagree about what to add up.
        """
        with self._lock:
            self._raise_if_broken()
            self._started += 1
            addition = self._addition(self._started, Shape.of(vector))
            try:
                alone = not self._backlog()
                self._queue(addition.begin(vector, contributors))
                if addition.small and alone:
                    self._send_on()
                self._watch()
                self._check_those_gone()
            except (RunError, OSError) as error:
                self._break(error)
                self._raise_if_broken()
            self._forget_if_done(addition)
            if not addition.small or self._backlog():
                self._call_helper()
        return addition

    def wait(self, addition: Addition) -> None:
        """Returns when a collective has ended.

        Raises:
            CollectiveBroken: a member is gone.
            RunError: members disagree about what to add up.
        """
        while not self._over(addition):
            if not self._driving.acquire(blocking=False):
                with self._lock:
                    if self._over(addition):
                        break
                    addition.ended = addition.ended or threading.Event()
                    self._call_helper()  # whoever moves bytes now may be about to stop
                addition.ended.wait()
                continue
            try:
                self._drive(lambda: self._over(addition))
            finally:
                self._driving.release()
            self._hand_over()
        if not addition.done:
            self._raise_if_broken()

    def done(self, addition: Addition) -> bool:
        """Whether a collective has ended; moves what can be moved at once."""
        if not self._over(addition) and self._driving.acquire(blocking=False):
            try:
                self._step(_AT_ONCE_MS)
            finally:
                self._driving.release()
        return self._over(addition)

    def give_up(self, reason: PolyrhythmError) -> None:
        """Ends all collectives, here and on the other members; called on any thread.

        When it returns nothing touches the vectors any more.
        """
        with self._lock:
            self._break(reason)

    def close(self) -> None:
        """Leaves; what has been sent arrives."""
        self.give_up(CollectiveBroken("this rank has left"))
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._needed.set()
        if self._helper is not None:
            self._helper.join()
        with self._driving:  # whoever moved bytes has stopped
            self._poll.close()
            os.close(self._news)

    def target(self, source: int, frame: Frame) -> memoryview:
        """Gives where a frame's bytes belong."""
        return self._addition(frame.number, frame.shape).target(source, frame)

    def arrived(self, source: int, frame: Frame) -> None:
        """Notes that a frame's bytes are there."""
        addition = self._addition(frame.number, frame.shape)
        self._queue(addition.arrived(source, frame))
        self._forget_if_done(addition)

    def _addition(self, number: int, shape: Shape) -> Addition:
        if number not in self._additions:
            if number <= self._started - 1:
                raise RunError("a member of a collective sent more than its part of one that is over")
            self._additions[number] = Addition(self._member, len(self._ranks), number, shape)
        return self._additions[number]

    def _over(self, addition: Addition) -> bool:
        return addition.done or self._broken is not None

    def _drive(self, until: Callable[[], bool]) -> None:
        while not until():
            self._step(_FOREVER_MS)

    def _step(self, patience_ms: int) -> None:
        for descriptor, events in self._poll.poll(patience_ms):
            with self._lock:
                stream = self._streams.get(descriptor)
                if stream is None:  # somebody has given up, or wants this to look again
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._news)
                    continue
                try:
                    self._serve(stream, events)
                    self._send_on()
                    self._watch()
                except (RunError, OSError) as error:
                    self._break(error)
                except BaseException as error:  # half of something may have been done
                    self._break(CollectiveBroken(f"stopped by {type(error).__name__}"))
                    raise

    def _serve(self, stream: Stream, events: int) -> None:
        if events & ~select.EPOLLOUT:
            try:
                stream.receive_on()
            except (EOFError, OSError):
                self._lose(stream)

    def _send_on(self) -> None:
        for stream in self._streams.values():
            if stream.backlog:
                try:
                    stream.send_on()
                except OSError:
                    raise self._gone(stream.member) from None

    def _watch(self) -> None:
        """Lets whoever moves bytes look for room where there is something to send."""
        for descriptor, stream in self._streams.items():
            if stream.backlog != (descriptor in self._sending):
                self._sending ^= {descriptor}
                events = select.EPOLLIN | (select.EPOLLOUT if stream.backlog else 0)
                self._poll.modify(descriptor, events)

    def _queue(self, frames: Sequence[Outgoing]) -> None:
        for frame in frames:
            if frame.to in self._stream_to:
                self._stream_to[frame.to].add(frame)
            else:
                raise self._gone(frame.to)

    def _backlog(self) -> bool:
        return any(stream.backlog for stream in self._streams.values())

    def _note_sent(self, frame: Outgoing) -> None:
        frame.addition.unsent -= 1
        self._forget_if_done(frame.addition)

    def _forget_if_done(self, addition: Addition) -> None:
        if addition.done:
            self._additions.pop(addition.number, None)
            if addition.ended is not None:
                addition.ended.set()

    def _lose(self, stream: Stream) -> None:
        """A member has left. That is its right, unless something of it is missing."""
        descriptor = stream.connection.fileno()
        del self._streams[descriptor], self._stream_to[stream.member]
        self._sending.discard(descriptor)
        unsent = stream.backlog
        stream.close()
        if unsent:
            raise self._gone(stream.member)
        self._check_those_gone()

    def _check_those_gone(self) -> None:
        for member in range(len(self._ranks)):
            if member not in self._stream_to and member != self._member:
                for addition in self._additions.values():
                    if addition.begun and addition.needs(member):
                        raise self._gone(member)

    def _gone(self, member: int) -> CollectiveBroken:
        rank = self._ranks[member]
        return CollectiveBroken(f"rank {rank} is gone", rank)

    def _raise_if_broken(self) -> None:
        broken = self._broken
        if isinstance(broken, CollectiveBroken):
            raise CollectiveBroken(broken.reason, broken.rank)
        if broken is not None:
            raise RunError(str(broken))

    def _break(self, error: Exception) -> None:
        """Ends everything, by closing the connections: so the news reaches all members."""
        if self._broken is not None:
            return
        self._broken = error if isinstance(error, PolyrhythmError) else CollectiveBroken(str(error))
        for stream in self._streams.values():
            stream.close()
        self._streams, self._stream_to = {}, {}
        for addition in self._additions.values():
            if addition.ended is not None:
                addition.ended.set()
        self._additions = {}
        os.eventfd_write(self._news, 1)

    def _hand_over(self) -> None:
        """Lets the helper go on with what others may need, and with what somebody waits for."""
        with self._lock:
            if any(each.begun and (each.ended or not each.small) for each in self._additions.values()):
                self._call_helper()

    def _call_helper(self) -> None:
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="collectives", daemon=True)
            self._helper.start()
        self._needed.set()

    def _help(self) -> None:
        while True:
            self._needed.wait()
            self._needed.clear()
            if self._closed:
                return
            with self._driving:
                self._drive(lambda: not self._begun())

    def _begun(self) -> bool:
        with self._lock:
            return self._broken is None and any(addition.begun for addition in self._additions.values())
