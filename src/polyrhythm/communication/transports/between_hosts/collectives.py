"""The collectives of one communicator over TCP between hosts, and the thread that moves their bytes.

A collective that is started is an `Order`. Those that have begun are the `Traffic` of the member, over its
connections to the others. The thread that waits for a collective moves its bytes; a helper thread does where
no thread waits but others may need this member:

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

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.transports.between_hosts.addition import (
    Addition,
    Frame,
    Outgoing,
    Shape,
    shape_of,
)
from polyrhythm.communication.transports.between_hosts.connections import PATIENCE_S, Stream
from polyrhythm.communication.transports.member_collectives import CollectiveBroken, MemberCollectives
from polyrhythm.communication.transports.sockets import TcpSocket
from polyrhythm.cost.all_reduce import travels_whole
from polyrhythm.errors import PolyrhythmError, RunError


class Order(Handle):
    """A collective in progress, and its result.

    Args:
        vector: `(n,)`, contiguous; it gets the sum.
        contributors: members with vectors that count.
        finish: callback, called once, when the collective has succeeded and has been waited for.
        owner: owner of the threads that move its bytes.

    Attributes:
        error: error that broke it.
        awaited: whether a thread waits for it that does not move its bytes.
    """

    def __init__(
        self,
        vector: Tensor,
        contributors: Sequence[int],
        finish: Callable[[], None] | None = None,
        owner: HostCollectives | None = None,
    ) -> None:
        self.vector = vector
        self.contributors = contributors
        self.error: PolyrhythmError | None = None
        self.awaited = False
        self._finish = finish
        self._owner = owner
        self._ended = threading.Event()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def end(self, error: PolyrhythmError | None = None) -> None:
        """Mark the collective as finished, and wake the waiting threads."""
        self.error = error
        self._ended.set()

    def wait_for_end(self) -> None:
        """Return when another thread has ended it."""
        self._ended.wait()

    def done(self) -> bool:
        if self._owner is not None:
            self._owner.move(self)
        return self._owner is None or self.over

    def wait(self) -> None:
        """Block until it has ended.

        Raises:
            CollectiveBroken: a member has failed or left.
            RunError: members disagree about what to add up.
        """
        if self._owner is not None:
            self._owner.bring_to_end(self)
            self._owner = None  # a handle that is kept must not keep the connections
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Traffic:
    """One member's side; only one thread at a time may do anything with it but `wake` it.

    Args:
        patience_s: seconds for which a member's host may leave sent data unacknowledged.

    Attributes:
        broken: error that has ended all collectives for good; None until then.
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
        """Whether no collective is in progress that this member has begun."""
        return not self._begun

    @property
    def needed(self) -> bool:
        """Whether others may wait for this member to move bytes, or another of its threads does."""
        waits = any(
            order.awaited or not self._additions[number].small for number, order in self._begun.items()
        )
        return waits or any(stream.backlog for stream in self._streams.values())

    def wake(self) -> None:
        """End the patience of the thread that is in `step`; called on any thread."""
        os.eventfd_write(self._news, 1)

    def begin(self, order: Order) -> None:
        """Begin a collective, which ends at once where everything is broken off by it."""
        # All members start the same collectives in the same order: the number is all that frames need to name one.
        self._started += 1
        self._begun[self._started] = order
        self._guarded(partial(self._take_part, order))

    def step(self, patience_s: float) -> bool:
        """Move what can be moved; return whether there was anything to do before the patience ended."""
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
        """Drop the members on hosts that have been silent for too long."""
        for stream in [each for each in self._streams.values() if each.is_cut_off()]:
            self._guarded(partial(self._lose, stream))

    def break_off(self, error: Exception) -> None:
        """End everything, by closing the connections: so the news reaches all members."""
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
        """Return where a frame's bytes belong."""
        return self._addition(frame.number, frame.shape).target(source, frame)

    def arrived(self, source: int, frame: Frame) -> None:
        """Note that a frame's bytes are there."""
        addition = self._addition(frame.number, frame.shape)
        self._queue(addition.arrived(source, frame))
        self._end_if_done(addition)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Break everything off with what fails."""
        try:
            work()
        except (RunError, OSError) as error:
            self.break_off(error)
        except BaseException as error:  # half of something may have been done
            self.break_off(CollectiveBroken(f"stopped by {type(error).__name__}"))
            raise

    def _take_part(self, order: Order) -> None:
        addition = self._addition(self._started, shape_of(order.vector))
        self._queue(addition.begin(order.vector, order.contributors))
        self._send_on()
        self._check_failed_members()
        self._end_if_done(addition)

    def _addition(self, number: int, shape: Shape) -> Addition:
        if number not in self._additions:
            if number <= self._started and number not in self._begun:
                raise RunError("a member of a collective sent more than its part of one that is over")
            # Another member's first frame may be what makes it, before this member has begun: its bytes have a
            # place then.
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
                    raise self._failure_of(stream.member) from None
            if stream.backlog != (descriptor in self._sending):
                self._sending ^= {descriptor}
                events = select.EPOLLIN | (select.EPOLLOUT if stream.backlog else 0)
                self._poll.modify(descriptor, events)

    def _queue(self, frames: Sequence[Outgoing]) -> None:
        for frame in frames:
            if frame.to not in self._stream_to:
                raise self._failure_of(frame.to)
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
            raise self._failure_of(stream.member)
        self._check_failed_members()

    def _check_failed_members(self) -> None:
        for member in range(len(self._ranks)):
            if member not in self._stream_to and member != self._member:
                for number in self._begun:
                    if self._additions[number].needs(member):
                        raise self._failure_of(member)

    def _failure_of(self, member: int) -> CollectiveBroken:
        rank = self._ranks[member]
        return CollectiveBroken(f"rank {rank} is gone", rank)


_AT_ONCE_S = 0
_LOOKS = 12
"""At silent members, in the time that their silence may last."""


class HostCollectives(MemberCollectives):
    """One member's side. Tensors live on the CPU; sums go in the order of members, element by element.

    The traffic belongs to the thread that moves bytes at the moment, which holds a lock for that. Other
    threads never wait for it: one that starts a collective while another thread moves bytes leaves an order.

    Args:
        member: index of this member.
        ranks: ranks of all members, among all ranks of the run.
        connections: connections to the other members, by their numbers.
        patience_s: seconds for which a member's host may leave sent data unacknowledged.
    """

    def __init__(
        self,
        member: int,
        ranks: Sequence[int],
        connections: dict[int, TcpSocket],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._all = tuple(range(len(ranks)))
        self._traffic = Traffic(member, ranks, connections, patience_s)
        self._look_every_s = patience_s / _LOOKS
        self._driving = threading.Lock()
        self._orders: deque[Order] = deque()
        self._needed = threading.Event()
        self._helper: threading.Thread | None = None
        self._given_up: PolyrhythmError | None = None
        self._closed = False

    def start_all_reduce(self, tensor: Tensor, finish: Callable[[], None] | None = None) -> Order:
        return self._start(tensor, self._all, finish)

    def all_reduce(self, tensor: Tensor) -> None:
        self._start(tensor, self._all).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._start(tensor, (root,)).wait()

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    def _start(
        self, tensor: Tensor, contributors: Sequence[int], finish: Callable[[], None] | None = None
    ) -> Order:
        tensor = tensor.detach()
        vector = tensor.contiguous().view(-1)

        def bring_back() -> None:
            if not tensor.is_contiguous():
                tensor.copy_(vector.view_as(tensor))
            if finish is not None:
                finish()

        if not vector.numel():
            return Order(vector, contributors, bring_back)
        if self._traffic.broken is not None:
            raise _again(self._traffic.broken)
        order = Order(vector, contributors, bring_back, self)
        self._orders.append(order)
        # A large one moves while this thread computes; a small one is sent sooner than another thread wakes up.
        if not travels_whole(vector.nbytes, len(self._all)):
            self._call_helper()
        elif self._driving.acquire(blocking=False):
            try:
                self._begin()
            finally:
                self._release()
        else:
            self._traffic.wake()
        if order.error is not None:
            raise _again(order.error)
        return order

    def bring_to_end(self, order: Order) -> None:
        """Move bytes, or wait for the thread that does, until a collective has ended; raise what broke it."""
        while not order.over:
            if self._driving.acquire(blocking=False):
                try:
                    self._drive(lambda: order.over)
                finally:
                    self._release()
            else:
                order.awaited = True
                self._call_helper()  # the thread that moves bytes now may be about to stop
                order.wait_for_end()
        if order.error is not None:
            raise _again(order.error)

    def move(self, order: Order) -> None:
        """Move what can be moved at once, if no other thread does."""
        if not order.over and self._driving.acquire(blocking=False):
            try:
                self._begin()
                self._traffic.step(_AT_ONCE_S)
            finally:
                self._release()

    def give_up(self, reason: PolyrhythmError) -> None:
        """End all collectives, here and on the other members; called on any thread.

        When it returns nothing touches the vectors any more.
        """
        self._given_up = self._given_up or reason
        self._traffic.wake()
        with self._driving:
            self._traffic.break_off(self._given_up)
            self._end_orders()

    def close(self) -> None:
        """Leave; what has been sent arrives."""
        self.give_up(CollectiveBroken("this rank has left"))
        self._closed = True
        self._needed.set()
        if self._helper is not None:
            self._helper.join()

    def _drive(self, until: Callable[[], bool]) -> None:
        while True:
            self._begin()
            if until():
                return
            if not self._traffic.step(self._look_every_s):
                self._traffic.look_for_silence()

    def _begin(self) -> None:
        """Begin what has been started, and end everything if this rank has given up."""
        while self._orders and self._traffic.broken is None:
            self._traffic.begin(self._orders.popleft())
        if self._given_up is not None:
            self._traffic.break_off(self._given_up)
        self._end_orders()

    def _end_orders(self) -> None:
        """End the orders that will never begin."""
        while self._orders and self._traffic.broken is not None:
            self._orders.popleft().end(self._traffic.broken)

    def _release(self) -> None:
        """Stop moving bytes; the helper continues with transfers that others may need or that a thread waits for."""
        self._end_orders()
        needed = self._traffic.needed
        self._driving.release()
        # Looked at after the lock is free: a thread that left an order just before found it taken.
        if needed or self._orders:  # those have been left while this thread moved bytes
            self._call_helper()

    def _call_helper(self) -> None:
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="collectives", daemon=True)
            self._helper.start()
        self._needed.set()
        self._traffic.wake()  # the thread that moves bytes looks for orders

    def _help(self) -> None:
        while True:
            self._needed.wait()
            self._needed.clear()
            if self._closed:
                return
            self._driving.acquire()
            try:
                self._drive(lambda: self._traffic.idle)
            finally:
                self._release()


def _again(error: PolyrhythmError) -> PolyrhythmError:
    """Return an error to raise that has been raised before."""
    if isinstance(error, CollectiveBroken):
        return CollectiveBroken(error.reason, error.rank)
    return RunError(str(error))
