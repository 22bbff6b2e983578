"""How bytes of photographs become numbers: what is taken from a pixel, and what it is divided by.

imagenet    (x - mean) / std of ImageNet, by channel      torchvision's and most of timm's networks
centred     (x - 127) / 128                               Google's TFLite models, EfficientNet-Lite among them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

Pixels = Literal["imagenet", "centred"]


@dataclass(frozen=True)
class Normalization:
    """What bytes become.

    Attributes:
        mean: taken from every pixel, by channel, in bytes.
        std: what is left is divided by it.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Gives bytes (B, H, W, 3) as (B, 3, H, W) float32 in new memory."""
        images = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = (self._channels(numbers).to(images.device) for numbers in (self.mean, self.std))
        return images.sub_(mean).div_(std)

    def of_tone(self, tone: float) -> tuple[float, ...]:
        """Gives what a grey of `tone`, in bytes, becomes, by channel."""
        number = torch.full((1, 1, 1, 3), tone)
        return tuple(self(number).flatten().tolist())

    @staticmethod
    def _channels(numbers: tuple[float, float, float]) -> Tensor:
        return torch.tensor(numbers).view(1, 3, 1, 1)


NORMALIZATIONS: dict[str, Normalization] = {
    "imagenet": Normalization(
        (0.485 * 255, 0.456 * 255, 0.406 * 255), (0.229 * 255, 0.224 * 255, 0.225 * 255)
    ),
    "centred": Normalization((127.0, 127.0, 127.0), (128.0, 128.0, 128.0)),
}
