"""Brain floating point: the upper half of a float32, rounded to nearest.

Kalamkar et al., "A study of bfloat16 for deep learning training", arXiv 1905.12322, 2019.

    d = float(bfloat16(p))        off by at most 2^-8 of itself; the range is that of float32

Payload: two bytes a number. Sums are made of the numbers that `decode` gives, in the type of the parameters.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.compression.compressor import Compressor, Place, bytes_of, check_length, values_of


class BFloat16(Compressor):
    """Two bytes a number, with the range of float32.

    Attributes:
        feedback: whether rounding errors are added to the next vector.
    """

    biased: ClassVar[bool] = False

    feedback: bool = False

    def nbytes(self, place: Place) -> int:
        return 2 * place.numbers

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        largest = torch.finfo(torch.bfloat16).max  # rounding up from beyond it would give an infinity
        return bytes_of(vector.clamp(-largest, largest).bfloat16())

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        return values_of(payload, torch.bfloat16).to(place.dtype)
