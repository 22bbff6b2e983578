"""Binomial tree: reduce to rank 0, broadcast from it.

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005.

    0 ── 1        reduce     a rank adds its children's vectors, the smallest subtree's first, and sends to its parent
    ├─── 2 ── 3   broadcast  a rank passes on what its parent sends, to the largest subtree first
    └─── 4 …

A rank's parent is the rank without its lowest bit. Any number of ranks; `⌈log2 N⌉` rounds each way, all M in each.
"""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.collective import MessageCollective, PointToPoint, receive, start_send
from polyrhythm.cost import all_reduce
from polyrhythm.cost import all_reduce as traffic
from polyrhythm.cost.all_reduce import Sent, children
from polyrhythm.cost.machine import Machine, Payload


class BinomialTree(MessageCollective):
    """Vectors are added up a tree to rank 0, and the sum is sent down it."""

    def reduce_vector(self, ranks: PointToPoint, vector: Tensor, tag: int) -> None:
        self.reduce(ranks, vector, tag)
        self.broadcast(ranks, vector, tag)

    def reduce(self, ranks: PointToPoint, vector: Tensor, tag: int = 0) -> None:
        """Leave the sum over all ranks on rank 0, in place; other ranks' vectors hold sums of subtrees.

        Args:
            ranks: communicator of the participants.
            vector: one-dimensional and contiguous.
            tag: tag of the messages.
        """
        for child in children(ranks.size, ranks.rank):
            # In this order, independent of arrival, so that the bits do not depend on timing.
            vector.add_(receive(ranks, child, tag, vector))
        if ranks.rank:
            start_send(ranks, _parent(ranks.rank), vector, tag).wait()

    def broadcast(self, ranks: PointToPoint, vector: Tensor, tag: int = 0) -> None:
        """Overwrite `vector` with rank 0's, in place; arguments as in `reduce`."""
        if ranks.rank:
            vector.copy_(receive(ranks, _parent(ranks.rank), tag, vector))
        for child in reversed(children(ranks.size, ranks.rank)):
            # One after the other: a port carries one message at a time, and the largest subtree has most rounds to
            # go.
            start_send(ranks, child, vector, tag).wait()

    def seconds(self, machine: Machine, ranks: int, payload: Payload) -> float:
        return all_reduce.binomial_tree_s(machine, ranks, payload)

    def sent(self, ranks: int, rank: int, payload: Payload) -> Sent:
        return traffic.binomial_tree(ranks, rank, payload)


def _parent(rank: int) -> int:
    return rank & (rank - 1)
