"""Ring reduce-scatter and all-gather.

Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

    reduce    N-1 times:  send slice (r-1-t) mod N to r+1,  add what r-1 sends to slice (r-2-t) mod N
    gather    N-1 times:  send slice (r-t) mod N to r+1,    overwrite slice (r-1-t) mod N

r is this rank, t counts the rounds from 0. Slice k sets out at rank k+1 and is whole at rank k.
Each rank talks to its neighbors only and sends `2 M (N-1)/N` bytes, the least that any algorithm can.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyrhythm.communication.collective import PointToPoint, SlicedCollective, receive, start_send
from polyrhythm.cost import all_reduce
from polyrhythm.cost import all_reduce as traffic
from polyrhythm.cost.all_reduce import Sent
from polyrhythm.cost.machine import Machine, Payload


class Ring(SlicedCollective):
    """Slices go around the ring twice: once to be added up, once to be known to all."""

    def reduce_slices(self, ranks: PointToPoint, slices: Sequence[Tensor], tag: int) -> None:
        for turn in range(1, ranks.size):
            target = slices[(ranks.rank - 1 - turn) % ranks.size]
            target.add_(_shift(ranks, slices[(ranks.rank - turn) % ranks.size], tag, target))

    def gather_slices(self, ranks: PointToPoint, slices: Sequence[Tensor], tag: int) -> None:
        for turn in range(ranks.size - 1):
            target = slices[(ranks.rank - 1 - turn) % ranks.size]
            target.copy_(_shift(ranks, slices[(ranks.rank - turn) % ranks.size], tag, target))

    def seconds(self, machine: Machine, ranks: int, payload: Payload) -> float:
        return all_reduce.ring_s(machine, ranks, payload)

    def sent_slices(self, slice_bytes: Sequence[int], rank: int) -> Sent:
        return traffic.ring(slice_bytes, rank)


def _shift(ranks: PointToPoint, vector: Tensor, tag: int, like: Tensor) -> Tensor:
    """Send to the replacement and return what the predecessor sends."""
    handle = start_send(ranks, (ranks.rank + 1) % ranks.size, vector, tag)
    found = receive(ranks, (ranks.rank - 1) % ranks.size, tag, like)
    # Last: all ranks send at once, and a rank that waited for its own send first might wait for another such
    # rank.
    handle.wait()
    return found
