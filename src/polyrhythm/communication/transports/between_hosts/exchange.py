"""Who moves the bytes of a member's collectives, and when.

Whoever waits for a collective moves its bytes; a helper thread does where nobody waits but others may need this member:

    this rank   start ── computes ────────────────────── wait ▓▓       ▓ waits for the helper
    helper          └ sends, receives, adds up, hands on ──┘

    this rank   start, sends ── wait: receives, adds up                small: no other thread is woken
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from polyrhythm.communication.transports.between_hosts.addition import is_small
from polyrhythm.communication.transports.between_hosts.order import Order
from polyrhythm.communication.transports.between_hosts.stream import PATIENCE_S
from polyrhythm.communication.transports.between_hosts.traffic import Traffic
from polyrhythm.communication.transports.collective_broken import CollectiveBroken
from polyrhythm.communication.transports.tcp.sockets import TcpSocket
from polyrhythm.errors import PolyrhythmError, RunError

_AT_ONCE_S = 0
_LOOKS = 12
"""At silent members, in the time that their silence may last."""


class Exchange:
    """One member's side.

    The traffic belongs to the thread that moves bytes at the moment, which holds a lock for that. Nobody else waits for
    it: who starts a collective while another thread moves bytes leaves an order.

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
        self._members = len(ranks)
        self._traffic = Traffic(member, ranks, connections, patience_s)
        self._look_every_s = patience_s / _LOOKS
        self._driving = threading.Lock()
        self._orders: deque[Order] = deque()
        self._needed = threading.Event()
        self._helper: threading.Thread | None = None
        self._given_up: PolyrhythmError | None = None
        self._closed = False

    def start(self, vector: Tensor, contributors: Sequence[int]) -> Order:
        """Starts to add up the vectors of some members; all members must start the same in the same order.

        Args:
            vector: as `Order` has it.
            contributors: as `Order` has it.

        Raises:
            CollectiveBroken: a member is gone.
            RunError: members disagree about what to add up.
        """
        if self._traffic.broken is not None:
            raise _again(self._traffic.broken)
        order = Order(vector, contributors)
        self._orders.append(order)
        if not is_small(vector.nbytes, self._members):
            self._call_helper()
        elif self._driving.acquire(blocking=False):
            try:
                self._begin()
            finally:
                self._let_go()
        else:
            self._traffic.wake()
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
                self._traffic.step(_AT_ONCE_S)
            finally:
                self._let_go()
        return order.over

    def give_up(self, reason: PolyrhythmError) -> None:
        """Ends all collectives, here and on the other members; called on any thread.

        When it returns nothing touches the vectors any more.
        """
        self._given_up = self._given_up or reason
        self._traffic.wake()
        with self._driving:
            self._traffic.break_off(self._given_up)
            self._end_orders()

    def close(self) -> None:
        """Leaves; what has been sent arrives."""
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
        """Begins what has been started, and ends everything if somebody has given up."""
        while self._orders and self._traffic.broken is None:
            self._traffic.begin(self._orders.popleft())
        if self._given_up is not None:
            self._traffic.break_off(self._given_up)
        self._end_orders()

    def _end_orders(self) -> None:
        """Ends what nobody will begin any more."""
        while self._orders and self._traffic.broken is not None:
            self._orders.popleft().end(self._traffic.broken)

    def _let_go(self) -> None:
        """Stops to move bytes; the helper goes on with what others may need, and with what somebody waits for."""
        self._end_orders()
        needed = self._traffic.needed
        self._driving.release()
        if needed or self._orders:  # those have been left while this thread moved bytes
            self._call_helper()

    def _call_helper(self) -> None:
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="collectives", daemon=True)
            self._helper.start()
        self._needed.set()
        self._traffic.wake()  # whoever moves bytes looks for orders

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
                self._let_go()


def _again(error: PolyrhythmError) -> PolyrhythmError:
    """Gives an error to raise that has been raised before."""
    if isinstance(error, CollectiveBroken):
        return CollectiveBroken(error.reason, error.rank)
    return RunError(str(error))
