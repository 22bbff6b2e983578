"""Random crop: every image is padded on all sides, and a window of its original size is cut out at random.

Paper: A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet Classification with Deep Convolutional Neural
Networks", NIPS 2012; with padding, as here, M. Lin, Q. Chen, S. Yan, "Network In Network", ICLR 2014,
arXiv:1312.4400.

    out[b, :, y, x] = padded[b, :, y + top[b], x + left[b]],    top[b], left[b] ~ uniform{0, …, 2 p}

p is `padding`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch.nn.functional import pad

from polyrhythm.augmentation.tones import Tones
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws

Fill = Literal["zero", "reflect"]


class Crop(Config):
    """Random crop after padding.

    Attributes:
        padding: pixels added on every side; 0 leaves the images unchanged.
        fill: the padding: `zero` (the mean color, as images are normalized) or `reflect` (the image mirrored).
    """

    padding: int = Field(default=4, ge=0)
    fill: Fill = "zero"

    def combinations(self, channels: int, side: int) -> int:
        """Return the number of positions."""
        return (2 * self.padding + 1) ** 2

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        top, left = draws.integers(0, 2 * self.padding), draws.integers(0, 2 * self.padding)
        return crop(images, top, left, self.padding, self.fill)


def crop(images: Tensor, top: Tensor, left: Tensor, padding: int, fill: Fill = "zero") -> Tensor:
    """Cut a window out of every padded image.

    Args:
        images: (B, C, H, W), not changed; returned as they are if there is no padding.
        top: (B,) int64, first row of each window in the padded image; `padding` leaves the image unchanged.
        left: (B,) int64, also for columns.
        padding: pixels added on every side.
        fill: `zero` or `reflect`.

    Raises:
        RequestError: the images are too small to be reflected that far.
    """
    if padding == 0 or len(images) == 0:
        return images
    height, width = images.shape[2:]
    if fill == "reflect" and padding >= min(height, width):
        raise RequestError(
            f"crop(padding={padding}, fill=reflect) needs images larger than {padding} pixels, "
            f"and these are {height} by {width}: lower the padding or use fill=zero"
        )
    padded = pad(images, (padding,) * 4, mode="constant" if fill == "zero" else "reflect")
    # All windows at once, as a view (B, C, 2p+1, 2p+1, H, W); picking one an image is the only copy.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    top, left = top.to(images.device), left.to(images.device)
    return windows[torch.arange(len(images), device=images.device), :, top, left]
