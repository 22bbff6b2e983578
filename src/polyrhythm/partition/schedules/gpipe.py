"""GPipe: all forward passes of a batch, then all backward passes.

Huang, Cheng, Bapna and others, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019, arXiv 1811.06965.

    K = 3, M = 4   0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
                   1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3
                   2  .. .. F0 F1 F2 F3 B0 B1 B2 B3

Each rank keeps the activations of M microbatches, and is idle for (K-1)(f+b).

Departure from the paper: backward passes go in ascending order, so that gradients are added up in the same order as
by the other schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from polyrhythm.partition.schedule import Schedule, Unit


class GPipe(Schedule):
    """All forward passes, then all backward passes."""

    forward_first: ClassVar[bool] = True
    deals_out: ClassVar[bool] = True

    def units(self, rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
        yield from (Unit("F", number) for number in range(microbatches))
        yield from (Unit("B", number) for number in range(microbatches))
