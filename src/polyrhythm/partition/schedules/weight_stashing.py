"""Weight stashing: no flush; each microbatch is updated with at once, and its backward pass uses its forward's weights.

Narayanan, Harlap, Phanishayee and others, "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
arXiv 1806.03377, section 3.3.

    w(t+1) = w(t) - lr grad f(w_0(t-K+1), w_1(t-K+2), …, w_K-1(t))        w_k the parameters of rank k's stage
    w(t+1) = w(t) - lr grad f(w_0(t-K+1), …, w_K-1(t-K+1))                with vertical synchronization

Microbatch t of the stream is computed on rank k with the newest parameters that the rank has then, which K-1-k updates
are missing in (fewer at the beginning), and a copy of these is kept until its backward pass. With `vertical`, all ranks
take the version that rank 0 had when the microbatch entered.

A step's microbatches are minibatches in the paper's sense: an update follows each. Running statistics of batch
normalization are not kept by version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from polyrhythm.partition.schedule import Schedule, Unit, alternating, warm_up


class WeightStashing(Schedule):
    """An update after every microbatch, by a gradient at the weights of its forward pass.

    Attributes:
        vertical: whether all stages compute a microbatch with as many updates.
    """

    flushes: ClassVar[bool] = False

    vertical: bool = False

    def units(self, rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
        yield from alternating(warm_up(rank, ranks), microbatches)

    def updates_every(self, microbatches: int) -> int:
        return 1

    def version(self, microbatch: int, rank: int, ranks: int, microbatches: int) -> int:
        # Microbatches between their forward and backward pass on a rank are not in its updates yet.
        return max(0, microbatch - warm_up(0 if self.vertical else rank, ranks))
