"""The network that a checkpoint holds, as it was tested when the checkpoint was written."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from polyrhythm.config.recipe import CONFIG_FILE
from polyrhythm.errors import RequestError
from polyrhythm.roles.keeping.archive import FOLDER
from polyrhythm.roles.keeping.snapshot import Snapshot
from polyrhythm.roles.keeping.worker_state import mean_buffers
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.saving.best_checkpoint import best_checkpoint
from polyrhythm.training.saving.checkpoint import checkpoints, load_checkpoint


def run_of(path: Path) -> Path | None:
    """Gives the run folder of a checkpoint in it; None if the path is no checkpoint of a run."""
    folder = path.parent.parent
    inside = path.is_file() and path.parent.name == FOLDER
    return folder if inside and (folder / CONFIG_FILE).is_file() else None


def best_of(path: Path) -> Path:
    """Gives the checkpoint of the highest test accuracy of a run folder.

    Raises:
        RequestError: it keeps none.
    """
    found = best_checkpoint(path / FOLDER)
    if found is None:
        raise RequestError(f"{path} keeps no best checkpoint: train with --keep-best")
    return found


def is_last(path: Path) -> bool:
    """Whether a checkpoint, by its own name or as the best one, is that of a run's highest step."""
    newest = checkpoints(path.parent)
    return bool(newest) and path.name.endswith(newest[0].name)


@torch.no_grad()
def fill(model: nn.Module, path: Path) -> None:
    """Gives a model the weights of a checkpoint, and the mean of its workers' batch-norm statistics, in place.

    Args:
        model: on the CPU; what the run did not train it has already.
        path: of the checkpoint.

    Raises:
        RequestError: the checkpoint is damaged, or of another network.
    """
    snapshot = Snapshot.of(*load_checkpoint(path))
    flat, buffers = FlatParameters(model), dict(model.named_buffers())
    kept = mean_buffers([snapshot.workers[number] for number in sorted(snapshot.workers)])
    if snapshot.tested.shape != flat.vector.shape or kept.keys() - buffers.keys():
        raise RequestError(f"{path} is of another network: give the --model that it was trained with")
    flat.vector.copy_(snapshot.tested)
    for name, value in kept.items():
        buffers[name].copy_(value)
