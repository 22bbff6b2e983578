"""Decoding of image files to pixels, and normalization of pixels to numbers.

Images are decoded, turned upright, converted to RGB, scaled and cropped to a square. Bytes of photographs are
normalized in one of two ways:

    imagenet    (x - mean) / std of ImageNet, by channel      torchvision's and most of timm's networks
    centered     (x - 127) / 128                               Google's TFLite models, EfficientNet-Lite among them
"""

from __future__ import annotations

import os
import stat
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

if TYPE_CHECKING:
    from torch import Tensor


# Rasters only. Pillow also opens formats that run other programs (EPS) or that it cannot decode (MPEG).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")

# The center that a network sees is 224 of 256 pixels of the shorter side, at whatever size.
SHORTER_SIDE = 256
CENTRE = 224
CENTRAL_SHARE = CENTRE / SHORTER_SIDE


class UnreadableImage(Exception):
    """A file is not an image that can be decoded; the message is the reason."""


@cache
def suffixes() -> frozenset[str]:
    """Return the suffixes, lower-case with the dot, of all files that count as images here."""
    return frozenset(name for name, format_ in Image.registered_extensions().items() if format_ in _formats())


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def read_pixels(
    path: str | Path | IO[bytes], image_size: int, share: float = CENTRAL_SHARE
) -> NDArray[np.uint8]:
    """Read an image, upright according to its EXIF orientation, and cut out and scale its center.

    The square in the center with a side of `share` of the shorter side is scaled to `image_size` (bilinear,
    antialiased). This equals scaling the shorter side to image_size / share and cropping the center, up to rounding at
    the edges, without computing the pixels that are cropped away.

    The first frame is used; transparency is dropped.

    Args:
        path: path of the file, or an open file.
        image_size: image size in pixels.
        share: share of the shorter side, above 0 and at most 1.

    Returns:
        (image_size, image_size, 3) uint8, RGB.

    Raises:
        UnreadableImage: it cannot be decoded, is truncated, or has implausibly many pixels.
    """
    upright = _upright(path, round(image_size / share))
    size = (image_size, image_size)
    return np.asarray(upright.resize(size, Image.Resampling.BILINEAR, box=_center(*upright.size, share)))


def read_whole(path: str | Path | IO[bytes], shorter_side: int) -> NDArray[np.uint8]:
    """Read a whole image, otherwise like `read_pixels`: (H, W, 3) uint8, min(H, W) = `shorter_side`."""
    upright = _upright(path, shorter_side)
    width, height = upright.size
    scale = shorter_side / min(width, height)
    size = (max(shorter_side, round(width * scale)), max(shorter_side, round(height * scale)))
    return np.asarray(upright.resize(size, Image.Resampling.BILINEAR))


def _upright(path: str | Path | IO[bytes], shorter_side: int) -> Image.Image:
    """Open an image upright and in RGB, with at least twice the needed pixels a side, if it has as many."""
    try:
        with Image.open(path, formats=_formats()) as image:
            _refuse_bomb(image)
            # JPEG can decode straight to a smaller size; down to twice the wanted one nothing is lost.
            image.draft("RGB", (2 * shorter_side, 2 * shorter_side))
            return _rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # Pillow's decoders raise nearly anything on a broken file
        raise UnreadableImage(_reason(error)) from error


def _center(width: int, height: int, share: float) -> tuple[float, float, float, float]:
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.mode.startswith("I"):
        # 16 bits a pixel, which Pillow would clip at 255 rather than scale.
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    elif "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def check(path: str | Path, *, whole: bool) -> str | None:
    """Return why an image cannot be read, or None; unless `whole`, only what Pillow's `verify` reads is checked."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "no file, but a pipe, a device or a folder"  # a pipe would be waited for
        with Image.open(path, formats=_formats()) as image:
            _refuse_bomb(image)
            if whole:
                # An eighth of the size is enough: all of the file is still read and decoded.
                image.draft("RGB", (1, 1))
                _rgb(ImageOps.exif_transpose(image))
            else:
                image.verify()
    except Exception as error:  # as above
        return _reason(error)
    return None


def stored_size(path: str | Path | IO[bytes]) -> tuple[int, int] | None:
    """Return the width and height of an image from its header; None if that cannot be read."""
    try:
        with Image.open(path, formats=_formats()) as image:
            return image.size
    except Exception:  # what a damaged file raises depends on its format
        return None


def _refuse_bomb(image: Image.Image) -> None:
    # Pillow itself only warns up to twice this limit.
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise ValueError(f"{image.width} by {image.height} pixels, and more than {limit} are refused")


def bomb_warnings_are_errors() -> None:
    """Turn Pillow's own warning about huge images into an error; call inside `catch_warnings`."""
    warnings.simplefilter("error", Image.DecompressionBombWarning)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return "too many pixels"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [type(error).__name__])[0]


Pixels = Literal["imagenet", "centered"]


@dataclass(frozen=True)
class Normalization:
    """Normalization of bytes by mean and standard deviation of every channel, both in bytes."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return bytes (B, H, W, 3) as (B, 3, H, W) float32 in new memory."""
        images = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = (self._channels(numbers).to(images.device) for numbers in (self.mean, self.std))
        return images.sub_(mean).div_(std)

    def of_tone(self, tone: float) -> tuple[float, ...]:
        """Return the normalized values of a gray of `tone`, in bytes, per channel."""
        number = torch.full((1, 1, 1, 3), tone)
        return tuple(self(number).flatten().tolist())

    @staticmethod
    def _channels(numbers: tuple[float, float, float]) -> Tensor:
        return torch.tensor(numbers).view(1, 3, 1, 1)


NORMALIZATIONS: dict[str, Normalization] = {
    "imagenet": Normalization(
        (0.485 * 255, 0.456 * 255, 0.406 * 255), (0.229 * 255, 0.224 * 255, 0.225 * 255)
    ),
    "centered": Normalization((127.0, 127.0, 127.0), (128.0, 128.0, 128.0)),
}
