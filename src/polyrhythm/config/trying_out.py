"""Making once what every rank will make, so that whatever cannot be is refused before anything starts."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.partition.cut import cut
from polyrhythm.partition.ownership import Ownership
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan, check_shards


def try_out(
    make_model: partial[nn.Module],
    optimizer: OptimizerConfig,
    strategy: Strategy,
    workers: int,
    image_shape: tuple[int, int, int],
) -> int:
    """Makes model and optimiser, and asks the strategy whether it can do with them.

    Args:
        make_model: makes the network.
        optimizer: of the run.
        strategy: of the run.
        workers: how many there are.
        image_shape: (C, H, W) of a picture.

    Returns:
        How many numbers the network has, buffers and all.

    Raises:
        RequestError: it cannot.
    """
    with torch.random.fork_rng(devices=[]):
        model = make_model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        made = optimizer.create(trained)
    except ValueError as error:
        raise RequestError(f"optimizer {optimizer}: {error}") from None
    if strategy.shard_count:
        check_shards(made, model, strategy.shard_count)
    flat = FlatParameters(model)
    strategy.check_optimizer(OptimizerPlan.of(made, flat), workers)
    if strategy.cuts_network:
        with torch.random.fork_rng(devices=[]):
            Ownership.of(flat, cut(model, flat.vector.new_zeros(1, *image_shape)), workers)
    return sum(value.numel() for value in (*model.parameters(), *model.buffers()))
