"""Build a dry run from a configuration: the model has shapes but no numbers, and images are only counted."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from polyrhythm.config.assemble import (
    balance_from,
    check_length,
    draws,
    opened,
    strategy_from,
    warn_of_cut,
)
from polyrhythm.config.model import name_of, shapes_of
from polyrhythm.config.run_config import RunConfig
from polyrhythm.data.dealing import images_dealt, steps_per_epoch
from polyrhythm.errors import RequestError
from polyrhythm.partition.cut import cut
from polyrhythm.partition.ownership import sizes_of_cut
from polyrhythm.planning.analysis import step_multiply_adds
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.job import steps_of
from polyrhythm.strategies.divided_network import HasStages
from polyrhythm.strategies.strategy import SizesBuckets, Strategy
from polyrhythm.training.flat_parameters import FlatParameters, shards
from polyrhythm.training.model_sizes import ModelSizes, sizes_of

LEARNING_ONLY = (
    "optimizer",
    "clip_norm",
    "svrg",
    "schedule",
    "batch_schedule",
    "batch_norm",
    "weights",
    "fine_tuning",
    "views",
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
    "distill",
    "label_smoothing",
    "weight_average",
    "device",
    "cache",
    "decoded",
    "size_schedule",
    "compile",
    "channels_last",
    "activation_checkpointing",
    "keep_checkpoints",
    "checkpoint_every",
    "checkpoint_mirror",
    "keep_best",
    "until",
    "label_skew",
    "clients",
    "threads",
    "digest_every",
    "on_not_finite",
)
"""Options without meaning where nothing is learned."""

MOST_STEPS = 1_000_000_000
"""Upper limit for the steps of a worker in a dry run: more would practically not end."""


def check_dry_run_options(given: Collection[str], steps: int | None) -> None:
    """Reject options given in addition to a recipe that a dry run does not use."""
    for key in LEARNING_ONLY:
        if key in given:
            raise RequestError(
                f"--gradients none learns nothing, so --{key.replace('_', '-')} means nothing: leave it out"
            )
    if steps is not None:
        _check_steps(steps)
    for key in ("epochs", "updates"):
        if steps is not None and key in given:
            raise RequestError(f"--steps and --{key} both set the length: give one of them")


def _check_steps(steps: int) -> None:
    if type(steps) is not int:
        raise RequestError(f"steps must be a whole number (given {steps!r})")
    if steps < 1:
        raise RequestError(f"steps must be at least 1 (given {steps})")
    if steps > MOST_STEPS:
        raise RequestError(
            f"steps must be at most {MOST_STEPS:,} (given {steps}), which takes hours with one worker and days with "
            "several: ask for a few thousand"
        )


def assemble_dry_run(config: RunConfig, steps: int | None = None) -> tuple[DryRun, int]:
    """Build the dry run that a configuration describes.

    Args:
        config: checked values; those that only training needs are ignored.
        steps: full batches that every worker takes; None: the steps of the epochs, with ragged last batches as in
            training.

    Returns:
        The dry run, and the number of training images.

    Raises:
        RequestError: the request is invalid.
    """
    strategy = strategy_from(config.strategy, config.compress)
    strategy.check(config.workers)
    dataset = opened(config)
    images = len(dataset.train)
    if steps is None and config.workers > images:
        raise RequestError(
            f"{config.workers} workers cannot share {images} training images: ask for fewer workers, or for "
            "--steps of full batches"
        )
    check_length(config, images)
    whole = images_dealt(images, [config.workers * config.worker_batch], drop_last=config.drop_last)[0]
    per_epoch = steps_per_epoch(whole, config.workers, config.worker_batch)
    if steps is not None:
        length = steps
    elif config.updates is not None:
        length = steps_of(config.updates, strategy.traits(config.workers), config.workers)
    else:
        length = (config.epochs or dataset.default_epochs) * per_epoch
    if isinstance(strategy, HasStages):
        shapes = shapes_of(config.model, len(dataset.classes), dataset.image_shape)
        together = config.workers * config.worker_batch
        strategy = strategy.with_copies(lambda: shapes, dataset.image_shape, config.workers, together)
    dry_run = DryRun(
        strategy=strategy,
        workers=config.workers,
        sizes=_sizes(config.model, len(dataset.classes), dataset.image_shape, strategy, config.workers),
        steps=length,
        batch_size=config.worker_batch,
        epoch_images=images if steps is None else 0,
        drop_last=config.drop_last,
        seed=config.seed,
        timings=config.timings,
        balance=balance_from(config, strategy),
        draws=draws(config, strategy, config.workers),
        data=dataset.name,
        model=name_of(config.model),
    )
    strategy.check_model(dry_run.stand_in.flat())
    if dry_run.sizes.head:
        warn_of_cut(strategy, config.workers, config.batch_size, dry_run.sizes.head)
    return dry_run, images


def _sizes(
    model: Any, classes: int, image_shape: tuple[int, int, int], strategy: Strategy, workers: int
) -> ModelSizes:
    """Return the sizes of the parts of a model that a strategy sends; those of whole networks are kept by name."""
    if isinstance(strategy, HasStages) or strategy.traits(workers).cuts_network or not is_fixed(model):
        return sizes_for(shapes_of(model, classes, image_shape), image_shape, strategy, workers)
    asked = strategy.bucket_bytes_for(None, torch.empty(0)) if isinstance(strategy, SizesBuckets) else None
    sizes = sizes_by_name(model, classes, image_shape, asked)
    if count := strategy.traits(workers).shards:
        shards(sizes.parameters, count)
    return sizes


def is_fixed(model: Any) -> bool:
    """Whether a model is the text of a spec that always makes the same network: one without a file."""
    return isinstance(model, str) and not {"'", '"'} & set(model)


@lru_cache(maxsize=256)
def sizes_by_name(
    model: str, classes: int, image_shape: tuple[int, int, int], bucket_bytes: int | None
) -> ModelSizes:
    """Return the sizes of a network, computed once; see `sizes_of`."""
    return sizes_of(shapes_of(model, classes, image_shape), image_shape, bucket_bytes)


@lru_cache(maxsize=256)
def multiply_adds_by_name(model: str, classes: int, image_shape: tuple[int, int, int]) -> float:
    """Return the multiply-adds of a training step of one image, computed once; see `step_multiply_adds`."""
    return step_multiply_adds(shapes_of(model, classes, image_shape), image_shape, 1)


def sizes_for(
    model: nn.Module, image_shape: tuple[int, int, int], strategy: Strategy, workers: int
) -> ModelSizes:
    """Return the sizes of the parts of a model that a strategy sends.

    Args:
        model: network on the meta device; its parameters become views of one vector.
        image_shape: (C, H, W) of an image.
        strategy: strategy; may size buckets, cut the network, and divide it among servers.
        workers: number of workers.

    Raises:
        RequestError: the strategy cannot cut or divide it.
    """
    like = next(model.parameters())
    asked = strategy.bucket_bytes_for(None, like) if isinstance(strategy, SizesBuckets) else None
    sizes = sizes_of(model, image_shape, asked)
    traits = strategy.traits(workers)
    if isinstance(strategy, HasStages):
        sizes = strategy.sizes_of_parts(sizes, model, image_shape, workers)
    elif traits.cuts_network:
        parts, flat = cut(model, None), FlatParameters(model)
        image = like.new_zeros(1, *image_shape)
        sizes = sizes_of_cut(sizes, flat, parts, image, traits.trunk, workers)
    if traits.shards:
        shards(sizes.parameters, traits.shards)
    return sizes
