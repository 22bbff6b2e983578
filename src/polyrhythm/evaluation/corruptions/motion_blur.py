"""Motion blur: the camera moved along a line while the shutter was open.

    out = mean of x along a line of length l and a random angle;    l = 10, 15, 20, 25, 30 pixels of 224

Departure from ImageNet-C: the line weighs alike over its length, where they have a Gaussian of the same extent.
"""

from __future__ import annotations

from math import cos, pi, sin
from typing import TYPE_CHECKING

import torch

from polyrhythm.evaluation.corruption import Corruption, pixels
from polyrhythm.evaluation.corruptions.defocus_blur import blurred

if TYPE_CHECKING:
    from torch import Tensor

_LENGTHS = (10.0, 15.0, 20.0, 25.0, 30.0)
_POINTS = 64


class MotionBlur(Corruption):
    """A picture from a moving camera."""

    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Blurs along a line; see `Corruption.spoil`."""
        length = pixels(_LENGTHS[severity - 1], images)
        angles = [float(torch.rand((), generator=each)) * pi for each in generators]
        rows = [
            blurred(image[None], _line(length, angle)) for image, angle in zip(images, angles, strict=True)
        ]
        return torch.cat(rows)


def _line(length: float, angle: float) -> Tensor:
    """Gives a line through the centre of a kernel (k, k), each of its points shared by the four pixels around it."""
    half = int(length / 2) + 1
    kernel = torch.zeros(2 * half + 1, 2 * half + 1)
    along = torch.linspace(-length / 2, length / 2, _POINTS)
    x, y = half + along * cos(angle), half + along * sin(angle)
    left, top = (each.floor().long().clamp_max(2 * half - 1) for each in (x, y))
    right_share, lower_share = x - left, y - top
    for row, share_y in ((top, 1 - lower_share), (top + 1, lower_share)):
        kernel.index_put_((row, left), share_y * (1 - right_share), accumulate=True)
        kernel.index_put_((row, left + 1), share_y * right_share, accumulate=True)
    return kernel / kernel.sum()
