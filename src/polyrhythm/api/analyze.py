"""Cost of a network before anything is run, for the verb `analyze`.

Layers and memory are counted on shapes (`planning/analysis.py`), bytes a step by a dry run of every strategy, and what
cutting the fully connected layers over workers would save by the formulas of `cost/hybrid.py`.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from polyrhythm.config.assemble import opened, strategy_from
from polyrhythm.config.dry_run import sizes_for
from polyrhythm.config.model import name_of, shapes_of
from polyrhythm.config.recipe import configure
from polyrhythm.cost import hybrid
from polyrhythm.cost.convolution import methods
from polyrhythm.errors import RequestError
from polyrhythm.events import RunEnded
from polyrhythm.partition.cut import Cut, cut
from polyrhythm.partition.divided_trunk import DividedTrunk
from polyrhythm.planning.analysis import Analysis, AnalyzedLayer, analysis_of
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.run import dry_events
from polyrhythm.specs import choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.strategy import Traits

OPTIMIZER_STATES = {"sgd": 0, "sgd with momentum": 1, "adam": 2}
"""Vectors as long as the parameters that an optimizer keeps."""
_ROUNDS, _FEWEST_STEPS, _MOST_STEPS = 2, 8, 2048


def analyze(
    *,
    model: Any = "lenet5",
    data: Any = "fashion-mnist",
    batch_size: int = 64,
    workers: int = 4,
    classes: int | None = None,
    image_size: int | None = None,
    channels: int | None = None,
) -> dict[str, Any]:
    """Return the cost of a network: per layer, in total, and with every strategy. Nothing is computed or written.

    Args:
        model: a spec, or a module, which is not changed.
        data: source of the number of classes and the image size; not opened if `classes` and `image_size` are given.
        batch_size: batch size of a worker.
        workers: workers for bytes a step and model parallelism.
        classes: number of classes, instead of the data's.
        image_size: pixels a side, instead of the data's.
        channels: channels of an image, instead of the data's; 3 without data.

    Returns:
        A JSON-able dict: totals (`multiply_adds` of the forward pass of one image, work and depth of a step),
        `memory`, `layers`, `strategies` and `model_parallelism`.

    Raises:
        RequestError: something of it is wrong, or the network cannot be run on shapes alone.
    """
    for name, value in (("batch_size", batch_size), ("workers", workers)):
        if value < 1:
            raise RequestError(f"{name.replace('_', '-')} must be at least 1 (given {value})")
    for name, number in (("classes", classes), ("image_size", image_size), ("channels", channels)):
        if number is not None and number < 1:
            raise RequestError(f"{name.replace('_', '-')} must be at least 1 (given {number})")
    task, count, shape = _task(model, data, classes, image_size, channels)
    shapes = shapes_of(model, count, shape)
    found = analysis_of(copy.deepcopy(shapes), shape, batch_size)
    return {
        "model": name_of(model),
        "data": task,
        "classes": count,
        "image_shape": list(shape),
        "batch_size": batch_size,
        "workers": workers,
        "parameters": found.parameters,
        "multiply_adds": found.multiply_adds // batch_size,
        "step_multiply_adds": found.multiply_adds + found.backward_multiply_adds,
        "work": found.work,
        "depth": found.depth,
        "step_work": found.step_work,
        "step_depth": found.step_depth,
        "average_parallelism": found.average_parallelism,
        "memory": _memory(found),
        "layers": [_layer(layer, batch_size) for layer in found.layers],
        "strategies": _strategies(shapes, shape, workers, batch_size),
        "model_parallelism": _model_parallelism(shapes, shape, workers, batch_size),
    }


def _task(
    model: Any, data: Any, classes: int | None, image_size: int | None, channels: int | None
) -> tuple[str | None, int, tuple[int, int, int]]:
    if classes is not None and image_size is not None:
        return None, classes, (channels or 3, image_size, image_size)
    size = {} if image_size is None else {"image_size": image_size}
    dataset = opened(configure({"data": data, "model": model} | size))
    depth, *sides = dataset.image_shape
    return dataset.name, classes or len(dataset.classes), (channels or depth, sides[0], sides[1])


def _memory(found: Analysis) -> dict[str, Any]:
    return {
        "parameters": found.parameter_bytes,
        "gradients": found.parameter_bytes,
        "buffers": found.buffer_bytes,
        "activations": found.activation_bytes,
        "training": {name: found.training_bytes(states) for name, states in OPTIMIZER_STATES.items()},
    }


def _layer(layer: AnalyzedLayer, batch: int) -> dict[str, Any]:
    facts = {key: value for key, value in vars(layer).items() if key not in ("convolutions", "output")}
    facts["multiply_adds"] = layer.multiply_adds // batch
    facts["output"] = list(layer.output)
    if layer.convolutions:
        facts["methods"] = [asdict(method) for method in methods(layer.convolutions[0])]
    return facts


def _strategies(
    shapes: nn.Module, image_shape: tuple[int, int, int], workers: int, batch_size: int
) -> list[dict[str, Any]]:
    """Return the bytes sent for a step of one worker with each strategy, from a dry run, or why it cannot be run."""
    rows = []
    for family in FAMILIES:
        for name in choices(family):
            found: dict[str, Any] = {"name": name, "family": family.rpartition(".")[2]}
            try:
                found |= _bytes(name, copy.deepcopy(shapes), image_shape, workers, batch_size)
            except RequestError as error:
                found["refused"] = str(error)
            rows.append(found)
    return rows


def _bytes(
    name: str, shapes: nn.Module, image_shape: tuple[int, int, int], workers: int, batch_size: int
) -> dict[str, Any]:
    strategy = strategy_from(name)
    strategy.check(workers)
    traits = strategy.traits(workers)
    if traits.sends_by_value:
        return {"by_value": True}
    steps = min(_MOST_STEPS, max(_FEWEST_STEPS, _ROUNDS * traits.exchange_every))
    run = DryRun(
        strategy=strategy,
        workers=workers,
        sizes=sizes_for(shapes, image_shape, strategy, workers),
        steps=steps,
        batch_size=batch_size,
    )
    ended = dry_events(run)[-1]
    assert isinstance(ended, RunEnded)
    return {
        "servers": traits.servers,
        "bytes_sent_per_step": ended.result["bytes_sent_per_step"],
        "remark": _remark(traits),
    }


def _remark(traits: Traits) -> str:
    if traits.one_host:
        return "through memory that all workers share"
    return "" if traits.exchange_every else "exchanged once, in the end"


def _model_parallelism(
    shapes: nn.Module, image_shape: tuple[int, int, int], workers: int, batch_size: int
) -> dict[str, Any] | None:
    """Compare the bytes that a worker receives per step for the last layers: gradients, or activations.

    The layers before them are compared separately (`trunk`): cut by channels, or by the height of images.

    None where nothing can be cut, or one worker is alone.
    """
    if workers < 2:
        return None
    try:
        parts = cut(copy.deepcopy(shapes), None)
    except RequestError:
        return None
    features, *widths = parts.sizes
    size = next(shapes.parameters()).element_size()
    weights = sum(rows * columns for rows, columns in zip([features, *widths], widths, strict=False))
    data_parallel = hybrid.data_parallel(workers, features, widths) * size
    cut_at = {batch: hybrid.received(workers, batch, features, widths) * size for batch in (1, batch_size)}
    return {
        "layers": [features, *widths],
        "weights": weights,
        "data_parallel_bytes": data_parallel,
        "cut_bytes": cut_at[batch_size],
        "pays": cut_at[batch_size] < data_parallel,
        "pays_below_batch_size": int(data_parallel / cut_at[1]),
        "trunk": _trunk(parts, next(shapes.parameters()).new_zeros(1, *image_shape), workers, batch_size),
    }


def _trunk(parts: Cut, image: Tensor, workers: int, batch_size: int) -> dict[str, dict[str, Any]]:
    """Return the numbers that worker 0 receives per step if the layers before the fully connected ones are cut too."""
    costs: dict[str, dict[str, Any]] = {}
    for how in ("channels", "height"):
        try:
            divided = DividedTrunk(parts, image, how, workers)
        except RequestError as error:
            costs[how] = {"refused": str(error)}
            continue
        counts = [batch_size] * workers
        numbers = sum(
            what.sent(source, 0, counts)
            for what in divided.exchanges(gradients=divided.trains)
            for source in range(workers)
        )
        weights = sum(each.numel() for layer in divided.layers for each in layer.parameters())
        summed = 0.0 if how == "channels" else 2 * weights * (workers - 1) / workers
        last, before = divided.ends
        costs[how] = {
            "last": last,
            "ends_before": before,
            "weights": weights,
            "cut_bytes": numbers * image.element_size(),
            "gradient_bytes": summed * image.element_size(),
            "data_parallel_bytes": 2 * weights * (workers - 1) / workers * image.element_size(),
        }
    return costs
