"""Batch normalization over the batches of all workers, for models of a user's own that hold `nn.SyncBatchNorm`.

torch's layer uses a process group of its own, and only on GPUs; without one it silently uses the statistics of
its own batch. In a synchronous loop with one model it uses the workers of the run instead, as it does
under torch's DDP, and is then plain batch normalization over the global batch:

    n = sum_k n_k    m = sum_k n_k m_k / n    n v = sum_k n_k (v_k + (m_k - m)^2)
    dx = g / s (dy - (sum_k c_k sum(dy_k) + x^ sum_k c_k sum(dy_k x^_k)) / (c n))    x^ = (x - m) / s,  s^2 = v + eps

n_k, m_k, v_k: images (times positions), mean and variance of a channel at worker k (T. Chan, G. Golub, R. LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979). c_k: weight of its loss in the
mean of all gradients; c: the weight at the worker that computes dx.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import PeerLost, RunError


def synchronized_norms(model: nn.Module) -> list[nn.SyncBatchNorm]:
    """Return the layers of a model that are to have the statistics of all workers."""
    return [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]


class NormPeers:
    """The other workers, to one worker's layers.

    Args:
        workers: communicator of all workers, used by nothing else.
        weight: function that returns the weight of the current pass, in units of a full batch.
        waiting: entered while this worker waits for the others.
    """

    def __init__(
        self,
        workers: Communicator,
        weight: Callable[[], float],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._workers = workers
        self.weight = weight
        self._waiting = waiting

    def sum_of(self, own: Tensor) -> Tensor:
        """Return the sum of all workers' vectors, as float64 on the device of this one.

        Raises:
            RunError: another worker is gone.
        """
        total = own.detach().to("cpu", torch.float64)
        try:
            with self._waiting():
                self._workers.all_reduce(total)
        except PeerLost:
            raise RunError(
                "a worker was lost in a pass through nn.SyncBatchNorm, which needs all of them: start again from what "
                "group.save has written, or use nn.BatchNorm"
            ) from None
        return total.to(own.device)

    def rows_of(self, own: Tensor) -> Tensor:
        """Return all workers' vectors, `(workers, length)`, as float64."""
        rows = own.new_zeros(self._workers.size, len(own), dtype=torch.float64)
        rows[self._workers.rank] = own
        return self.sum_of(rows.flatten()).view_as(rows)


def synchronize(model: nn.Module, peers: NormPeers) -> Callable[[], None]:
    """Let the layers of a model ask the other workers, in passes of training.

    Args:
        model: network; its `nn.SyncBatchNorm` layers are changed until the returned function is called.
        peers: the workers.

    Returns:
        What makes them torch's own again.
    """
    layers = synchronized_norms(model)
    for layer in layers:
        # A function: of a bound method, a copy of the model would copy the workers' connections.
        def forward(x: Tensor, layer: nn.SyncBatchNorm = layer) -> Tensor:
            if not layer.training:
                return nn.SyncBatchNorm.forward(layer, x)
            layer._check_input_dim(x)
            layer._check_non_zero_input_channels(x)
            return _normalized(x, layer.weight, layer.bias, layer, peers)

        layer.forward = forward  # type: ignore[assignment, method-assign]

    def undo() -> None:
        for layer in layers:
            layer.__dict__.pop("forward", None)

    return undo


class _Normalization(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: nn.SyncBatchNorm,
        peers: NormPeers,
    ) -> Tensor:
        pass_weight = peers.weight()
        wide = torch.promote_types(x.dtype, torch.float32)
        places = [each for each in range(x.ndim) if each != 1]
        known, channels = x.to(torch.float64), x.size(1)
        # A batch that others have as well, and that counts for nothing, is not theirs twice.
        count = float(x.numel() // channels) if pass_weight > 0 else 0.0
        own_mean = known.mean(places)
        squares = (known - _along(own_mean, x)).square().sum(places)
        rows = peers.rows_of(torch.cat([own_mean, squares, own_mean.new_tensor([count])]))
        counts = rows[:, -1:]
        total = float(counts.sum())
        means, rest = rows[:, :channels], rows[:, channels:-1] * (counts > 0)
        mean = (counts * means).sum(0) / total
        variance = (rest + counts * (means - mean).square()).sum(0) / total
        _note(layer, mean, variance, total)
        inverse = (variance + layer.eps).rsqrt()
        context.save_for_backward(x, weight, mean, inverse)
        context.peers, context.pass_weight, context.total = peers, pass_weight, total
        made = (x.to(wide) - _along(mean, x).to(wide)) * _along(inverse, x).to(wide)
        if weight is not None:
            made = made * _along(weight, x).to(wide)
        if bias is not None:
            made = made + _along(bias, x).to(wide)
        return made.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(context: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = context.saved_tensors
        places = [each for each in range(x.ndim) if each != 1]
        given = slope.to(torch.float64)
        normed = (x.to(torch.float64) - _along(mean, x)) * _along(inverse, x)
        sums = torch.cat([given.sum(places), (given * normed).sum(places)])
        of_weight, of_bias = sums[x.size(1) :], sums[: x.size(1)]
        counted = context.pass_weight
        totals = context.peers.sum_of(counted * sums) / (context.total * (counted or 1.0))
        back = given - _along(totals[: x.size(1)], x) - normed * _along(totals[x.size(1) :], x)
        scale = inverse if weight is None else inverse * weight.to(torch.float64)
        back = (back * _along(scale, x)).to(x.dtype)
        if weight is None:
            return back, None, None, None, None
        return back, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


_normalized: Callable[..., Tensor] = _Normalization.apply


def _along(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (x.ndim - 2))


def _note(layer: nn.SyncBatchNorm, mean: Tensor, variance: Tensor, total: float) -> None:
    """Update the running statistics as torch does, with the variance of all workers' batches."""
    if layer.running_mean is None or layer.running_var is None or not layer.track_running_stats:
        return
    assert layer.num_batches_tracked is not None, "torch counts batches where it tracks them"
    layer.num_batches_tracked.add_(1)
    part = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    unbiased = variance * (total / max(1.0, total - 1))
    layer.running_mean.lerp_(mean.to(layer.running_mean), part)
    layer.running_var.lerp_(unbiased.to(layer.running_var), part)
