"""Open a trained network with its data, from a run folder, a file of weights or a checkpoint of a run.

A checkpoint holds the network as it was tested when the checkpoint was written.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from polyrhythm.config.model import device_from, model_maker, name_of
from polyrhythm.config.recipe import CONFIG_FILE, check_format, configure, read_run_recipe
from polyrhythm.config.run_config import FORMER_PIXELS, ImageOptions, refuse_unknown
from polyrhythm.config.weight_facts import weight_facts
from polyrhythm.data.dataset import Dataset
from polyrhythm.data.dealing import BY_COUNT, Dealt
from polyrhythm.data.open import open_data
from polyrhythm.data.record import METADATA_KEY, DataRecord, read_record
from polyrhythm.errors import RequestError
from polyrhythm.models.weights import check_finite, read_metadata
from polyrhythm.roles.checkpointing.archive import FOLDER, Snapshot
from polyrhythm.roles.checkpointing.worker_state import mean_buffers
from polyrhythm.run_files import check_in_run, exists_in_run, parse_json, read_json_in_run
from polyrhythm.training.checkpoint import best_checkpoint, checkpoints, load_checkpoint
from polyrhythm.training.flat_parameters import FlatParameters


def run_of(path: Path) -> Path | None:
    """Return the run folder that holds this checkpoint; None if the path is not a checkpoint of a run."""
    folder = path.parent.parent
    inside = path.is_file() and path.parent.name == FOLDER
    return folder if inside and (folder / CONFIG_FILE).is_file() else None


def best_of(path: Path) -> Path:
    """Return the checkpoint with the highest test accuracy of a run folder.

    Raises:
        RequestError: the run has kept none.
    """
    found = best_checkpoint(path / FOLDER)
    if found is None:
        raise RequestError(f"{path} keeps no best checkpoint: train with --keep-best")
    return found


def is_last(path: Path) -> bool:
    """Whether a checkpoint, under its own name or as the best one, has the run's highest step."""
    newest = checkpoints(path.parent)
    return bool(newest) and path.name.endswith(newest[0].name)


@torch.no_grad()
def fill(model: nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint into a model in place, with the mean of the workers' batch-norm statistics.

    Args:
        model: model on the CPU; untrained tensors are loaded already.
        path: path of the checkpoint.

    Raises:
        RequestError: the checkpoint is damaged, or belongs to another network.
    """
    snapshot = Snapshot.of(*load_checkpoint(path))
    flat, buffers = FlatParameters(model), dict(model.named_buffers())
    kept = mean_buffers([snapshot.workers[number] for number in sorted(snapshot.workers)])
    if snapshot.tested.shape != flat.vector.shape or kept.keys() - buffers.keys():
        raise RequestError(f"{path} is of another network: give the --model that it was trained with")
    flat.vector.copy_(snapshot.tested)
    for name, value in kept.items():
        buffers[name].copy_(value)


MODEL_FILE = "model.safetensors"

_log = logging.getLogger(__name__)


def recorded(path: Path) -> DataRecord | None:
    """Return the data that a network was trained on, from its run folder, file of weights or checkpoint.

    Returns:
        The record; of networks that were saved before there were any, the classes alone, or None.

    Raises:
        RequestError: the record is damaged.
    """
    folder = path if path.is_dir() else run_of(path) or (path.parent if path.name == MODEL_FILE else None)
    if folder is not None and (found := read_record(folder)) is not None:
        return found
    file = weights_file(path)
    if not file.is_file():
        return None
    metadata = read_metadata(file)
    if METADATA_KEY in metadata:
        return DataRecord.from_json(parse_json(metadata[METADATA_KEY], str(file)), str(file))
    if "classes" in metadata:
        return DataRecord(metadata.get("data", ""), tuple(metadata["classes"].split("\n")))
    return None


def dealt_before(record: DataRecord | None) -> Dealt:
    """Return how the images of a trained network were dealt to training and test images."""
    if record is None or not record.listing:
        return BY_COUNT
    return record.sides


def _compared(dataset: Dataset, record: DataRecord, path: Path) -> Dataset:
    """Return data with the labels of a network, once they are known to hold no test image that it was trained on.

    Raises:
        RequestError: classes differ, or its training images cannot be identified.
    """
    matched = record.matched(dataset, str(path))
    changes = record.changes(matched)
    same = _is_same_place(record.data, dataset.name)
    if same and record.listing and dataset.held_out and record.sides is None:
        if not record.held_out:
            raise RequestError(
                f"{path} was trained on {dataset.name} with test images of their own, which are gone: bring them back, "
                "or name other --data"
            )
        if changes:
            raise RequestError(
                f"{dataset.name} has changed since {path} was trained ({changes}), and a file of weights does not "
                "record which images were held out: name its run folder, or data with a test folder"
            )
    if changes:
        _log.warning("%s has changed since %s was trained: %s", dataset.name, path, changes)
    return matched


def _is_same_place(one: str, other: str) -> bool:
    try:
        return os.path.realpath(one) == os.path.realpath(other)
    except ValueError:  # a text that cannot be a path
        return one == other


class Reordered(nn.Module):
    """A network with outputs in the order of other data's classes.

    Args:
        model: maps (B, C, H, W) to logits (B, K).
        order: (K,) int64, the output of each class of the data.
    """

    order: Tensor

    def __init__(self, model: nn.Module, order: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("order", order, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, K) in the data's order."""
        scores: Tensor = self.model(images)
        return scores.index_select(1, self.order)


@dataclass(frozen=True)
class Trained:
    """A trained network.

    Attributes:
        path: path given by the user.
        file: file of the weights.
        model: model on `device`.
        model_name: name to display.
        dataset: training data of the run, or the data given instead.
        device: device of the model.
    """

    path: Path
    file: Path
    model: nn.Module
    model_name: str
    dataset: Dataset
    device: torch.device


def load_trained(
    weights: str | Path,
    *,
    data: Any = None,
    model: Any = None,
    device: str = "auto",
    dataset: Dataset | None = None,
    **options: Unpack[ImageOptions],
) -> Trained:
    """Open a trained network and its data.

    Args:
        weights: a run folder, a file of weights, or a checkpoint of a run.
        data: None: what the run was trained on.
        model: the network; None: the run's.
        device: `cpu`, `cuda` or `auto`.
        dataset: an open data set instead of `data`; the network may have been trained at another size.
        **options: `image_size`, `scale` and `skip_unreadable`, as for `train`; default: as in the run.

    Raises:
        RequestError: there are no such weights, they do not record what they were trained with, or an option is
            unknown.
    """
    refuse_unknown(options, ImageOptions)
    configure(options)  # a size that cannot be, for example
    path, given = Path(weights), dataset
    known = facts_of(path)
    model = model if model is not None else known.get("model")
    if model is None:
        raise RequestError(f"{path} does not record its training configuration: give --model")
    size, record, order = options.get("image_size") or known.get("image_size"), recorded(path), None
    if dataset is None:
        skips = options.get("skip_unreadable") or (data is None and known.get("skip_unreadable") is True)
        data = data if data is not None else known.get("data")
        if data is None:
            raise RequestError(f"{path} does not record its training configuration: give --data")
        dataset = open_data(
            data,
            image_size=size,
            scale=options.get("scale") or known.get("scale"),
            skip_unreadable=skips,
            pixels=FORMER_PIXELS.get(known.get("pixels", ""), known.get("pixels")),
            dealt=dealt_before(record),
        )
        if record is not None:
            dataset = _compared(dataset, record, path)
    else:
        if record is not None:
            order = record.order_of(dataset.classes, str(path))
        if size is not None:
            dataset = replace(dataset, image_shape=(dataset.image_shape[0], size, size))
    file = weights_file(path)
    place = device_from(device)
    run = run_of(path)
    if run is not None and is_last(path) and (run / MODEL_FILE).is_file():
        file, run = run / MODEL_FILE, None  # workers may have averaged after their last checkpoint
    if run is None:
        replica = model_maker(model, dataset, str(file))().to(place)
    else:
        replica = model_maker(model, dataset, known.get("weights"), known.get("freeze", "none"))()
        fill(replica, file)
        replica = replica.requires_grad_().to(place)
    if given is None:
        check_finite(replica, path)
    if order is not None:
        replica = Reordered(replica, order).to(place)
    return Trained(path, file, replica, name_of(model), dataset, place)


ENSEMBLE_FILE = "ensemble.json"
"""In the folder of an ensemble that has ended: its figures, its members' among them."""


def member_folder(folder: Path, member: int) -> Path:
    """Return the run folder of a member of an ensemble."""
    return folder / f"member-{member}"


def voters(path: Path) -> list[Path]:
    """Return the runs of the networks that vote for a path: an ensemble's members, unless it was distilled."""
    if (path / MODEL_FILE).is_file() or not (path / ENSEMBLE_FILE).is_file():
        return [path]
    members = read_json_in_run(path / ENSEMBLE_FILE).get("members")
    if not isinstance(members, list):
        raise RequestError(f"{path / ENSEMBLE_FILE} is damaged: name the runs of the members")
    return [member_folder(path, number) for number in range(len(members))]


def weights_file(path: Path) -> Path:
    """Return the file of weights in a run folder, or the file itself.

    Raises:
        RequestError: the one in the run folder is a link, or no regular file.
    """
    if not path.is_dir():
        return path
    if exists_in_run(path / MODEL_FILE):
        check_in_run(path / MODEL_FILE)
    return path / MODEL_FILE


_READ_HERE = (
    "data",
    "model",
    "image_size",
    "scale",
    "skip_unreadable",
    "pixels",
    "weights",
    "freeze",
    "distill",
)


def _checked(path: Path) -> dict[str, Any]:
    """Return the recipe of a run, in which those options are valid that are needed to open its network.

    Raises:
        RequestError: the recipe is damaged, or such an option is not valid.
    """
    known = read_run_recipe(path)
    configure({key: known[key] for key in _READ_HERE if key in known})
    return known


def facts_of(path: Path) -> dict[str, Any]:
    """Return the record of training in a run folder or a file of weights.

    Raises:
        RequestError: the path does not exist, or the run has not ended.
    """
    if not path.exists():
        raise RequestError(f"there is no {path}: name a run folder or a file of weights")
    if path.is_dir():
        check_format(path)
        if not (path / MODEL_FILE).is_file():
            if not (path / CONFIG_FILE).is_file():
                raise RequestError(f"{path} is not a run folder: name one, or a file of weights")
            if (path / ENSEMBLE_FILE).is_file():
                raise RequestError(
                    f"{path} is an ensemble, of several networks: name one, as {member_folder(path, 0)}"
                )
            raise RequestError(
                f"{path} holds no {MODEL_FILE}: the run has not ended; continue it with --resume {path}"
            )
        known = _checked(path / CONFIG_FILE) if exists_in_run(path / CONFIG_FILE) else {}
        return known | {"model": known["distill"]} if known.get("distill") else known
    if (run := run_of(path)) is not None:
        check_format(run)
        return _checked(run / CONFIG_FILE)
    return weight_facts(path)
