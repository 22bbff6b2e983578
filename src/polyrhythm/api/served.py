"""A trained network for inference: without its data, from the metadata of its weights file.

It maps the bytes of an image to class probabilities: `Preprocessing` reads an image at the network's size,
and `Normalized` converts bytes to the values that the network was trained on, and its scores to
probabilities. `ImageFiles` are files as such a network sees them, for all views of a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from polyrhythm.config.model import device_from, name_of
from polyrhythm.config.trained import facts_of, load_trained, weights_file
from polyrhythm.data.images import CENTRAL_SHARE, UnreadableImage, read_pixels, read_whole
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.calibration import Calibration, read_calibration
from polyrhythm.evaluation.views import ViewedClassifier, Views
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import check_finite, load_weights, read_metadata

if TYPE_CHECKING:
    from polyrhythm.data.dataset import Dataset


_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Preprocessing:
    """The images that a network expects.

    Attributes:
        image_shape: (C, H, W).
        black: value of a black pixel, one for all channels or one per channel.
        white: value of a white pixel, one for all channels or one per channel.
        shown: side of the center square that the image is made of, as a share of an image's shorter side.

    Raises:
        RequestError: image files do not have this number of channels.
    """

    image_shape: tuple[int, int, int]
    black: tuple[float, ...]
    white: tuple[float, ...]
    shown: float = CENTRAL_SHARE

    def __post_init__(self) -> None:
        if self.image_shape[0] not in _MODES:
            raise RequestError(
                f"the network accepts images of {self.image_shape[0]} channels: image files have 1 or 3"
            )

    @classmethod
    def of(cls, dataset: Dataset) -> Preprocessing:
        """Return the preprocessing of a data set."""
        return cls(dataset.image_shape, dataset.black, dataset.white, dataset.shown)

    def read(self, picture: Path | IO[bytes]) -> Tensor:
        """Return a file's image as bytes (C, H, W) uint8 of the network's size; see `read_pixels`.

        Raises:
            UnreadableImage: it cannot be read.
        """
        _, height, width = self.image_shape
        pixels = self._toned(read_pixels(picture, max(height, width), self.shown))
        return self._bytes(pixels.resize((width, height), Image.Resampling.BILINEAR))

    def read_whole(self, picture: Path | IO[bytes], shorter_side: int) -> Tensor:
        """Return a whole image as bytes (C, H, W) uint8, min(H, W) = `shorter_side`; otherwise like `read`."""
        return self._bytes(self._toned(read_whole(picture, shorter_side)))

    def normalized(self, images: Tensor) -> Tensor:
        """Return images (B, C, H, W) uint8 as the values that the network was trained on, float32."""
        black, white = (torch.tensor(tone).view(1, -1, 1, 1) for tone in (self.black, self.white))
        return _between(black, white - black, images)

    def _toned(self, pixels: NDArray[np.uint8]) -> Image.Image:
        return Image.fromarray(pixels).convert(_MODES[self.image_shape[0]])

    def _bytes(self, picture: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(picture).reshape(picture.height, picture.width, -1)).permute(2, 0, 1)


def _between(black: Tensor, span: Tensor, images: Tensor) -> Tensor:
    return images.to(black.dtype) / 255 * span + black


class ImageFiles:
    """Image files as a network sees them, without labels; a `Split` with whole images.

    Methods raise `RequestError` for a file that cannot be read.

    Args:
        files: paths, or open files.
        preprocessing: preprocessing of the network.
    """

    def __init__(self, files: Sequence[Path | IO[bytes]], preprocessing: Preprocessing) -> None:
        self._files = files
        self._preprocessing = preprocessing
        self.labels = torch.zeros(len(files), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._files)

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of `indices`, (B,) int64, as (B, C, H, W) float32, normalized."""
        read = [self._opened(index, self._preprocessing.read) for index in indices.tolist()]
        return self._preprocessing.normalized(torch.stack(read))

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Return whole images, (C, H, W) float32 each, with `shorter_side` pixels on their shorter side."""

        def read(picture: Path | IO[bytes]) -> Tensor:
            return self._preprocessing.read_whole(picture, shorter_side)

        whole = [self._opened(index, read) for index in indices.tolist()]
        return [self._preprocessing.normalized(each[None])[0] for each in whole]

    def _opened(self, index: int, read: Callable[[Path | IO[bytes]], Tensor]) -> Tensor:
        file = self._files[index]
        try:
            return read(file)
        except UnreadableImage as error:
            name = file if isinstance(file, Path) else "the image"
            raise RequestError(f"{name} cannot be read ({error}): repair it, or leave it out") from None


class Normalized(nn.Module):
    """A network with the normalization of its input and a softmax over its output.

    Args:
        model: maps (B, C, H, W) float32 to logits (B, classes).
        preprocessing: preprocessing of its images.
        temperature: divisor of the scores.
    """

    black: Tensor
    span: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        black, white = (
            torch.tensor(tone).view(1, -1, 1, 1) for tone in (preprocessing.black, preprocessing.white)
        )
        self.register_buffer("black", black)
        self.register_buffer("span", white - black)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class probabilities (B, classes) of images (B, C, H, W), uint8."""
        scores: Tensor = self.model(_between(self.black, self.span, images))
        return (scores if self.temperature == 1 else scores / self.temperature).softmax(1)


@dataclass(frozen=True)
class Served:
    """A network for inference.

    Attributes:
        weights: the file.
        model_name: name to display.
        classes: names, in the order of the outputs.
        preprocessing: preprocessing of its images.
        network: maps bytes to probabilities; in evaluation mode, on `device`.
        device: device of the network.
        calibration: calibration of its probabilities, for the views that it was made with; None: it was not made.
    """

    weights: Path
    model_name: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    network: Normalized
    device: torch.device
    calibration: Calibration | None = None

    def classifier(self, views: Views) -> ViewedClassifier:
        """Return the network with its views, of no images yet; those of larger ones have the scale of training."""
        preprocessing = self.preprocessing
        return ViewedClassifier(
            self.network.model,
            ImageFiles([], preprocessing),
            views.at_scale_of(preprocessing.image_shape, preprocessing.shown),
            preprocessing.image_shape,
            self.device,
        )

    def temperature(self, views: Views) -> float:
        """Return the temperature that calibrates probabilities of these views; 1 where none is known."""
        known = self.calibration
        return known.temperature if known is not None and known.views == views else 1.0


def load_served(weights: str | Path, *, model: Any = None, data: Any = None, device: str = "auto") -> Served:
    """Open a trained network for inference.

    Args:
        weights: a run folder or a file of weights.
        model: the network; None: as the weights record.
        data: training data of the network; None: the weights' metadata is enough, if there is any.
        device: `cpu`, `cuda` or `auto`.

    Raises:
        RequestError: there are no such weights, or they do not record enough.
    """
    path = Path(weights)
    facts_of(path)  # reports errors of a folder that is no finished run
    file = weights_file(path)
    metadata = read_metadata(file) if file.suffix == ".safetensors" else {}
    chosen = model if model is not None else metadata.get("model")
    place = device_from(device)
    if (
        data is None
        and chosen is not None
        and {"classes", "image_shape", "black", "white"} <= metadata.keys()
    ):
        classes = tuple(metadata["classes"].split("\n"))
        preprocessing = _preprocessing(path, metadata)
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
    check_finite(network, path)
    calibration = read_calibration(file)
    plain = calibration.temperature if calibration is not None and calibration.views.plain else 1.0
    together = Normalized(network, preprocessing, plain).eval().requires_grad_(False).to(place)
    return Served(file, name_of(chosen), classes, preprocessing, together, place, calibration)


def _preprocessing(path: Path, metadata: dict[str, str]) -> Preprocessing:
    try:
        channels, height, width = (int(number) for number in metadata["image_shape"].split(","))
        black, white = (
            tuple(float(number) for number in metadata[tone].split(",")) for tone in ("black", "white")
        )
        shown = float(metadata.get("shown", CENTRAL_SHARE))
    except ValueError:
        raise RequestError(f"{path} does not record the size of its images: give --data") from None
    return Preprocessing((channels, height, width), black, white, shown)
