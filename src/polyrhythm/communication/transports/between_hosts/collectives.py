"""The collectives of one communicator over TCP between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyrhythm.communication.transports.between_hosts.exchange import Exchange
from polyrhythm.communication.transports.between_hosts.order import Order
from polyrhythm.communication.transports.between_hosts.stream import PATIENCE_S
from polyrhythm.communication.transports.collective_broken import CollectiveBroken
from polyrhythm.communication.transports.tcp.sockets import TcpSocket


class ExchangeHandle:
    """A collective under way.

    Args:
        exchange: that does it.
        order: the collective; None where there is nothing to do.
        finish: called once, when it has ended well and somebody has waited for it.
    """

    def __init__(self, exchange: Exchange, order: Order | None, finish: Callable[[], None] | None) -> None:
        self._exchange = exchange
        self._order = order
        self._finish = finish

    def done(self) -> bool:
        """Whether it has ended."""
        return self._order is None or self._exchange.done(self._order)

    def wait(self) -> None:
        """Blocks until it has ended.

        Raises:
            CollectiveBroken: a member is gone.
            RunError: members disagree about what to add up.
        """
        if self._order is not None:
            self._exchange.wait(self._order)
            self._order = None
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class HostCollectives:
    """One member's side. Tensors live on the CPU; sums go in the order of members, element by element.

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
        self._exchange = Exchange(member, ranks, connections, patience_s)
        self._all = tuple(range(len(ranks)))

    def start_all_reduce(self, tensor: Tensor, finish: Callable[[], None] | None = None) -> ExchangeHandle:
        """Starts to add up over all members, in place; `finish` is called when it has ended well.

        Raises:
            CollectiveBroken: a member is gone.
        """
        return self._start(tensor, self._all, finish)

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all members, in place."""
        self.start_all_reduce(tensor).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrites a tensor with member `root`'s."""
        self._start(tensor, (root,), None).wait()

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self.all_reduce(torch.zeros(1))

    def give_up(self, reason: CollectiveBroken) -> None:
        """Ends all collectives, also those under way, here and on the other members; called on any thread."""
        self._exchange.give_up(reason)

    def close(self) -> None:
        """Leaves; the others must not wait for this member any more."""
        self._exchange.close()

    def _start(
        self, tensor: Tensor, contributors: Sequence[int], finish: Callable[[], None] | None
    ) -> ExchangeHandle:
        tensor = tensor.detach()
        vector = tensor.contiguous().view(-1)

        def bring_back() -> None:
            if not tensor.is_contiguous():
                tensor.copy_(vector.view_as(tensor))
            if finish is not None:
                finish()

        order = self._exchange.start(vector, contributors) if vector.numel() else None
        return ExchangeHandle(self._exchange, order, bring_back)
