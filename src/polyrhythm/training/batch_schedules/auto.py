"""Batches that grow with the gradient noise scale, and a learning rate that follows them as AdaScale's does.

S. McCandlish, J. Kaplan, D. Amodei, "An empirical model of large-batch training", 2018, arXiv 1812.06162; T. Johnson
and others, "AdaScale SGD", ICML 2020, arXiv 2007.05105.

    B <- growth B    while growth B <= noise scale, and at most `most` first batches
    lr factor        (k + 1) / (k / m + 1)        m = B / first B, k = noise scale / first B

It is decided at the ends of epochs, `every` share of the run, by the noise scale of the latter half of the steps so far
(see `noise_scale`), which workers that average their gradients measure anyway. With rate=constant the learning rate
stays, so that a growing batch is a falling rate. Departures: neither paper grows batches in the course of a run by it;
the schedule of the rate follows epochs, as with other batch schedules.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polyrhythm.specs import Spec
from polyrhythm.training.quantities import Count, InnerFraction, Positive
from polyrhythm.training.schedule import BatchSchedule


class Auto(BatchSchedule):
    """Keys of batches that grow by noise.

    Attributes:
        every: share of the run's epochs from one decision to the next.
        growth: factor of one growth of the batch.
        most: upper bound of the batch, in first batches.
        rate: whether the learning rate follows (`adascale`) or stays (`constant`).
        factors: batches of the epochs so far, in first batches; the last one's are those of all that follow.
        gains: factors of the learning rate in these epochs.
    """

    every: InnerFraction = 0.125
    growth: Annotated[int, Field(ge=2)] = 2
    most: Count = 64
    rate: Literal["adascale", "constant"] = "adascale"
    factors: tuple[Count, ...] = ()
    gains: tuple[Positive, ...] = ()

    def spec(self) -> Spec:
        """Return the spec of what was asked for, without what was decided since."""
        asked = super().spec()
        decided = ("factors", "gains")
        return Spec(asked.name, {key: value for key, value in asked.arguments.items() if key not in decided})

    def factor(self, epoch: int, epochs: int) -> int:
        return self.factors[min(epoch, len(self.factors) - 1)] if self.factors else 1

    def rate_factor(self, epoch: int, epochs: int) -> float:
        return self.gains[min(epoch, len(self.gains) - 1)] if self.gains else 1.0

    def decided(self, scale: float | None, first_batch: int, images: int) -> tuple[int, float]:
        """Return the factor of the batch from here on, and that of the learning rate.

        Args:
            scale: the noise scale, in images; None: it is not known, and nothing changes.
            first_batch: images of the run's first batches, of all workers.
            images: images of an epoch; a batch is a tenth of it at most.
        """
        factor = self.factors[-1] if self.factors else 1
        gain = self.gains[-1] if self.gains else 1.0
        if scale is None:
            return factor, gain
        most = min(scale, images / 10, self.most * first_batch)
        while factor * self.growth * first_batch <= most:
            factor *= self.growth
        if self.rate == "adascale":
            share = scale / first_batch
            gain = (share + 1) / (share / factor + 1)
        return factor, gain
