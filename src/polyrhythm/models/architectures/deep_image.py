"""Deep Image: sixteen layers, five stages of 3x3 convolutions and three fully connected layers.

R. Wu, S. Yan, Y. Shan, Q. Dang, G. Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv:1501.02876, table 2.

    stage     64 x 2 | 128 x 2 | 256 x 3 | 512 x 3 | 512 x 3       channels x convolutions, then 2x2 max-pooling
    head      flat -> 6144 -> 6144 -> classes

`width` is the number of channels of the last stages (the first has an eighth of it), `hidden` the width of the head;
1024 and 8192 are the paper's larger ones. For 1000 classes at 224 pixels there are 212.7 million weights. Departures:
weights are initialized as in He, Zhang, Ren, Sun (ICCV 2015), without which so deep a network of rectifiers does not
start to learn; smaller images pass fewer stages, as many as leave 3 pixels a side.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

_CONVOLUTIONS = (2, 2, 3, 3, 3)
_SHARES = (8, 4, 2, 1, 1)
_SHORTEST_LEFT = 3
_SHORTEST_SIDE = 2 * _SHORTEST_LEFT


class DeepImage(Config):
    """The network of Deep Image, and smaller variants.

    Attributes:
        width: channels of the last stages, divisible by 8.
        hidden: width of the two hidden fully connected layers.
        dropout: probability with which a value of those is dropped in training, in [0, 1).
        batch_norm: whether batch normalization follows every convolution, which the paper does not have.
    """

    width: Annotated[PositiveInt, Field(multiple_of=8)] = 512
    hidden: PositiveInt = 6144
    dropout: float = Field(0.5, ge=0, lt=1)
    batch_norm: bool = False

    def create(self, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Return the network; raise `RequestError` if a side of the images is shorter than 6 pixels."""
        channels, height, width = image_shape
        stages = _stages_for(min(height, width))
        layers: list[nn.Module] = []
        for share, convolutions in zip(_SHARES[:stages], _CONVOLUTIONS[:stages], strict=True):
            for _ in range(convolutions):
                layers += self._convolution(channels, self.width // share)
                channels = self.width // share
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Flatten(), *self._head(channels * (height >> stages) * (width >> stages), classes)]
        made = nn.Sequential(*layers)
        for layer in made:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        return made

    def _convolution(self, inputs: int, outputs: int) -> list[nn.Module]:
        norm = [nn.BatchNorm2d(outputs)] if self.batch_norm else []
        return [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), *norm, nn.ReLU()]

    def _head(self, features: int, classes: int) -> list[nn.Module]:
        return [
            nn.Linear(features, self.hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, classes),
        ]


def _stages_for(side: int) -> int:
    if side < _SHORTEST_SIDE:
        raise RequestError(
            f"model deep_image does not support images with a side of {side}: it needs {_SHORTEST_SIDE} pixels or "
            "more, "
            "give --image-size"
        )
    return max(stages for stages in range(1, len(_SHARES) + 1) if side >> stages >= _SHORTEST_LEFT)
