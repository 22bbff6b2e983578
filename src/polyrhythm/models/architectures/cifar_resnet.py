"""The residual networks for small images, of 20 to 110 layers and more.

K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition", CVPR 2016, arXiv:1512.03385,
section 4.2.

    images ─ conv3, BN, relu ─ n blocks at 16 maps ─ n at 32 ─ n at 64 ─ mean over pixels ─ logits

    block     y = relu(BN(conv3(relu(BN(conv3(x))))) + shortcut(x))

`depth` is 6n + 2, `width` the maps of the first stage. The first block of the second and of the third stage halves the
image and doubles the maps; its shortcut takes every second pixel and adds maps of zeros (the paper's option A), so
that no shortcut has weights. For images of 32 pixels a side; others pass as well.
"""

from __future__ import annotations

from itertools import pairwise

from pydantic import Field, PositiveInt, field_validator
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

_STAGES = 3
_SHORTEST_SIDE = 4  # the last stage sees a quarter


class CifarResNet(Config):
    """A residual network for small images.

    Attributes:
        depth: layers with weights, 6n + 2: 20, 32, 44, 56 and 110 in the paper.
        width: feature maps of the first stage; the next has twice as many, the last four times.
    """

    depth: int = Field(20, ge=8)
    width: PositiveInt = 16

    @field_validator("depth")
    @classmethod
    def _whole_blocks(cls, depth: int) -> int:
        if depth % (2 * _STAGES) != 2:
            raise ValueError("should be 6n + 2, such as 20, 32, 44, 56 or 110")
        return depth

    def create(self, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Return the network; raise `RequestError` if a side of the images is shorter than 4 pixels."""
        channels, height, width = image_shape
        if min(height, width) < _SHORTEST_SIDE:
            raise RequestError(
                f"model cifar_resnet does not support images of {height}x{width}: both sides need "
                f"{_SHORTEST_SIDE} pixels "
                "or more, give --image-size"
            )
        blocks = (self.depth - 2) // (2 * _STAGES)
        widths = [self.width * 2**stage for stage in range(_STAGES) for _ in range(blocks)]
        made = nn.Sequential(
            nn.Conv2d(channels, self.width, 3, padding=1, bias=False),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
            *(Block(inputs, outputs) for inputs, outputs in pairwise([self.width, *widths])),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(widths[-1], classes),
        )
        for layer in made.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return made


class Block(nn.Module):
    """Two convolutions and a shortcut: maps (B, inputs, H, W) to (B, outputs, H, W), or to half of the sides.

    Args:
        inputs: feature maps.
        outputs: feature maps of the output; with more of them than inputs, sides are halved.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.added = (1, 0) if inputs == outputs else (2, outputs - inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of both ways, rectified."""
        changed = self.norm2(self.conv2(relu(self.norm1(self.conv1(images)))))
        if self.added:
            images = pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return relu(changed + images)
