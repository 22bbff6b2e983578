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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor

from polyrhythm.communication.transports.between_hosts.addition import Addition, Outgoing, is_small
from polyrhythm.communication.transports.between_hosts.frames import Frame, Shape
from polyrhythm.communication.transports.between_hosts.order import Order
from polyrhythm.communication.transports.between_hosts.stream import PATIENCE_S, Stream
from polyrhythm.communication.transports.collective_broken import CollectiveBroken
from polyrhythm.communication.transports.tcp.sockets import TcpSocket
from polyrhythm.errors import PolyrhythmError, RunError

_AT_ONCE_S = 0
_LOOKS = 12
"""At silent members, in the time that their silence may last."""


class Exchange:
    """One member's side.

    Connections and what has come over them belong to the thread that moves bytes at the moment, which holds a lock for
    that. Nobody else waits for it: who starts a collective while another thread moves bytes leaves an order.

    Args:
        member: this one.
        ranks: of all members, among all ranks of the run.
        connections: to the other members, by their numbers.
        patience_s: for how long nothing that is sent to a member may be answered by its host.
    """

    def __init__(
        self,
        member: int,
        ranks: Sequence[int],
        connections: dict[int, TcpSocket],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._member = member
        self._ranks = ranks
        self._driving = threading.Lock()
        self._needed = threading.Event()
        self._helper: threading.Thread | None = None
        self._orders: deque[Order] = deque()
        self._begun: dict[int, Order] = {}
        self._additions: dict[int, Addition] = {}
        self._started = 0
        self._given_up: PolyrhythmError | None = None
        self._broken: PolyrhythmError | None = None
        self._closed = False
        self._look_every_s = patience_s / _LOOKS
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

    def start(self, vector: Tensor, contributors: Sequence[int]) -> Order:
        """Starts to add up the vectors of some members; all members must start the same in the same order.

        Args:
            vector: as `Order` has it.
            contributors: as `Order` has it.

        Raises:
            CollectiveBroken: a member is gone.
            RunError: members disagree about what to add up.
        """
        if self._broken is not None:
            raise _again(self._broken)
        order = Order(vector, contributors)
        self._orders.append(order)
        if not is_small(vector.nbytes, len(self._ranks)):
            self._call_helper()
        elif self._driving.acquire(blocking=False):
            try:
                self._begin()
            finally:
                self._let_go()
        else:
            os.eventfd_write(self._news, 1)
        if order.error is not None:
            raise _again(order.error)
        return order

    def wait(self, order: Order) -> None:
        """Returns when a collective has ended.

        Raises:
            CollectiveBroken: a member is gone.
            RunError: members disagree about what to add up.
        """
        while not order.over:
            if self._driving.acquire(blocking=False):
                try:
                    self._drive(lambda: order.over)
                finally:
                    self._let_go()
            else:
                order.awaited = True
                self._call_helper()  # whoever moves bytes now may be about to stop
                order.wait()
        if order.error is not None:
            raise _again(order.error)

    def done(self, order: Order) -> bool:
        """Whether a collective has ended; moves what can be moved at once."""
        if not order.over and self._driving.acquire(blocking=False):
            try:
                self._begin()
                self._step(_AT_ONCE_S)
            finally:
                self._let_go()
        return order.over

    def give_up(self, reason: PolyrhythmError) -> None:
        """Ends all collectives, here and on the other members; called on any thread.

        When it returns nothing touches the vectors any more.
        """
        self._given_up = self._given_up or reason
        os.eventfd_write(self._news, 1)
        with self._driving:
            self._break(self._given_up)

    def close(self) -> None:
        """Leaves; what has been sent arrives."""
        self.give_up(CollectiveBroken("this rank has left"))
        self._closed = True
        self._needed.set()
        if self._helper is not None:
            self._helper.join()

    def target(self, source: int, frame: Frame) -> memoryview:
        """Gives where a frame's bytes belong."""
        return self._addition(frame.number, frame.shape).target(source, frame)

    def arrived(self, source: int, frame: Frame) -> None:
        """Notes that a frame's bytes are there."""
        addition = self._addition(frame.number, frame.shape)
        self._queue(addition.arrived(source, frame))
        self._end_if_done(addition)

    def _addition(self, number: int, shape: Shape) -> Addition:
        if number not in self._additions:
            if number <= self._started and number not in self._begun:
                raise RunError("a member of a collective sent more than its part of one that is over")
            self._additions[number] = Addition(self._member, len(self._ranks), number, shape)
        return self._additions[number]

    def _drive(self, until: Callable[[], bool]) -> None:
        while True:
            self._begin()
            if until():
                return
            if not self._step(self._look_every_s):
                self._look_for_silence()

    def _let_go(self) -> None:
        """Stops to move bytes; the helper goes on with what others may need, and with what somebody waits for."""
        needed = any(
            order.awaited or not self._additions[number].small for number, order in self._begun.items()
        )
        needed = needed or any(stream.backlog for stream in self._streams.values())
        self._driving.release()
        if needed or self._orders:  # those have been left while this thread moved bytes
            self._call_helper()

    def _begin(self) -> None:
        """Begins what has been started, and ends everything if somebody has given up."""
        while self._orders and self._broken is None:
            order = self._orders.popleft()
            self._started += 1
            self._begun[self._started] = order
            self._guarded(partial(self._take_part, order))
        if self._given_up is not None:
            self._break(self._given_up)
        while self._orders:
            self._orders.popleft().end(self._broken)

    def _take_part(self, order: Order) -> None:
        addition = self._addition(self._started, Shape.of(order.vector))
        self._queue(addition.begin(order.vector, order.contributors))
        self._send_on()
        self._check_those_gone()
        self._end_if_done(addition)

    def _step(self, patience_s: float) -> bool:
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

    def _look_for_silence(self) -> None:
        for stream in [each for each in self._streams.values() if each.is_cut_off()]:
            self._guarded(partial(self._lose, stream))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Breaks everything with what fails."""
        try:
            work()
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

    def _end_if_done(self, addition: Addition) -> None:
        if addition.done and addition.number in self._begun:
            del self._additions[addition.number]
            self._begun.pop(addition.number).end()

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

    def _break(self, error: Exception) -> None:
        """Ends everything, by closing the connections: so the news reaches all members."""
        if self._broken is not None:
            return
        self._broken = error if isinstance(error, PolyrhythmError) else CollectiveBroken(str(error))
        for stream in self._streams.values():
            stream.close()
        begun = list(self._begun.values())
        self._streams, self._stream_to, self._begun, self._additions = {}, {}, {}, {}
        for order in begun:
            order.end(self._broken)
        while self._orders:
            self._orders.popleft().end(self._broken)

    def _call_helper(self) -> None:
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="collectives", daemon=True)
            self._helper.start()
        self._needed.set()
        os.eventfd_write(self._news, 1)  # whoever moves bytes looks for orders

    def _help(self) -> None:
        while True:
            self._needed.wait()
            self._needed.clear()
            if self._closed:
                return
            self._driving.acquire()
            try:
                self._drive(lambda: not self._begun)
            finally:
                self._let_go()


def _again(error: PolyrhythmError) -> PolyrhythmError:
    """Gives an error to raise that has been raised before."""
    if isinstance(error, CollectiveBroken):
        return CollectiveBroken(error.reason, error.rank)
    return RunError(str(error))
