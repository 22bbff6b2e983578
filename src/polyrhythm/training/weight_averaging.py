"""Means of weights: a running mean of one run, and the mean of several networks.

A running mean of the weights often tests better than the weights themselves. Source:
`tf.train.ExponentialMovingAverage` of TensorFlow 1, with a decay that starts low, so that the mean soon
forgets its initial value.

    d = min(decay, (1 + t) / (10 + t))
    average <- d average + (1 - d) w

t counts the updates before this one. Without the ramp, d = decay.

The mean of several networks: P. Izmailov and others, "Averaging weights leads to wider optima and better
generalization" (SWA), UAI 2018, arXiv:1803.05407; M. Wortsman and others, "Model soups", ICML 2022,
arXiv:2203.05482; B. Polyak, A. Juditsky, 1992.

    w = 1/n sum_k w_k,    computed as  w_k <- w_{k-1} + (w_k - w_{k-1}) / k,  in double precision

Statistics of batch norms do not average: they are computed again, over training images (SWA, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.errors import RequestError


class WeightAverage:
    """An exponential moving average of one vector.

    Args:
        weights: initial value of the average; copied.
        decay: share of the average that is kept at each update: at least 0, below 1.
        ramp: start with less than `decay`, as TensorFlow does.

    Attributes:
        value: the average; of the weights' shape, dtype and device. `update` changes it in place.
        updates: number of updates.

    Raises:
        RequestError: the decay is out of its range.
    """

    def __init__(self, weights: Tensor, decay: float, *, ramp: bool = True) -> None:
        if not 0 <= decay < 1:
            raise RequestError(
                f"weight average: a decay of {decay} is out of range: give at least 0, less than 1"
            )
        self.value = weights.detach().clone()
        self.updates = 0
        self._decay = decay
        self._ramp = ramp

    @torch.no_grad()
    def update(self, weights: Tensor) -> None:
        """Move the average toward the weights, which have its shape; allocate nothing."""
        if weights.shape != self.value.shape:
            raise ValueError(f"the average has shape {tuple(self.value.shape)}, not {tuple(weights.shape)}")
        # lerp is exact at both ends: equal weights change nothing, a decay of 0 takes the weights as they are
        self.value.lerp_(weights, 1 - self._next_decay())
        self.updates += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that a resumed average needs; `value` is the live tensor, not a copy."""
        return {"value": self.value, "updates": torch.tensor(self.updates)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, by copying it."""
        self.value.copy_(state["value"])
        self.updates = int(state["updates"])

    def _next_decay(self) -> float:
        if not self._ramp:
            return self._decay
        return min(self._decay, (1 + self.updates) / (10 + self.updates))


def mean_weights(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of several networks' tensors by name; what is no floating-point number is the first's.

    Raises:
        RequestError: the tensors are not of one network, or there are none.
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
    """Compute the statistics of every batch norm again, in place: their mean over batches.

    Everything else works as in evaluation; a network without batch norms looks at no batch.

    Args:
        model: model with the statistics.
        batches: batches of training images, (B, C, H, W) each; all count alike, so they should be of one size.
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
