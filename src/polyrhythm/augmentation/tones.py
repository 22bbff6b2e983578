"""The values of black and white in an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tones:
    """The values of black and white, for all channels or one per channel; light is linear in between."""

    black: tuple[float, ...]
    white: tuple[float, ...]

    def of(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return black and white as (1, C, 1, 1) or (1, 1, 1, 1), with the dtype and device of float images."""
        black, white = (images.new_tensor(tone).view(1, -1, 1, 1) for tone in (self.black, self.white))
        return black, white

    def unit(self, images: Tensor) -> Tensor:
        """Return images (B, C, H, W) as float32, black being 0 and white 1."""
        if not images.is_floating_point():
            return images.float() / 255
        black, white = self.of(images)
        return ((images - black) / (white - black)).float()

    def restored(self, unit: Tensor, images: Tensor) -> Tensor:
        """Undo `unit`, in the dtype of the `images` that it was given; values are clipped to black and white."""
        unit = unit.clamp(0, 1)
        if not images.is_floating_point():
            return (unit * 255).round_().to(images.dtype)
        black, white = self.of(images)
        return (unit * (white - black) + black).to(images.dtype)


BYTES = Tones((0.0,), (255.0,))
UNIT = Tones((0.0,), (1.0,))
