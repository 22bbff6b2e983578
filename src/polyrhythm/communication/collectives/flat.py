"""Flat all-reduce, "one to all": rank 0 gathers everything and sends the sum to everyone.

The baseline of Thakur, Rabenseifner, Gropp, IJHPCA 2005, and OneToAll of Qi, Sparks, Talwalkar, "Paleo", ICLR 2017.

    rank 0:  s = x[0] + x[1] + … + x[N-1], in this order;  sends s to 1, 2, …, N-1

Rank 0's links carry `(N-1) M` each way.
"""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.collective import (
    MessageCollective,
    PointToPoint,
    exchange,
    receive,
    start_send,
)
from polyrhythm.cost import all_reduce
from polyrhythm.cost import all_reduce as traffic
from polyrhythm.cost.all_reduce import Sent
from polyrhythm.cost.machine import Machine, Payload


class Flat(MessageCollective):
    """Rank 0 adds up all vectors and hands out the sum."""

    def reduce_vector(self, ranks: PointToPoint, vector: Tensor, tag: int) -> None:
        if ranks.rank == 0:
            for source in range(1, ranks.size):
                vector.add_(receive(ranks, source, tag, vector))
            for handle in [start_send(ranks, to, vector, tag) for to in range(1, ranks.size)]:
                handle.wait()
        else:
            vector.copy_(exchange(ranks, 0, vector, tag, vector))

    def seconds(self, machine: Machine, ranks: int, payload: Payload) -> float:
        return all_reduce.flat_s(machine, ranks, payload)

    def sent(self, ranks: int, rank: int, payload: Payload) -> Sent:
        return traffic.flat(ranks, rank, payload)
