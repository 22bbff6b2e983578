"""A trained network for inference: without its data, from the metadata of its weights file.

It maps the bytes of a picture to class probabilities: `Preprocessing` reads a picture at the network's size,
and `Normalized` converts bytes to the values that the network was trained on, and its scores to
probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from polyrhythm.config.model import device_from, name_of
from polyrhythm.config.trained import facts_of, load_trained, weights_file
from polyrhythm.data.images import CENTRAL_SHARE, UnreadableImage, read_pixels
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import load_weights, read_metadata

if TYPE_CHECKING:
    from polyrhythm.data.dataset import Dataset


_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Preprocessing:
    """The pictures that a network expects.

    Attributes:
        image_shape: (C, H, W).
        black: value of a black pixel, one for all channels or one per channel.
        white: value of a white pixel, likewise.
        shown: side of the centre square that the image is made of, as a share of a picture's shorter side.

    Raises:
        RequestError: no picture file has so many channels.
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
        """Return the preprocessing of a data set."""
        return cls(dataset.image_shape, dataset.black, dataset.white, dataset.shown)

    def read(self, path: Path) -> Tensor:
        """Return a picture as bytes (C, H, W) uint8 of the network's size; see `read_pixels`.

        Raises:
            RequestError: it cannot be read.
        """
        channels, height, width = self.image_shape
        try:
            pixels = Image.fromarray(read_pixels(path, max(height, width), self.shown))
        except UnreadableImage as error:
            raise RequestError(f"{path} cannot be read ({error}): repair it, or leave it out") from None
        fitted = pixels.convert(_MODES[channels]).resize((width, height), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(fitted).reshape(height, width, channels)).permute(2, 0, 1)


class Normalized(nn.Module):
    """A network with the normalisation of its input and a softmax over its output.

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
        """Return the class probabilities (B, classes) of pictures (B, C, H, W), uint8."""
        scores: Tensor = self.model(pictures.to(self.black.dtype) / 255 * self.span + self.black)
        return scores.softmax(1)


@dataclass(frozen=True)
class Served:
    """A network for inference.

    Attributes:
        weights: the file.
        model_name: name to display.
        classes: names, in the order of the outputs.
        preprocessing: of its pictures.
        network: maps bytes to probabilities; in evaluation mode, on `device`.
        device: where it is.
    """

    weights: Path
    model_name: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    network: Normalized
    device: torch.device


def load_served(weights: str | Path, *, model: Any = None, data: Any = None, device: str = "auto") -> Served:
    """Open a trained network for inference.

    Args:
        weights: a run folder or a file of weights.
        model: the network; None: as the weights record.
        data: what it was trained on; None: the weights' metadata is enough, if there is any.
        device: `cpu`, `cuda` or `auto`.

    Raises:
        RequestError: there are no such weights, or they do not record enough.
    """
    path = Path(weights)
    facts_of(path)  # says what is wrong with a folder that is no finished run
    file = weights_file(path)
    told = read_metadata(file) if file.suffix == ".safetensors" else {}
    chosen = model if model is not None else told.get("model")
    place = device_from(device)
    if data is None and chosen is not None and {"classes", "image_shape", "black", "white"} <= told.keys():
        classes = tuple(told["classes"].split("\n"))
        preprocessing = _preprocessing(path, told)
        network = create_model(
            str(chosen) if not isinstance(chosen, torch.nn.Module) else chosen,
            classes=len(classes),
            image_shape=preprocessing.image_shape,
        )
        load_weights(network, file)
    else:
        trained = load_trained(path, data=data, model=model, device=device)
        network, classes = trained.model, trained.dataset.classes
        preprocessing = Preprocessing.of(trained.dataset)
    together = Normalized(network, preprocessing).eval().requires_grad_(False).to(place)
    return Served(file, name_of(chosen), classes, preprocessing, together, place)


def _preprocessing(path: Path, told: dict[str, str]) -> Preprocessing:
    try:
        channels, height, width = (int(number) for number in told["image_shape"].split(","))
        black, white = (
            tuple(float(number) for number in told[tone].split(",")) for tone in ("black", "white")
        )
        shown = float(told.get("shown", CENTRAL_SHARE))
    except ValueError:
        raise RequestError(f"{path} does not say of what size its pictures were: give --data") from None
    return Preprocessing((channels, height, width), black, white, shown)
