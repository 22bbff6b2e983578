"""Means of whole networks' weights, and batch norms made to fit them.

P. Izmailov and others, "Averaging weights leads to wider optima and better generalization" (SWA), UAI 2018,
arXiv:1803.05407; M. Wortsman and others, "Model soups", ICML 2022, arXiv:2203.05482; B. Polyak, A. Juditsky, 1992.

    w = 1/n sum_k w_k,    computed as  w_k <- w_{k-1} + (w_k - w_{k-1}) / k,  in double precision

Statistics of batch norms do not average: they are computed anew, over training pictures (SWA, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.errors import RequestError


def mean_weights(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gives the mean of several networks' tensors by name; what is no floating-point number is the first's.

    Raises:
        RequestError: they are not of one network, or there are none.
    """
    mean: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}
    for number, state in enumerate(states, start=1):
        if not first:
            first = state
            mean = {
                name: value.to(torch.float64, copy=True)
                for name, value in state.items()
                if value.is_floating_point()
            }
        _check_alike(first, state)
        for name, value in mean.items():
            value += (state[name].double() - value) / number
    if not first:
        raise RequestError("there are no weights to average")
    return {name: mean[name].to(value.dtype) if name in mean else value for name, value in first.items()}


def recompute_batch_norms(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Computes the statistics of every batch norm anew, in place: their mean over batches.

    Everything else works as in evaluation; a network without batch norms looks at no batch.

    Args:
        model: whose statistics.
        batches: of training pictures, (B, C, H, W) each; all count alike, so they should be of one size.
    """
    norms = [
        module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    if not norms:
        return
    training, momenta = [module.training for module in model.modules()], [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # then they are the mean over batches
        norm.train()
    with torch.no_grad():
        for images in batches:
            model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    for module, flag in zip(model.modules(), training, strict=True):
        module.training = flag


def _check_alike(first: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    different = [
        name
        for name in first.keys() | other.keys()
        if name not in first or name not in other or first[name].shape != other[name].shape
    ]
    if different:
        raise RequestError(
            f"the weights are of different networks ({sorted(different)[0]} differs): only runs of one --model can be "
            "averaged; let others vote: polyrhythm evaluate RUN1 RUN2"
        )
