"""Rabenseifner's algorithm: reduce-scatter by recursive halving, all-gather by recursive doubling.

Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.

    for d = N/2, …, 2, 1:   keep one half of the rest, send the other to r xor d, add the received half to the kept one
    for d = 1, 2, …, N/2:   exchange with r xor d what each has, which doubles it

As few bytes as the ring in as few rounds as the tree: for long vectors on many ranks. Each number is summed once and
copied, so all ranks get the same bits. Where N is no power of two, the others are folded in and out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.communication.collective import MessageCollective, PointToPoint, exchange, folded
from polyrhythm.cost import all_reduce
from polyrhythm.cost import all_reduce as traffic
from polyrhythm.cost.all_reduce import Sent
from polyrhythm.cost.machine import Machine, Payload


class Rabenseifner(MessageCollective):
    """Halves, quarters, … are exchanged and reduced; then gathered the same way back."""

    def reduce_vector(self, ranks: PointToPoint, vector: Tensor, tag: int) -> None:
        def reduce_core(core: int) -> None:
            halvings = _halvings(vector, ranks.rank, core)
            for distance, kept, given in halvings:
                kept.add_(exchange(ranks, ranks.rank ^ distance, given, tag, kept))
            # The same way back: at each distance a rank has the sums of what it kept, and its partner those of what
            # it gave.
            for distance, kept, given in reversed(halvings):
                given.copy_(exchange(ranks, ranks.rank ^ distance, kept, tag, given))

        folded(ranks, vector, tag, reduce_core)

    def seconds(self, machine: Machine, ranks: int, payload: Payload) -> float:
        return all_reduce.rabenseifner_s(machine, ranks, payload)

    def sent(self, ranks: int, rank: int, payload: Payload) -> Sent:
        return traffic.rabenseifner(ranks, rank, payload)


def _halvings(vector: Tensor, rank: int, core: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return, for each distance from the largest on, the half that a rank keeps and the half that it gives away."""
    ends = [0]
    # Halves are whole slices, not halves of the length: both of a pair must cut alike where N does not divide it.
    for piece in torch.tensor_split(vector, core):
        ends.append(ends[-1] + piece.numel())
    found = []
    first, slices = 0, core
    while slices > 1:
        slices //= 2
        low = vector[ends[first] : ends[first + slices]]
        high = vector[ends[first + slices] : ends[first + 2 * slices]]
        upper = bool(rank & slices)
        found.append((slices, high, low) if upper else (slices, low, high))
        first += slices if upper else 0
    return found
