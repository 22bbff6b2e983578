"""Ghost batch normalization: statistics of small slices of a large batch.

Paper: E. Hoffer, I. Hubara, D. Soudry, "Train longer, generalize better: closing the generalization gap in large batch
training of neural networks", NeurIPS 2017, arXiv 1705.08741, algorithm 1.

    batch     x_1 … x_s | x_s+1 … x_2s | …            s = `size`
    slice k   y = (x - mean_k) / sqrt(var_k + eps) * weight + bias
    running   r <- (1 - momentum) r + momentum * statistics of the slice, for one slice after the other

A batch of B images has B / s slices, rounded up, which differ by at most one image.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.errors import RequestError
from polyrhythm.training.batch_norm import BatchNorm
from polyrhythm.training.quantities import Count


class Ghost(BatchNorm):
    """Keys of ghost batch normalization.

    Attributes:
        size: images of a slice, at most; at least 2.
    """

    size: Count = 32

    def prepare(self, model: nn.Module) -> nn.Module:
        if self.size < 2:
            raise RequestError(f"ghost: a slice of size={self.size} has no variance: take 2 images at least")
        layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
        if not layers:
            raise RequestError(f"{self}: the network has no batch normalization: leave batch_norm out")
        for layer in layers:
            # Not a layer of another class: timm has some that do more than to normalize.
            layer.forward = partial(_sliced, layer, layer.forward, self.size)  # type: ignore[method-assign]
        return model


def _sliced(layer: nn.Module, forward: Callable[[Tensor], Tensor], size: int, images: Tensor) -> Tensor:
    """Return a layer's output for a batch, (B, …), normalized slice by slice in training."""
    if not layer.training or len(images) <= size:
        return forward(images)
    return torch.cat([forward(part) for part in images.tensor_split(-(-len(images) // size))])
