"""Build replicas of a model, all alike and on their device, from a name or a module."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyrhythm.data.dataset import Dataset
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.models.fine_tuning import freeze, start_from
from polyrhythm.specs import Config


def model_maker(
    model: Any, dataset: Dataset, weights: str | None = None, frozen: str = "none"
) -> partial[nn.Module]:
    """Return a function that makes a replica: the same weights whenever torch's generator has the same seed.

    Args:
        model: a spec, its text, or a module.
        dataset: data set, which determines the number of classes and the size of images.
        weights: initial weights; see `start_from`.
        frozen: the parts that are not trained; see `freeze`.
    """
    return partial(_make_model, model, len(dataset.classes), dataset.image_shape, weights, frozen)


def device_from(name: str) -> torch.device:
    """Return the device of the replicas.

    Raises:
        RequestError: there is no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        # All three, not the one like it: gpu means cuda, and not cpu.
        raise RequestError(f"unknown device {name!r}: there are auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("there is no CUDA device here: use --device cpu")
    return torch.device(name)


def devices_from(names: str, workers: int) -> tuple[torch.device, ...]:
    """Return the device of each worker.

    Args:
        names: one for all, or one for each worker, separated by commas, as in `cuda,cpu,cpu`.
        workers: number of workers.

    Raises:
        RequestError: there is no such device on this machine, or another number of them.
    """
    kinds = [name.strip() for name in names.split(",")]
    if len(kinds) not in (1, workers):
        raise RequestError(
            f"device {names}: {len(kinds)} devices are not one for each of {workers} workers: give {workers}, or one "
            "for all"
        )
    found = tuple(device_from(name) for name in kinds)
    return found * workers if len(found) == 1 else found


def name_of(value: Any) -> str:
    """Return the name of a model or data set to display: the spec itself, or the class of an object."""
    return str(value) if isinstance(value, str | Path | Config) else type(value).__name__


def shapes_of(model: Any, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """Return a classifier on the meta device, with shapes but no numbers.

    Args:
        model: a spec, its text, or a module, which is copied.
        classes: number of classes.
        image_shape: (C, H, W) of an image.

    Raises:
        RequestError: there is no such model, or it does not support images of that size.
    """
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).to("meta")

    def make() -> nn.Module:
        return create_model(str(model), classes=classes, image_shape=image_shape)

    try:
        with torch.device("meta"):
            return make()
    except RequestError:
        raise
    except Exception:  # some networks look at numbers while they are made
        with torch.random.fork_rng(devices=[]):
            return make().to("meta")


def _make_model(
    model: Any, classes: int, image_shape: tuple[int, int, int], weights: str | None, frozen: str
) -> nn.Module:
    chosen = copy.deepcopy(model) if isinstance(model, nn.Module) else str(model)
    made = create_model(chosen, classes=classes, image_shape=image_shape)
    if weights is not None:
        start_from(made, weights)
    freeze(made, frozen)
    return made
