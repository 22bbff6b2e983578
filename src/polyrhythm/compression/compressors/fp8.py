"""Eight-bit floating point, in blocks with a scale.

Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433, 2022, for the types; one float32 scale
a block, as is usual for model averaging in eight bits.

    s = max|p| / L of a block        L = 448 (e4m3) or 57344 (e5m2); 1 for a block of zeros
    d = s * float8(p / s)            clamped before the cast, which e4m3, without infinities, needs
"""

from __future__ import annotations

from typing import Literal

import torch

from polyrhythm.compression.scaled_blocks import ScaledBlocks

_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class FP8(ScaledBlocks):
    """One byte a number, which floats.

    Attributes:
        form: bits of exponent and mantissa.
    """

    form: Literal["e4m3", "e5m2"] = "e4m3"

    @property
    def code(self) -> tuple[torch.dtype, float]:
        kind = _TYPES[self.form]
        return kind, torch.finfo(kind).max
