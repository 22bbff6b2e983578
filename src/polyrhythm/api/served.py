"""A trained network as it is used: without its data, by what its weights file says of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyrhythm.config.model import device_from, name_of
from polyrhythm.config.trained import facts_of, load_trained, weights_file
from polyrhythm.data.pictures.images import CENTRAL_SHARE
from polyrhythm.data.preprocessing import Normalized, Preprocessing
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import load_weights, read_metadata


@dataclass(frozen=True)
class Served:
    """A network in use.

    Attributes:
        weights: the file.
        model_name: for people.
        classes: names, in the order of the outputs.
        preprocessing: of its pictures.
        network: takes bytes, gives probabilities; in evaluation mode, on `device`.
        device: where it is.
    """

    weights: Path
    model_name: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    network: Normalized
    device: torch.device


def load_served(weights: str | Path, *, model: Any = None, data: Any = None, device: str = "auto") -> Served:
    """Opens a trained network for use.

    Args:
        weights: a run folder or a file of weights.
        model: the network; None: as the weights say.
        data: what it was trained on; None: what the weights say of it is enough, if they say it.
        device: `cpu`, `cuda` or `auto`.

    Raises:
        RequestError: there are no such weights, or they do not say enough.
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
