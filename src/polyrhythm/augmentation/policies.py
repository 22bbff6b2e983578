"""Operations that policies of augmentation choose from, as Pillow does them; their strength is a share from 0 to 1.

E. Cubuk, B. Zoph, D. Mane, V. Vasudevan, Q. Le, "AutoAugment", CVPR 2019, arXiv:1805.09501, for the
operations.
Geometric ones sample by nearest neighbor, about the image's center, and leave black outside; so do torchvision's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from polyrhythm.augmentation.tones import Tones

_MODES = {1: "L", 3: "RGB"}


def _shear(image: Image.Image, x: float, y: float) -> Image.Image:
    # about the center across the shear, as the axis along it stays in its place
    width, height = image.size
    matrix = (1, -x, x * height / 2, -y, 1, y * width / 2)
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


def _moved(image: Image.Image, x: float, y: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, (1, 0, -round(x), 0, 1, -round(y)))


@dataclass(frozen=True)
class Operation:
    """An operation: whether its strength has a sign, and what it makes of an image and a strength."""

    signed: bool
    act: Callable[[Image.Image, float], Image.Image]


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance], most: float) -> Operation:
    return Operation(True, lambda image, level: kind(image).enhance(1 + most * level))


def operations(
    *, shear: float, move: float, pixels: bool, turn: float, enhance: float, bits: int
) -> list[Operation]:
    """Return the fourteen operations of RandAugment and TrivialAugment, at their strongest.

    Args:
        shear: angle's tangent.
        move: pixels, if `pixels`, else shares of the side.
        pixels: the unit of `move`.
        turn: degrees.
        enhance: change of a factor from 1.
        bits: bits that posterizing leaves.
    """

    def far(side: int) -> float:
        return move if pixels else move * side

    return [
        Operation(False, lambda image, level: image),
        Operation(True, lambda image, level: _shear(image, shear * level, 0)),
        Operation(True, lambda image, level: _shear(image, 0, shear * level)),
        Operation(True, lambda image, level: _moved(image, far(image.width) * level, 0)),
        Operation(True, lambda image, level: _moved(image, 0, far(image.height) * level)),
        Operation(True, lambda image, level: image.rotate(turn * level)),
        _enhanced(ImageEnhance.Brightness, enhance),
        _enhanced(ImageEnhance.Color, enhance),
        _enhanced(ImageEnhance.Contrast, enhance),
        _enhanced(ImageEnhance.Sharpness, enhance),
        Operation(False, lambda image, level: ImageOps.posterize(image, 8 - round((8 - bits) * level))),
        Operation(
            False, lambda image, level: ImageOps.solarize(image, 255 - round(255 * level) + (level == 0))
        ),
        Operation(False, lambda image, level: ImageOps.autocontrast(image)),
        Operation(False, lambda image, level: ImageOps.equalize(image)),
    ]


def each_picture(
    images: Tensor, tones: Tones, change: Callable[[Image.Image, int], Image.Image | Tensor]
) -> Tensor:
    """Return images (B, C, H, W) changed one by one as images of bytes, in a new tensor.

    Args:
        images: uint8 or float, on any device.
        tones: black and white in float images.
        change: maps an image and its place in the batch to the changed image, or to (C, H, W) from 0 to 1.

    Raises:
        RequestError: the images have other than one or three channels.
    """
    channels = images.shape[1]
    if channels not in _MODES:
        raise RequestError(f"images of {channels} channels cannot be changed by such a policy: 1 or 3 can")
    pixels = (
        (tones.unit(images) * 255).round().clamp(0, 255).to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy()
    )
    found = []
    for place, each in enumerate(pixels):
        changed = change(Image.fromarray(each[:, :, 0] if channels == 1 else each), place)
        found.append(changed if isinstance(changed, Tensor) else unit_of(changed))
    return tones.restored(torch.stack(found).to(images.device), images)


def unit_of(image: Image.Image) -> Tensor:
    """Return an image as (C, H, W) float32 from 0 to 1."""
    pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
