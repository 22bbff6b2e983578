"""Recursive doubling, the "butterfly" of most texts.

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005.

    for d = 1, 2, 4, …:   x[r] = x[r] + x[r xor d]      both of a pair send all, and compute the same sum

The fewest rounds, `log2 N`, each with all M: for short vectors. Bit-identical on all ranks, because both of a pair
add the same two numbers. Where N is no power of two, the others are folded in first and out at the end.
"""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.collective import MessageCollective, PointToPoint, exchange, folded
from polyrhythm.cost import all_reduce
from polyrhythm.cost import all_reduce as traffic
from polyrhythm.cost.all_reduce import Sent
from polyrhythm.cost.machine import Machine, Payload


class RecursiveDoubling(MessageCollective):
    """Pairs of ranks at distance 1, 2, 4, … exchange and add all that they have."""

    def reduce_vector(self, ranks: PointToPoint, vector: Tensor, tag: int) -> None:
        def reduce_core(core: int) -> None:
            distance = 1
            while distance < core:
                # a + b here is b + a there, which are the same bits; a sum of three in another order would not be.
                vector.add_(exchange(ranks, ranks.rank ^ distance, vector, tag, vector))
                distance *= 2

        folded(ranks, vector, tag, reduce_core)

    def seconds(self, machine: Machine, ranks: int, payload: Payload) -> float:
        return all_reduce.recursive_doubling_s(machine, ranks, payload)

    def sent(self, ranks: int, rank: int, payload: Payload) -> Sent:
        return traffic.recursive_doubling(ranks, rank, payload)
