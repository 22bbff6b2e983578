"""Brain floating point: the upper half of a float32, rounded to nearest.

Kalamkar et al., "A study of bfloat16 for deep learning training", arXiv 1905.12322, 2019.

    d = float(bfloat16(p))        off by at most 2^-8 of itself; the range is that of float32
"""

from __future__ import annotations

from typing import ClassVar

import torch

from polyrhythm.compression.half_precision import HalfPrecision


class BFloat16(HalfPrecision):
    """Two bytes a number, with the range of float32."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
