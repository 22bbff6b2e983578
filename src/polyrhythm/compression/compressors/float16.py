"""Half-precision numbers.

Micikevicius et al., "Mixed precision training", ICLR 2018, arXiv 1710.03740, for the type.

    d = float(half(clamp(p, -65504, 65504)))        off by at most 2^-11 of itself in the normal range

Payload: two bytes a number. Sums are made of the numbers that `decode` gives, in the type of the parameters.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.compression.compressor import Compressor, Place, bytes_of, check_length, values_of


class Float16(Compressor):
    """Two bytes a number, with the range of float16 (65504).

    Attributes:
        feedback: whether rounding errors are added to the next vector.
    """

    biased: ClassVar[bool] = False

    feedback: bool = False

    def nbytes(self, place: Place) -> int:
        return 2 * place.numbers

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        largest = torch.finfo(torch.float16).max
        return bytes_of(vector.clamp(-largest, largest).half())

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        return values_of(payload, torch.float16).to(place.dtype)
