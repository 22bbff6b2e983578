"""Double-buffered weights (PipeDream-2BW): no flush, two versions, and a delay of one batch.

Narayanan, Phanishayee, Shi, Chen, Zaharia, "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, arXiv
2006.09503.

    w(t+1) = w(t) - lr grad f(w(t-1))        batches 0 and 1 are computed with w(0)

All M microbatches of a batch go forward and backward with the same version, and one update follows their backward
passes. That needs M >= K, so that the batch before the last has been updated with when a batch begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from polyrhythm.errors import RequestError
from polyrhythm.partition.schedule import Schedule, Unit, alternating, warm_up


class DoubleBuffered(Schedule):
    """An update after every batch, by a gradient at the weights of one update before."""

    flushes: ClassVar[bool] = False

    def check(self, ranks: int, microbatches: int) -> None:
        if microbatches < ranks:
            raise RequestError(
                f"{self} keeps two versions of the weights, which needs as many microbatches as stages: ask for at "
                f"least {ranks} (given {microbatches})"
            )

    def units(self, rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
        yield from alternating(warm_up(rank, ranks), microbatches)

    def version(self, microbatch: int, rank: int, ranks: int, microbatches: int) -> int:
        # The newest version is made while the first microbatches of this batch are computed, so it is not for them.
        return max(0, microbatch // microbatches - 1)
