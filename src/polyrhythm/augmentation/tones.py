"""What black and white are, in the numbers of a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tones:
    """The numbers that stand for black and white; between them, light is linear in the number.

    Attributes:
        black: one number for all channels, or one for each: 0 in a picture of bytes, below 0 where pixels were
            normalised.
        white: the same; 255 in a picture of bytes.
    """

    black: tuple[float, ...]
    white: tuple[float, ...]

    def of(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Gives black and white as (1, C, 1, 1) or (1, 1, 1, 1) in the dtype and on the device of float images."""
        black, white = (images.new_tensor(tone).view(1, -1, 1, 1) for tone in (self.black, self.white))
        return black, white


BYTES = Tones((0.0,), (255.0,))
UNIT = Tones((0.0,), (1.0,))
