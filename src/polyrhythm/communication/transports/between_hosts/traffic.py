"""The collectives of one member that have begun, and the connections over which their parts travel."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from polyrhythm.communication.transports.between_hosts.addition import Addition, Outgoing
from polyrhythm.communication.transports.between_hosts.frames import Frame, Shape
from polyrhythm.communication.transports.between_hosts.order import Order
from polyrhythm.communication.transports.between_hosts.stream import Stream
from polyrhythm.communication.transports.collective_broken import CollectiveBroken
from polyrhythm.communication.transports.tcp.sockets import TcpSocket
from polyrhythm.errors import PolyrhythmError, RunError


class Traffic:
    """One member's side; only one thread at a time may do anything with it but `wake` it.

    Args:
        member: this one.
        ranks: of all members, among all ranks of the run.
        connections: to the other members, by their numbers.
        patience_s: for how long nothing that is sent to a member may be answered by its host.

    Attributes:
        broken: what has ended all collectives for good; None until then.
    """

    def __init__(
        self, member: int, ranks: Sequence[int], connections: dict[int, TcpSocket], patience_s: float
    ) -> None:
        self.broken: PolyrhythmError | None = None
        self._member = member
        self._ranks = ranks
        self._started = 0
        self._begun: dict[int, Order] = {}
        self._additions: dict[int, Addition] = {}
        self._poll = select.epoll()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._news, select.EPOLLIN)
        self._streams: dict[int, Stream] = {}
        self._sending: set[int] = set()
        for other, connection in connections.items():
            self._streams[connection.fileno()] = Stream(connection, other, self, self._note_sent, patience_s)
            self._poll.register(connection, select.EPOLLIN)
        self._stream_to = {stream.member: stream for stream in self._streams.values()}

    def __del__(self) -> None:
        self._poll.close()
        os.close(self._news)

    @property
    def idle(self) -> bool:
        """Whether no collective is under way that this member has begun."""
        return not self._begun

    @property
    def needed(self) -> bool:
        """Whether others may wait for this member to move bytes, or another of its threads does."""
        waits = any(
            order.awaited or not self._additions[number].small for number, order in self._begun.items()
        )
        return waits or any(stream.backlog for stream in self._streams.values())

    def wake(self) -> None:
        """Ends the patience of whoever is in `step`; called on any thread."""
        os.eventfd_write(self._news, 1)

    def begin(self, order: Order) -> None:
        """Begins a collective, which ends at once where everything is broken off by it."""
        self._started += 1
        self._begun[self._started] = order
        self._guarded(partial(self._take_part, order))

    def step(self, patience_s: float) -> bool:
        """Moves what can be moved; whether there was anything to do before the patience ended."""
        news = self._poll.poll(patience_s)
        for descriptor, events in news:
            stream = self._streams.get(descriptor)
            if stream is not None:
                self._guarded(partial(self._serve, stream, events))
            elif descriptor == self._news:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._news)
        return bool(news)

    def look_for_silence(self) -> None:
        """Gives up the members whose hosts have answered nothing for too long."""
        for stream in [each for each in self._streams.values() if each.is_cut_off()]:
            self._guarded(partial(self._lose, stream))

    def break_off(self, error: Exception) -> None:
        """Ends everything, by closing the connections: so the news reaches all members."""
        if self.broken is not None:
            return
        self.broken = error if isinstance(error, PolyrhythmError) else CollectiveBroken(str(error))
        for stream in self._streams.values():
            stream.close()
        begun = list(self._begun.values())
        self._streams, self._stream_to, self._begun, self._additions = {}, {}, {}, {}
        for order in begun:
            order.end(self.broken)

    def target(self, source: int, frame: Frame) -> memoryview:
        """Gives where a frame's bytes belong."""
        return self._addition(frame.number, frame.shape).target(source, frame)

    def arrived(self, source: int, frame: Frame) -> None:
        """Notes that a frame's bytes are there."""
        addition = self._addition(frame.number, frame.shape)
        self._queue(addition.arrived(source, frame))
        self._end_if_done(addition)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Breaks everything off with what fails."""
        try:
            work()
        except (RunError, OSError) as error:
            self.break_off(error)
        except BaseException as error:  # half of something may have been done
            self.break_off(CollectiveBroken(f"stopped by {type(error).__name__}"))
            raise

    def _take_part(self, order: Order) -> None:
        addition = self._addition(self._started, Shape.of(order.vector))
        self._queue(addition.begin(order.vector, order.contributors))
        self._send_on()
        self._check_those_gone()
        self._end_if_done(addition)

    def _addition(self, number: int, shape: Shape) -> Addition:
        if number not in self._additions:
            if number <= self._started and number not in self._begun:
                raise RunError("a member of a collective sent more than its part of one that is over")
            self._additions[number] = Addition(self._member, len(self._ranks), number, shape)
        return self._additions[number]

    def _end_if_done(self, addition: Addition) -> None:
        if addition.done and addition.number in self._begun:
            del self._additions[addition.number]
            self._begun.pop(addition.number).end()

    def _serve(self, stream: Stream, events: int) -> None:
        if events & ~select.EPOLLOUT:
            try:
                stream.receive_on()
            except (EOFError, OSError):
                self._lose(stream)
        self._send_on()

    def _send_on(self) -> None:
        for descriptor, stream in self._streams.items():
            if stream.backlog:
                try:
                    stream.send_on()
                except OSError:
                    raise self._gone(stream.member) from None
            if stream.backlog != (descriptor in self._sending):
                self._sending ^= {descriptor}
                events = select.EPOLLIN | (select.EPOLLOUT if stream.backlog else 0)
                self._poll.modify(descriptor, events)

    def _queue(self, frames: Sequence[Outgoing]) -> None:
        for frame in frames:
            if frame.to not in self._stream_to:
                raise self._gone(frame.to)
            self._stream_to[frame.to].add(frame)

    def _note_sent(self, frame: Outgoing) -> None:
        frame.addition.unsent -= 1
        self._end_if_done(frame.addition)

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
                for number in self._begun:
                    if self._additions[number].needs(member):
                        raise self._gone(member)

    def _gone(self, member: int) -> CollectiveBroken:
        rank = self._ranks[member]
        return CollectiveBroken(f"rank {rank} is gone", rank)
