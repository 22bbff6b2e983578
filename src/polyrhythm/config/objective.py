"""From a configuration to what training minimises: loss, weights of classes, teachers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.trained import facts_of, load_trained
from polyrhythm.data.dataset import Dataset
from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.training.loss import Loss, Targets
from polyrhythm.training.passes.distillation import Teachers, Teaching
from polyrhythm.training.passes.objective import Objective

LOSSES = "polyrhythm.training.losses"


def objective_from(config: RunConfig, dataset: Dataset) -> Objective:
    """Makes what a run minimises.

    Raises:
        RequestError: an unknown loss, a number out of its range, or teachers that cannot teach these data.
    """
    loss = config.loss if isinstance(config.loss, Loss) else build("loss", str(config.loss), LOSSES)
    assert isinstance(loss, Loss)
    weights = balanced_weights(dataset) if config.class_weights == "balanced" else None
    targets = Targets(config.label_smoothing, weights)
    teaching = Teaching(config.temperature, config.teacher_share)
    return Objective(loss, targets, _teachers(config, dataset, teaching))


def balanced_weights(dataset: Dataset) -> Tensor:
    """Gives each class a weight, (K,), by which all count alike in training: n / (K n_k); 0 for one without images.

    The mean weight of the training images is 1, so the learning rate keeps its meaning.
    """
    counts = torch.bincount(dataset.train.labels, minlength=len(dataset.classes))
    present = int((counts > 0).sum())
    return torch.where(counts > 0, counts.sum() / (present * counts.clamp_min(1)), 0.0).float()


def _teachers(config: RunConfig, dataset: Dataset, teaching: Teaching) -> Teachers | None:
    if config.teacher is None:
        return None
    paths = [Path(part.strip()) for part in config.teacher.split(";") if part.strip()]
    if not paths:
        raise RequestError("--teacher names nobody: give a run folder, or several with ; between")
    for path in paths:
        if (facts_of(path).get("pixels") or "imagenet") != (config.pixels or "imagenet"):
            raise RequestError(
                f"{path} learned from pixels normalised otherwise: give the --pixels of its config.yaml"
            )
    with torch.random.fork_rng(devices=[]):
        trained = [load_trained(path, dataset=dataset) for path in paths]
    return Teachers(
        [each.model.cpu() for each in trained],
        [each.dataset.image_shape[-1] for each in trained],
        teaching,
    )
