"""Interleaved 1F1B: several stages a rank, so that the pipeline fills and empties in less time.

Narayanan, Shoeybi, Casper and others, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, arXiv 2104.04473, section 2.2.2.

    R = max(1, M div K) rounds of q = M / R microbatches, which must be whole
    rank k:  min((v-1) q + 2 (K-1-k), v M) forward passes, then one forward, one backward, then the rest
             i-th forward pass: chunk (i div q) mod v      i-th backward pass: chunk v - 1 - that

Each rank is idle for (K-1)(f+b)/v, and v times as many messages travel.

Departure from the paper, which asks for M that K divides: M need only divide into its rounds. Where M = K,
all forward passes are first in Megatron; here the order above is kept, which takes as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from polyrhythm.partition.schedule import Schedule, Unit, whole_rounds


class Interleaved(Schedule):
    """Several stages a rank, in turn.

    Attributes:
        v: stages of each rank.
    """

    v: Annotated[int, Field(ge=1)] = 2

    @property
    def chunks(self) -> int:
        return self.v

    def check(self, ranks: int, microbatches: int) -> None:
        whole_rounds(ranks, microbatches, str(self))

    def units(self, rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
        together = self.v * microbatches
        in_round = whole_rounds(ranks, microbatches, str(self))
        first = min((self.v - 1) * in_round + 2 * (ranks - 1 - rank), together)
        done: Counter[tuple[str, int]] = Counter()

        def forward(number: int) -> Unit:
            # A whole round goes through a chunk before the next chunk: by then its first microbatch is back from
            # the last rank.
            chunk = number // in_round % self.v
            done["F", chunk] += 1
            return Unit("F", done["F", chunk] - 1, chunk)

        def backward(number: int) -> Unit:
            # Gradients begin at the network's end, which is every rank's last chunk.
            chunk = self.v - 1 - number // in_round % self.v
            done["B", chunk] += 1
            return Unit("B", done["B", chunk] - 1, chunk)

        yield from (forward(number) for number in range(first))
        for number in range(together - first):
            yield forward(first + number)
            yield backward(number)
        yield from (backward(number) for number in range(together - first, together))
