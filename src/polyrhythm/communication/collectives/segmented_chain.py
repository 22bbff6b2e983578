"""Segmented chain: a pipeline to rank 0 and back.

Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience", CCPE 2007.

    reduce      N-1 ─▶ … ─▶ 1 ─▶ 0      every rank adds its own and passes on, segment after segment
    broadcast   N-1 ◀─ … ◀─ 1 ◀─ 0

S = segments. Neighbor traffic only, all of it in one direction at a time. Each segment is added up in one order, from
the last rank to the first, and copied, so all ranks get the same bits.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.collective import MessageCollective, PointToPoint, receive, start_send
from polyrhythm.communication.communicator import Handle
from polyrhythm.cost import all_reduce
from polyrhythm.cost import all_reduce as traffic
from polyrhythm.cost.all_reduce import Sent
from polyrhythm.cost.machine import Machine, Payload

DEFAULT_OVERHEAD_BYTES = 65536.0
"""α/β of common networks, within a factor of two: 0.5 ms at 1 Gb/s, 5 µs at 100 Gb/s."""


class SegmentedChain(MessageCollective):
    """Segments are added up along a chain of ranks, and the sums are sent back along it.

    Attributes:
        segments: number of segments; default: the best for `overhead_bytes`, `√((N-2) M / overhead_bytes)`.
            Never more than there are numbers.
        overhead_bytes: α/β of the links: cost of a message in addition to its payload, in bytes.
    """

    segments: int | None = Field(default=None, ge=1)
    overhead_bytes: float = Field(default=DEFAULT_OVERHEAD_BYTES, gt=0, allow_inf_nan=False)

    def segments_for(self, ranks: int, payload: Payload) -> int:
        """Return the number of segments of a vector."""
        if self.segments is None:
            return all_reduce.best_segments(self.overhead_bytes, ranks, payload)
        return max(1, min(self.segments, payload.elements))

    def reduce_vector(self, ranks: PointToPoint, vector: Tensor, tag: int) -> None:
        payload = Payload(vector.numel(), vector.element_size())
        segments = torch.tensor_split(vector, self.segments_for(ranks.size, payload))
        lower, higher = ranks.rank - 1, ranks.rank + 1
        outgoing = _Outgoing()
        for segment in segments:
            if higher < ranks.size:
                segment.add_(receive(ranks, higher, tag, segment))
            if lower >= 0:
                outgoing.follow(ranks, lower, segment, tag)
        outgoing.wait()
        for segment in segments:
            if lower >= 0:
                segment.copy_(receive(ranks, lower, tag, segment))
            if higher < ranks.size:
                outgoing.follow(ranks, higher, segment, tag)
        outgoing.wait()

    def seconds(self, machine: Machine, ranks: int, payload: Payload) -> float:
        return all_reduce.segmented_chain_s(machine, ranks, payload, self.segments_for(ranks, payload))

    def sent(self, ranks: int, rank: int, payload: Payload) -> Sent:
        return traffic.segmented_chain(ranks, rank, payload, self.segments_for(ranks, payload))


class _Outgoing:
    """Segments that leave one after the other, the next being received in the meantime."""

    def __init__(self) -> None:
        self._last: Handle | None = None

    def follow(self, ranks: PointToPoint, to: int, segment: Tensor, tag: int) -> None:
        """Start to send when the one before has left: a port carries one message at a time, in order."""
        self.wait()
        self._last = start_send(ranks, to, segment, tag)

    def wait(self) -> None:
        """Return when the last one has left."""
        if self._last is not None:
            self._last.wait()
            self._last = None
