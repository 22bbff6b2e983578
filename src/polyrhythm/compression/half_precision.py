"""Numbers of two bytes each.

    d = float(cast(clamp(p, -L, L)))        L = the largest number of the type

Payload: two bytes a number. Sums are made of the numbers that `decode` gives, in the type of the parameters.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.compression.compressor import Compressor, Place, bytes_of, check_length, values_of


class HalfPrecision(Compressor):
    """Two bytes a number.

    Attributes:
        dtype: dtype of what is sent.
        feedback: whether rounding errors are added to the next vector.
    """

    biased: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype]

    feedback: bool = False

    def nbytes(self, place: Place) -> int:
        return self.dtype.itemsize * place.numbers

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        largest = torch.finfo(
            self.dtype
        ).max  # larger numbers, or numbers rounded up from it, would be infinite
        return bytes_of(vector.clamp(-largest, largest).to(self.dtype))

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        return values_of(payload, self.dtype).to(place.dtype)
