"""LeNet-5 with today's parts: rectifiers, max-pooling, and 32 and 64 feature maps instead of 6 and 16.

LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", Proceedings of the
IEEE 86(11), 1998.

    F_i = relu(maxpool_2x2(conv_5x5(F_{i-1})))  for i = 1, 2;   logits = W_2 relu(W_1 flat(F_2) + b_1) + b_2

`widths` are the numbers of maps in F_1 and F_2, `hidden` is the length of b_1. Departures: the paper's layer
of 84 units and its radial-basis output are omitted, and dropout before W_2 can be switched on. Nothing is
padded, except where a side is shorter than 16 pixels (`digits`): there 5x5 windows without padding would
leave nothing, so both convolutions keep the size of what they read.
"""

from __future__ import annotations

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

_SHORTEST_UNPADDED_SIDE = 16  # 16 → conv 12 → pool 6 → conv 2 → pool 1
_SHORTEST_SIDE = 4  # 4 → pool 2 → pool 1


class ChannelsLast(nn.Module):
    """Copies images into (B, H, W, C) memory order, in which convolutions on a CPU run up to twice as fast."""

    def forward(self, images: Tensor) -> Tensor:
        """Return a copy of `images` (B, C, H, W) with the same shape and values.

        `contiguous(memory_format=...)` has no effect on images of one channel, for which both layouts count as
        contiguous, and the convolutions would take the slow path.
        """
        return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)


class LeNet5(Config):
    """A small convolutional network.

    Attributes:
        widths: feature maps of the two convolutions.
        hidden: width of the fully connected layer.
        dropout: probability with which a value of that layer is dropped in training, in [0, 1).
    """

    widths: tuple[PositiveInt, PositiveInt] = (32, 64)
    hidden: PositiveInt = 128
    dropout: float = Field(0.0, ge=0, lt=1)

    def create(self, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Return the network; raise `RequestError` if a side of the images is shorter than 4 pixels."""
        channels, height, width = image_shape
        if min(height, width) < _SHORTEST_SIDE:
            raise RequestError(
                f"model lenet5 does not support images of {height}x{width}: "
                f"both sides need {_SHORTEST_SIDE} pixels or more, give --image-size"
            )
        padding = 2 if min(height, width) < _SHORTEST_UNPADDED_SIDE else 0
        first, second = self.widths
        return nn.Sequential(
            ChannelsLast(),
            *_stage(channels, first, padding),
            *_stage(first, second, padding),
            nn.Flatten(),
            nn.Linear(second * _pooled_side(height, padding) * _pooled_side(width, padding), self.hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, classes),
        )


def _stage(inputs: int, outputs: int, padding: int) -> tuple[nn.Module, ...]:
    # pooling before the rectifier gives the same numbers as after it, for a quarter of the work
    return nn.Conv2d(inputs, outputs, kernel_size=5, padding=padding), nn.MaxPool2d(2), nn.ReLU()


def _pooled_side(side: int, padding: int) -> int:
    for _ in range(2):
        side = (side + 2 * padding - 4) // 2
    return side
