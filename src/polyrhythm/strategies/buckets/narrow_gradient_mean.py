"""The weighted mean of a group's gradients, which travel as numbers of two bytes.

    h_i = cast((b_i / N) * g_i)          float16 or bfloat16; divided before the cast, so that a sum does not overflow
    g   = (sum_i h_i) * N / sum_i b_i    added up as it travels, then cast back

A number that the narrow type holds is exact; others are off by at most 2^-11 (float16) or 2^-8 (bfloat16) of themselves
at each cast, and each addition rounds again. What must be exact, the weights b_i and the requests to stop, is too much
for such numbers: it travels apart, as whole numbers, in one small message more.
"""

from __future__ import annotations

from typing import Literal

import torch

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.errors import RequestError
from polyrhythm.strategies.buckets.gradient_mean import GradientMean
from polyrhythm.strategies.step import Step
from polyrhythm.training.flat_parameters import FlatParameters

Transfer = Literal["full", "float16", "bfloat16"]
"""As what gradients travel; `full`: as what they are."""

_PARTS_OF_ONE = 1 << 32
"""Weights are whole multiples of one part in so many."""


def gradient_mean(
    group: Communicator, flat: FlatParameters, collective: Collective, transfer: Transfer
) -> GradientMean:
    """Makes the mean of gradients that travel as asked."""
    if transfer == "full":
        return GradientMean(group, flat, collective)
    return NarrowGradientMean(group, flat, collective, getattr(torch, transfer))


class NarrowGradientMean(GradientMean):
    """As `GradientMean`, with copies of the gradients in a narrower type.

    Args:
        group: who takes part.
        flat: whose gradients.
        collective: how they are added up.
        dtype: as which they travel.
    """

    def __init__(
        self, group: Communicator, flat: FlatParameters, collective: Collective, dtype: torch.dtype
    ) -> None:
        super().__init__(group, flat, collective)
        self._by_library = False  # it is copies that travel, so the gradients stay
        self._narrow = torch.zeros(flat.size, dtype=dtype, device=flat.vector.device)
        self._weights = torch.zeros(2, dtype=torch.int64, device=flat.vector.device)
        self._weights_under_way: Handle | None = None

    def over(self, group: Communicator) -> NarrowGradientMean:
        """Makes the mean of others' gradients; see `GradientMean.over`."""
        return NarrowGradientMean(group, self._flat, self._sum.passed_on(), self._narrow.dtype)

    def start(self, bucket: int) -> None:
        """Starts to sum a bucket whose gradients are final; buckets must come in order."""
        if self._group.size == 1:
            return
        if bucket == 0:
            told = [round(self._step.weight * _PARTS_OF_ONE), int(self._step.stop)]
            self._weights.copy_(self._weights.new_tensor(told))
            self._weights_under_way = self._sum.start(self._weights)
        place = self._flat.buckets[bucket]
        stop = min(place.stop, self._flat.size)
        gradients, narrow = self._flat.gradients[place.start : stop], self._narrow[place.start : stop]
        gradients.mul_(self._step.weight / self._group.size)
        narrow.copy_(gradients)
        self._under_way.append(self._sum.start(narrow))

    def break_off(self) -> None:
        """Waits until the sums that are under way have broken, as they do once the group is revoked."""
        if self._weights_under_way is not None:
            self._under_way.append(self._weights_under_way)
            self._weights_under_way = None
        super().break_off()

    def finish(self, step: Step) -> tuple[float, bool]:
        """Waits for all buckets, starting those that nobody has; see `GradientMean.finish`.

        Raises:
            RequestError: a gradient is out of the range of float16.
        """
        self._step = step
        if self._group.size == 1:
            return step.weight, step.stop
        self._start_rest()
        for handle in self._under_way:
            handle.wait()
        assert self._weights_under_way is not None, "they set out with bucket 0"
        self._weights_under_way.wait()
        parts, stops = self._weights.tolist()
        self._flat.gradients.copy_(self._narrow)
        if self._narrow.dtype == torch.float16 and not bool(self._narrow.isfinite().all()):
            raise RequestError(
                f"at step {step.number} a gradient is beyond the range of float16 (65504): use "
                "transfer=bfloat16, whose range is that of float32, or transfer=full"
            )
        share = parts / _PARTS_OF_ONE / self._group.size
        if share not in (0, 1):
            self._flat.gradients.div_(share)
        return parts / _PARTS_OF_ONE, stops > 0
