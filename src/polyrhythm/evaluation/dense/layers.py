"""Layers that read flat vectors, as layers that read maps."""

from __future__ import annotations

from math import prod

from torch import nn


def as_convolution(layer: nn.Linear, window: tuple[int, int]) -> nn.Conv2d:
    """Gives a fully connected layer that reads flat (C, h, w) as a convolution with windows (h, w)."""
    channels = layer.in_features // prod(window)
    made = nn.Conv2d(channels, layer.out_features, window, bias=layer.bias is not None)
    made = made.to(layer.weight.device, layer.weight.dtype)
    made.weight.copy_(layer.weight.view(layer.out_features, channels, *window))
    if layer.bias is not None and made.bias is not None:
        made.bias.copy_(layer.bias)
    return made


def as_batch_norm_2d(layer: nn.BatchNorm1d) -> nn.BatchNorm2d:
    """Gives a normalisation of flat (C,) as one of maps (C, h, w)."""
    made = nn.BatchNorm2d(
        layer.num_features, layer.eps, affine=layer.affine, track_running_stats=layer.track_running_stats
    )
    made.load_state_dict(layer.state_dict())
    return made.to(next(iter(layer.state_dict().values())).device).eval()
