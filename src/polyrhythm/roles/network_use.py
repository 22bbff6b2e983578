"""What a strategy asks of how the network is run."""

from __future__ import annotations

import torch

from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Learning
from polyrhythm.strategies.strategy import Strategy


def check_network_use(strategy: Strategy, workers: int, dtype: torch.dtype, learning: Learning) -> None:
    """Refuses to run the network in a way that the strategy does not allow.

    Args:
        strategy: of the run.
        workers: how many there are.
        dtype: in which it computes.
        learning: how a replica learns.

    Raises:
        RequestError: so it is.
    """
    compiled = learning.execution.compiled
    if compiled and strategy.waits_between_layers:
        raise RequestError(
            f"{strategy} waits between the layers of the network, and a compiled one has none: leave compile "
            "out, or use synchronous"
        )
    if not strategy.cuts_network:
        return
    if dtype != torch.float32 or compiled:
        raise RequestError(
            f"{strategy} runs a network in two parts, in full precision and not compiled: leave precision and "
            "compile out, or use synchronous"
        )
    if learning.weight_average and workers > 1:
        raise RequestError(
            f"{strategy} has no whole model to average after each step: leave weight_average out, or use synchronous"
        )
