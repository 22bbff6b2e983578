"""In which pieces and in which order gradients set out, if the first that is needed shall be there first.

Peng, Zhu, Chen, Bao, Yi, Lan, Wu, Guo, "A generic communication scheduler for distributed DNN training acceleration",
SOSP 2019 (ByteScheduler), for cutting and for urgency.

    next = the piece used soonest among those with ready[piece] <= t        t: when the link is free again
    t'   = t + latency_s + numbers * seconds_per_number

Departure: all ranks must take the same order, and no rank can ask the others at every piece. So the order is that which
the rule gives for the times of the step before, which all ranks know.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from polyrhythm.training.flat_parameters import Bucket


@dataclass(frozen=True)
class Piece:
    """A run of neighbouring gradients that travels as one.

    Attributes:
        bucket: that it is a part of.
        start: of its first number in the vector.
        stop: one past its last.
    """

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class Speed:
    """What an all-reduce takes.

    Attributes:
        latency_s: however few numbers there are.
        seconds_per_number: besides.
    """

    latency_s: float
    seconds_per_number: float

    def seconds(self, piece: Piece) -> float:
        """Gives what a piece takes."""
        return self.latency_s + (piece.stop - piece.start) * self.seconds_per_number


def cut(buckets: Sequence[Bucket], numbers: float) -> list[Piece]:
    """Cuts large buckets into equal pieces, in the order in which buckets are filled, the end of each bucket first.

    Args:
        buckets: of the vector.
        numbers: that the smallest piece of a bucket that is cut has; 0 cuts nothing.
    """
    pieces = []
    for number, bucket in enumerate(buckets):
        length = bucket.stop - bucket.start
        parts = max(1, int(length / numbers)) if numbers else 1
        ends = [bucket.start + length * part // parts for part in range(parts + 1)]
        pieces += [Piece(number, ends[part], ends[part + 1]) for part in reversed(range(parts))]
    return pieces


def urgent_first(
    pieces: Sequence[Piece], ready_s: Sequence[float], use_s: Sequence[float], speed: Speed
) -> list[int]:
    """Gives the order in which pieces set out, as numbers of `pieces`: piece 0, and then as the rule has it.

    Args:
        pieces: in the order in which they are filled.
        ready_s: when each bucket's gradients are ready, in order; any beginning.
        use_s: when each bucket's parameters are used again; any other beginning.
        speed: of the link.
    """
    waiting: list[tuple[float, int]] = []
    order, coming = [0], 1
    now_s = ready_s[0] + speed.seconds(pieces[0])
    while len(order) < len(pieces):
        if not waiting:
            now_s = max(now_s, ready_s[pieces[coming].bucket])
        while coming < len(pieces) and ready_s[pieces[coming].bucket] <= now_s:
            heapq.heappush(waiting, (use_s[pieces[coming].bucket], coming))
            coming += 1
        order.append(heapq.heappop(waiting)[1])
        now_s += speed.seconds(pieces[order[-1]])
    return order
