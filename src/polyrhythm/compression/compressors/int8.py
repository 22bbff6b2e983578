"""Whole numbers of eight bits, in blocks with a scale.

Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016, arXiv 1511.04561, for the idea; linear
codes and one float32 scale a block, as most systems have them.

    s = max|p| / 127 of a block        1 for a block of zeros
    d = s * round(p / s)               off by at most s / 2
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.compression.scaled_blocks import ScaledBlocks


class Int8(ScaledBlocks):
    """One byte a number, which is whole."""

    @property
    def code(self) -> tuple[torch.dtype, float]:
        return torch.int8, 127

    def codes(self, quotients: Tensor) -> Tensor:
        return super().codes(quotients.round_())
