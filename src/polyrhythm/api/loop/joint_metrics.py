"""Metrics of torchmetrics over all workers: their states are gathered by the group, without a process group of torch.

metric.update(…)      each worker's own images
metric.compute()      gathers the states of all workers, then computes: the same value on all
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.communication.message import pack_tensors, unpack_tensors


def join_metrics(module: nn.Module, gather: Callable[[Any], list[Any]]) -> Callable[[], None]:
    """Let all metrics in a module compute over all workers; return a function that undoes it.

    Args:
        module: a metric, a collection of them, or a model that holds some. A metric with a gathering function of its
            own keeps it.
        gather: returns the values of all workers, in their order; they are JSON-able.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    found: list[Any] = []
    if torchmetrics is not None:
        found = [
            each
            for each in module.modules()
            if isinstance(each, torchmetrics.Metric) and each.dist_sync_fn is None
        ]
    before = [each.distributed_available_fn for each in found]

    def gathered(state: Tensor, group: object = None) -> list[Tensor]:
        packed = pack_tensors({"state": state.detach().cpu()}, {}).numpy().tobytes().hex()
        tensors = (torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in gather(packed))
        return [unpack_tensors(each)[0]["state"].to(state) for each in tensors]

    for each in found:
        each.dist_sync_fn, each.distributed_available_fn = gathered, _is_distributed

    def undo() -> None:
        for each, available in zip(found, before, strict=True):
            each.dist_sync_fn, each.distributed_available_fn = None, available

    return undo


def _is_distributed() -> bool:
    return True
