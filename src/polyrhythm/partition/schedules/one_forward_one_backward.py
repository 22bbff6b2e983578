"""One forward, one backward (1F1B) with a flush: activations of as few microbatches as possible.

Narayanan, Harlap, Phanishayee and others, "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
arXiv 1806.03377, for the order; Narayanan and others, "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021,
arXiv 2006.09503, for the flush.

    K = 3, M = 4   0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
                   1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
                   2  .. .. F0 B0 F1 B1 F2 B2 F3 B3

Rank k keeps the activations of min(M, K-k) microbatches, and is idle for (K-1)(f+b), as with GPipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from polyrhythm.partition.schedule import Schedule, Unit, alternating, warm_up


class OneForwardOneBackward(Schedule):
    """Backward passes as early as they can be."""

    deals_out: ClassVar[bool] = True

    def units(self, rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
        yield from alternating(warm_up(rank, ranks), microbatches)
