"""The values of black and white in a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tones:
    """The values of black and white; light is linear in between.

    Attributes:
        black: one value for all channels, or one per channel: 0 in a picture of bytes, below 0 in normalised pixels.
        white: likewise; 255 in a picture of bytes.
    """

    black: tuple[float, ...]
    white: tuple[float, ...]

    def of(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return black and white as (1, C, 1, 1) or (1, 1, 1, 1), with the dtype and device of float images."""
        black, white = (images.new_tensor(tone).view(1, -1, 1, 1) for tone in (self.black, self.white))
        return black, white


BYTES = Tones((0.0,), (255.0,))
UNIT = Tones((0.0,), (1.0,))
