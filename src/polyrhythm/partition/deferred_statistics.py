"""Batch normalization of microbatches: each by its own statistics, and running statistics changed once a batch.

    microbatch m of n_m values a channel: mean_m, M2_m = sum (x - mean_m)^2
    batch:   mean = sum n_m mean_m / n,    M2 = sum M2_m + n_m (mean_m - mean)^2
    running' = (1 - momentum) running + momentum (mean, M2 / (n - 1))

So running statistics are those that torch keeps of whole batches: the variance unbiased, and one update a batch,
whatever the microbatches. Outputs are those of batch normalization by microbatch. Passes that only compute activations
again change nothing.

Kim, Lee, Jeong and others, "torchgpipe", 2020, arXiv 2004.09910, for deferring; its variance is biased, and sums of
squares cancel. Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Layer:
    """A normalizing layer, what it has seen of the present batch, and what it is tested by."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.seen = 0
        self.mean: Tensor | None = None
        self.squares: Tensor | None = None
        self.running: tuple[Tensor, Tensor, Tensor | None, float | None] | None = None
        self.values = 0

    def before(self, statistics: DeferredStatistics, inputs: tuple[Tensor, ...]) -> None:
        """Let a pass write the statistics of its own values elsewhere."""
        layer = self.layer
        values = inputs[0].numel() // inputs[0].shape[1]
        # One number has no variance; such a layer normalizes by its running statistics.
        if not (statistics.diverts and layer.training and values > 1):
            return
        assert layer.running_mean is not None
        assert layer.running_var is not None
        self.running = layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum
        layer._buffers |= {
            "running_mean": torch.zeros_like(layer.running_mean),
            "running_var": torch.zeros_like(layer.running_var),
            "num_batches_tracked": None,
        }
        layer.momentum = 1.0
        self.values = values

    def after(self, statistics: DeferredStatistics) -> None:
        """Put the running statistics back, and add those of the pass to the batch's."""
        if self.running is None:
            return
        layer = self.layer
        mean, variance = layer._buffers["running_mean"], layer._buffers["running_var"]
        own_mean, own_variance, tracked, layer.momentum = self.running
        layer._buffers |= {
            "running_mean": own_mean,
            "running_var": own_variance,
            "num_batches_tracked": tracked,
        }
        self.running = None
        if statistics.counts:
            assert mean is not None
            assert variance is not None
            self._add(mean, variance * (self.values - 1), self.values)

    def _add(self, mean: Tensor, squares: Tensor, values: int) -> None:
        if self.mean is None or self.squares is None:
            self.mean, self.squares, self.seen = mean, squares, values
            return
        whole, difference = self.seen + values, mean - self.mean
        self.mean = self.mean + difference * (values / whole)
        self.squares = self.squares + squares + difference.square() * (self.seen * values / whole)
        self.seen = whole

    def commit(self) -> None:
        """Change the running statistics by those of the batch."""
        layer = self.layer
        if self.mean is None or self.squares is None:
            return
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked += 1
        momentum = layer.momentum
        if momentum is None:
            assert layer.num_batches_tracked is not None
            momentum = 1 / float(layer.num_batches_tracked)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.mul_(1 - momentum).add_(self.mean, alpha=momentum)
        layer.running_var.mul_(1 - momentum).add_(self.squares / (self.seen - 1), alpha=momentum)
        self.mean = self.squares = None
        self.seen = 0


class DeferredStatistics:
    """Running statistics of one stage's layers; its passes must be between `begin` and `end`.

    Args:
        module: module of the stage, in training.
        microbatches: microbatches of a batch. With one, layers keep their statistics themselves.

    Attributes:
        diverts: whether layers are kept from changing their statistics now.
        counts: whether the present pass counts.
    """

    def __init__(self, module: nn.Module, microbatches: int) -> None:
        self._microbatches = microbatches
        self.diverts = False
        self.counts = True
        self._layers = [
            _Layer(layer)
            for layer in module.modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        ]
        for entry in self._layers:

            def before(_layer: nn.Module, inputs: tuple[Tensor, ...], entry: _Layer = entry) -> None:
                entry.before(self, inputs)

            def after(
                _layer: nn.Module, _inputs: tuple[Tensor, ...], _outputs: Tensor, entry: _Layer = entry
            ) -> None:
                entry.after(self)

            entry.layer.register_forward_pre_hook(before)
            entry.layer.register_forward_hook(after)

    def begin(self, position: int | None) -> None:
        """Begin a pass of the microbatch at this position of its batch; None: one that is only computed again."""
        if position == 0:
            self.commit()
        self.counts = position is not None
        self.diverts = self._microbatches > 1 or not self.counts

    def end(self) -> None:
        """End the pass that has begun."""
        self.diverts = False

    def commit(self) -> None:
        """Change the running statistics by those of the batch, if there are any."""
        with torch.no_grad():
            for entry in self._layers:
                entry.commit()
