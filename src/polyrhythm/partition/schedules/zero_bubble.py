"""Zero bubble, ZB-H1: a backward pass in two parts; the part that no other rank waits for fills the gaps.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241.

    B  the gradients of a stage's inputs, which the stage before waits for       W  those of its weights

    K = 3, M = 4   0  F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3
                   1  .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
                   2  .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

Each rank is idle for (K-1)(f+B-W) where W <= B. What the gradients of weights are computed from is kept until W: of K
microbatches on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from polyrhythm.partition.schedule import Schedule, Unit, warm_up


class ZeroBubble(Schedule):
    """The backward pass for inputs first, that for weights where there is time."""

    splits_backward: ClassVar[bool] = True

    def units(self, rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
        first = min(warm_up(rank, ranks), microbatches)
        weights = 0
        yield from (Unit("F", number) for number in range(first))
        for number in range(microbatches - first):
            yield Unit("F", first + number)
            yield Unit("B", number)
            # The first k of rank k wait for the end, where it would be idle: k ranks before it need its next B
            # sooner.
            if number >= rank:
                yield Unit("W", weights)
                weights += 1
        for number in range(microbatches - first, microbatches):
            yield Unit("B", number)
            yield Unit("W", weights)
            weights += 1
        yield from (Unit("W", number) for number in range(weights, microbatches))
