"""Direct reduce-scatter and all-gather, the "butterfly synchronization" of Deep Image.

Wu, Yan, Shan, Dang, Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv 1501.02876, section 3.1.

    rank k:  s_k = x_k[0] + x_k[1] + … + x_k[N-1]        x_k[i] is slice k of rank i's vector
             sends s_k to all

Every rank receives its own slice from all others, adds the slices up in rank order, and sends the sum to all. Bytes
sent by each rank: `2 M (N-1)/N`; bit-identical on all ranks, because each slice is summed once. Not the butterfly of
`recursive_doubling`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyrhythm.communication.collective import PointToPoint, SlicedCollective, receive, start_send
from polyrhythm.cost import all_reduce
from polyrhythm.cost import all_reduce as traffic
from polyrhythm.cost.all_reduce import Sent
from polyrhythm.cost.machine import Machine, Payload


class Direct(SlicedCollective):
    """Every rank adds up one slice in rank order and hands it out."""

    def reduce_slices(self, ranks: PointToPoint, slices: Sequence[Tensor], tag: int) -> None:
        mine, others = slices[ranks.rank], _others(ranks)
        sends = [start_send(ranks, to, slices[to], tag) for to in others]
        parts = {source: receive(ranks, source, tag, mine) for source in others}
        for handle in sends:
            handle.wait()
        parts[ranks.rank] = mine.clone()
        mine.copy_(parts[0])
        for rank in range(1, ranks.size):  # in rank order: the same bits whichever arrives first
            mine.add_(parts[rank])

    def gather_slices(self, ranks: PointToPoint, slices: Sequence[Tensor], tag: int) -> None:
        others = _others(ranks)
        sends = [start_send(ranks, to, slices[ranks.rank], tag) for to in others]
        for source in others:
            slices[source].copy_(receive(ranks, source, tag, slices[source]))
        for handle in sends:
            handle.wait()

    def seconds(self, machine: Machine, ranks: int, payload: Payload) -> float:
        return all_reduce.direct_s(machine, ranks, payload)

    def sent_slices(self, slice_bytes: Sequence[int], rank: int) -> Sent:
        return traffic.direct(slice_bytes, rank)


def _others(ranks: PointToPoint) -> list[int]:
    return [rank for rank in range(ranks.size) if rank != ranks.rank]
