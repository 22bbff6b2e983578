"""From the bytes of a picture to the numbers that a network was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from polyrhythm.data.pictures.images import CENTRAL_SHARE, UnreadableImage, read_pixels
from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from polyrhythm.data.dataset import Dataset

_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Preprocessing:
    """What a network expects of a picture.

    Attributes:
        image_shape: (C, H, W).
        black: the number of a black pixel, one for all channels or one for each.
        white: the same of a white one.
        shown: the share of a picture's shorter side that the square in its middle has, of which the image is made.

    Raises:
        RequestError: pictures of so many channels are none that a file could hold.
    """

    image_shape: tuple[int, int, int]
    black: tuple[float, ...]
    white: tuple[float, ...]
    shown: float = CENTRAL_SHARE

    def __post_init__(self) -> None:
        if self.image_shape[0] not in _MODES:
            raise RequestError(
                f"the network takes pictures of {self.image_shape[0]} channels: picture files have 1 or 3"
            )

    @classmethod
    def of(cls, dataset: Dataset) -> Preprocessing:
        """Gives that of a data set."""
        return cls(dataset.image_shape, dataset.black, dataset.white, dataset.shown)

    def read(self, path: Path) -> Tensor:
        """Reads a picture's bytes as (C, H, W) uint8 of the network's size; see `read_pixels`.

        Raises:
            RequestError: it cannot be read.
        """
        channels, height, width = self.image_shape
        try:
            pixels = Image.fromarray(read_pixels(path, max(height, width), self.shown))
        except UnreadableImage as error:
            raise RequestError(f"{path} cannot be read ({error}): mend it, or leave it out") from None
        fitted = pixels.convert(_MODES[channels]).resize((width, height), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(fitted).reshape(height, width, channels)).permute(2, 0, 1)


class Normalized(nn.Module):
    """A network together with what turns bytes into its numbers, and its scores into probabilities.

    Args:
        model: maps (B, C, H, W) float32 to logits (B, classes).
        preprocessing: of its pictures.
    """

    black: Tensor
    span: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model = model
        black, white = (
            torch.tensor(tone).view(1, -1, 1, 1) for tone in (preprocessing.black, preprocessing.white)
        )
        self.register_buffer("black", black)
        self.register_buffer("span", white - black)

    def forward(self, pictures: Tensor) -> Tensor:
        """Gives the class probabilities (B, classes) of pictures (B, C, H, W), uint8."""
        scores: Tensor = self.model(pictures.to(self.black.dtype) / 255 * self.span + self.black)
        return scores.softmax(1)
