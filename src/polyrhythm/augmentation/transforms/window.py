"""Random windows: a network sees a part of a larger image, a different one in every epoch.

Papers: A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", NIPS
2012; R. Wu, S. Yan, Y. Shan, Q. Dang, G. Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv:1501.02876,
section 4.1.

    out[b, :, y, x] = image[b, :, top[b] + y, left[b] + x],    top[b], left[b] ~ uniform{0, …, S - size}

S is the side of the image. Deep Image counts (512 - 224)^2 = 82,944 positions, without the last row and column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.augmentation.tones import Tones
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws


class Window(Config):
    """Random windows. `--scale` puts one before all other augmentations.

    Attributes:
        size: pixels a side.
    """

    size: int = Field(ge=1)

    def combinations(self, channels: int, side: int) -> int:
        """Return the number of positions in a square image as the paper counts, without the last row and column."""
        return (side - self.size) ** 2

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        return self.cut(images, self.drawn(images, draws))

    def drawn(self, images: Tensor, draws: Draws) -> Tensor:
        """Draw the first row and column of each window in images (B, C, H, W): (B, 2) int64.

        Raises:
            RequestError: it is larger than the images.
        """
        height, width = images.shape[2:]
        if self.size > min(height, width):
            raise RequestError(
                f"a window of {self.size} pixels does not fit into images of {height} by {width}: give a smaller one"
            )
        top, left = draws.integers(0, height - self.size), draws.integers(0, width - self.size)
        return torch.stack((top, left), 1)

    def cut(self, images: Tensor, places: Tensor) -> Tensor:
        """Return the windows (B, C, size, size) of images at drawn places."""
        # All windows at once, as a view; picking one an image is the only copy.
        windows = images.unfold(2, self.size, 1).unfold(3, self.size, 1)
        top, left = places.to(images.device).unbind(1)
        return windows[torch.arange(len(images), device=images.device), :, top, left]
