"""From a configuration to a rehearsal: a model that is only shapes, data that are only counted."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.model import name_of
from polyrhythm.config.run_config import RunConfig
from polyrhythm.data.dataset import Dataset
from polyrhythm.data.dealing import steps_per_epoch
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.partition.cut import cut
from polyrhythm.roles.dry_run import Rehearsal
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.model_sizes import ModelSizes, sizes_of

LEARNING_ONLY = (
    "optimizer",
    "schedule",
    "batch_schedule",
    "weights",
    "freeze",
    "freeze_epochs",
    "rate_decay",
    "pixels",
    "augment",
    "loss",
    "class_weights",
    "teacher",
    "temperature",
    "teacher_share",
    "label_smoothing",
    "weight_average",
    "precision",
    "device",
    "cache",
    "decoded",
    "size_schedule",
    "compile",
    "channels_last",
    "keep_checkpoints",
    "keep_best",
    "threads",
)
"""Options that mean nothing where nobody learns."""

MOST_STEPS = 1_000_000_000
"""Steps of a worker's rehearsal; more would not end."""


def check_rehearsable(given: Collection[str], steps: int | None) -> None:
    """Refuses options that a rehearsal has no use for.

    Args:
        given: keys of what was asked for beside a recipe, which may be one for learning.
        steps: as asked for.

    Raises:
        RequestError: there is one.
    """
    for key in LEARNING_ONLY:
        if key in given:
            raise RequestError(
                f"--gradients none learns nothing, so --{key.replace('_', '-')} means nothing: leave it out"
            )
    if steps is not None:
        _check_steps(steps)
    if steps is not None and "epochs" in given:
        raise RequestError("--steps and --epochs both say how long: give one of them")


def _check_steps(steps: int) -> None:
    if type(steps) is not int:
        raise RequestError(f"steps must be a whole number (given {steps!r})")
    if steps < 1:
        raise RequestError(f"steps must be at least 1 (given {steps})")
    if steps > MOST_STEPS:
        raise RequestError(
            f"steps must be at most {MOST_STEPS:,} (given {steps}), which one worker rehearses in hours, several in "
            "days: ask for a few thousand"
        )


def assemble_rehearsal(config: RunConfig, steps: int | None = None) -> tuple[Rehearsal, int]:
    """Makes the rehearsal that a configuration describes.

    Args:
        config: checked values; what only learning needs is not looked at.
        steps: that every worker takes, of full batches; None: those of the epochs, ragged as in training.

    Returns:
        The rehearsal, and the number of training images.

    Raises:
        RequestError: whatever of the request is wrong.
    """
    strategy = strategy_from(config.strategy)
    strategy.check(config.workers)
    dataset = open_data(
        config.data,
        image_size=config.image_size,
        scale=config.scale,
        skip_unreadable=config.skip_unreadable,
    )
    images = len(dataset.train)
    if steps is None and config.workers > images:
        raise RequestError(
            f"{config.workers} workers cannot share {images} training images: ask for fewer workers, or for "
            "--steps of full batches"
        )
    epochs = config.epochs or dataset.default_epochs
    rehearsal = Rehearsal(
        strategy=strategy,
        workers=config.workers,
        sizes=_sizes_of(_shapes_of(config.model, dataset), dataset, strategy),
        steps=steps or epochs * steps_per_epoch(images, config.workers, config.batch_size),
        batch_size=config.batch_size,
        epoch_images=images if steps is None else 0,
        seed=config.seed,
        timings=config.timings,
        data=dataset.name,
        model=name_of(config.model),
    )
    return rehearsal, images


def _sizes_of(model: nn.Module, dataset: Dataset, strategy: Strategy) -> ModelSizes:
    """Gives how large the parts of a model are that travel; refuses one that the servers cannot share out."""
    asked = strategy.bucket_bytes_for(None, next(model.parameters()))
    sizes = sizes_of(model, dataset.image_shape, asked)
    if strategy.cuts_network:
        sizes = replace(sizes, head=cut(model, None).sizes)
    if strategy.shard_count:
        shards(sizes.parameters, strategy.shard_count)
    return sizes


def _shapes_of(model: Any, dataset: Dataset) -> nn.Module:
    """Makes a model that has shapes but no numbers."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).to("meta")

    def make() -> nn.Module:
        return create_model(str(model), classes=len(dataset.classes), image_shape=dataset.image_shape)

    try:
        with torch.device("meta"):
            return make()
    except RequestError:
        raise
    except Exception:  # some networks look at numbers while they are made
        with torch.random.fork_rng(devices=[]):
            return make().to("meta")
