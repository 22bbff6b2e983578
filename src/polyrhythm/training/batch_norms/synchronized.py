"""Synchronized batch normalization: statistics of the batches of all workers together.

S. Ioffe, C. Szegedy, "Batch normalization", ICML 2015, arXiv 1502.03167, with the batch of all workers, as in
C. Peng and others, "MegDet", CVPR 2018, arXiv 1711.07240.

    mean, var   of the numbers of a channel in all workers' images: one exchange of their sums and squares
    y = (x - mean) / sqrt(var + eps) * weight + bias
    backward    dx = weight / sqrt(var + eps) * (dy - sum(dy) / n - x' sum(dy x') / n),   x' = (x - mean) / sqrt(…)

The sums of the backward pass are of all workers, too, and weighted with their images, so that the mean of their
gradients is that of one large batch, however uneven theirs are. Sums are made in double precision. All workers keep the
same running statistics. Every layer costs two small exchanges a step, inside the passes, in which workers wait for each
other: it is for real runs of workers that average their gradients at every step, in one pass a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.errors import RequestError
from polyrhythm.training.batch_norm import BatchNorm
from polyrhythm.training.joint_optimizer import OneWorker, Workers


class Meeting:
    """Access of a network's layers to the workers that share their statistics.

    Attributes:
        workers: workers that step together.
    """

    def __init__(self) -> None:
        self.workers: Workers = OneWorker()

    def __deepcopy__(self, memo: dict[int, Any]) -> Meeting:
        """Return one without others: a copy of the network takes no part in the steps."""
        return Meeting()


class Synchronized(BatchNorm):
    """Keys of synchronized batch normalization: none."""

    over_workers: ClassVar[bool] = True

    def prepare(self, model: nn.Module) -> nn.Module:
        layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
        if not layers:
            raise RequestError(f"{self}: the network has no batch normalization: leave batch_norm out")
        meeting = Meeting()
        for layer in layers:
            if type(layer).forward is not _BatchNorm.forward:
                raise RequestError(
                    f"{self}: {type(layer).__name__} does more than normalize: use ghost or plain"
                )
            layer.forward = partial(_together, layer, layer.forward, meeting)  # type: ignore[method-assign]
        return model

    def meet(self, model: nn.Module, workers: Workers) -> None:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                assert isinstance(layer.forward, partial)
                layer.forward.args[2].workers = workers


def _together(
    layer: _BatchNorm, forward: Callable[[Tensor], Tensor], meeting: Meeting, images: Tensor
) -> Tensor:
    """Return a layer's output for this worker's share of a batch, (B, C, …); B may be 0."""
    if not layer.training or meeting.workers.size == 1:
        return forward(images)
    exact = images.float() if images.dtype.itemsize < 4 else images
    apply: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Normalized.apply
    found, mean, variance, count = apply(exact, layer.weight, layer.bias, layer.eps, meeting.workers)
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.add_(1)
            share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
            unbiased = variance * (count / (count - 1))
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), share)
    return found.to(images.dtype)


class _Normalized(torch.autograd.Function):
    """Normalizes images, (B, C, …), by the statistics of all workers' images."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        workers: Workers,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels, others = images.shape[1], [0, *range(2, images.ndim)]
        wide = images.double()
        own = images.new_full((1,), images.numel() // channels, dtype=torch.float64)
        totals = torch.cat([wide.sum(others), wide.square().sum(others), own])
        workers.all_reduce(totals)
        count = totals[-1]
        if float(count) < 2:
            raise ValueError("Expected more than 1 value per channel when training, of all workers together")
        mean = totals[:channels] / count
        variance = (totals[channels:-1] / count - mean.square()).clamp_min(0)
        shape = [1, channels] + [1] * (images.ndim - 2)
        scale = (variance + eps).rsqrt()
        centered = ((wide - mean.view(shape)) * scale.view(shape)).to(images.dtype)
        found = centered if weight is None else centered * weight.view(shape)
        if bias is not None:
            found = found + bias.view(shape)
        ctx.save_for_backward(centered, weight, scale, count)
        ctx.workers, ctx.bare = workers, bias is None
        ctx.mark_non_differentiable(mean, variance, count)
        return found, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        centered, weight, scale, count = ctx.saved_tensors
        channels, others = gradient.shape[1], [0, *range(2, gradient.ndim)]
        wide, normal = gradient.double(), centered.double()
        sums, products = wide.sum(others), (wide * normal).sum(others)
        # This worker's loss is the mean over its own images, and counts for as many in that of all.
        images = len(gradient)
        totals = torch.cat([sums, products]) * images
        ctx.workers.all_reduce(totals)
        totals /= max(images, 1)
        shape = [1, channels] + [1] * (gradient.ndim - 2)
        by_mean, by_scale = (part.view(shape) / count for part in totals.split(channels))
        found = (wide - by_mean - normal * by_scale) * scale.view(shape)
        if weight is not None:
            found = found * weight.view(shape)
        return (
            found.to(gradient.dtype),
            None if weight is None else products.to(weight.dtype),
            None if ctx.bare else sums.to(gradient.dtype),
            None,
            None,
        )
