"""Half-precision numbers.

Micikevicius et al., "Mixed precision training", ICLR 2018, arXiv 1710.03740, for the type.

    d = float(half(clamp(p, -65504, 65504)))        off by at most 2^-11 of itself in the normal range
"""

from __future__ import annotations

from typing import ClassVar

import torch

from polyrhythm.compression.half_precision import HalfPrecision


class Float16(HalfPrecision):
    """Two bytes a number, with the range of float16 (65504)."""

    dtype: ClassVar[torch.dtype] = torch.float16
