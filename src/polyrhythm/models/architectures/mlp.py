"""Multi-layer perceptron; by default, and for `digits`, the 64-64-10 network of the UT Austin report.

Mullapudi, "Distributed Deep Neural Networks", report, The University of Texas at Austin, 2017.

    h_0 = flattened image;   h_i = tanh(W_i h_{i-1} + b_i);   logits = W_n h_{n-1} + b_n

The widths of h_1 … h_{n-1} are `hidden`, tanh is `activation`. Dropout after each of them is an addition, off by
default.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt
from torch import nn

from polyrhythm.specs import Config

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
}


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


class MLP(Config):
    """A multi-layer perceptron.

    Attributes:
        hidden: width of the hidden layer, or the widths of several; `[]` is a linear classifier.
        dropout: probability with which a hidden value is dropped in training, in [0, 1).
        activation: function after every hidden layer.
    """

    hidden: Annotated[tuple[PositiveInt, ...], BeforeValidator(_as_tuple)] = (64,)
    dropout: float = Field(0.0, ge=0, lt=1)
    activation: Literal["tanh", "relu", "gelu", "sigmoid"] = "tanh"

    def create(self, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Return the network; see `Architecture.create`."""
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise((prod(image_shape), *self.hidden)):
            layers += [nn.Linear(inputs, outputs), _ACTIVATIONS[self.activation]()]
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
        last_width = self.hidden[-1] if self.hidden else prod(image_shape)
        return nn.Sequential(*layers, nn.Linear(last_width, classes))
