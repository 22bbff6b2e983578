"""Division of a classifier: a trunk that every worker copies, and a head with distributed neurons.

    images ─▶ trunk (convolutions, …) ─▶ (B, A) ─▶ Linear ─▶ relu, dropout, … ─▶ … ─▶ Linear ─▶ logits
             every worker its own copy            └────────── head: slices of neurons ──────────┘

The head begins with the first of the `nn.Linear` at the network's end that have nothing but elementwise functions in
between: those can be applied to a slice. Elementwise functions before that Linear belong to the trunk.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError

OF_SINGLE_NUMBERS = (
    nn.Dropout, nn.ELU, nn.GELU, nn.Hardswish, nn.Identity, nn.LeakyReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid,
    nn.SiLU, nn.Softplus, nn.Tanh,
)  # fmt: skip
"""Layers in which each output depends on one input, at the same place."""
_MEND = (
    "use a network that ends in nn.Linear layers, such as lenet5, deep_image, alexnet or mlp, or synchronous"
)


@dataclass(frozen=True)
class Layer:
    """A fully connected layer.

    Attributes:
        linear: the fully connected layer with its weights.
        after: elementwise modules that follow it, for outputs of any shape.
    """

    linear: nn.Linear
    after: nn.Sequential


@dataclass(frozen=True)
class Cut:
    """A network in two parts, which share its parameters.

    Attributes:
        trunk: maps images (B, C, H, W) to features (B, A).
        layers: layers of the head, in order.
    """

    trunk: nn.Module
    layers: tuple[Layer, ...]

    @property
    def features(self) -> int:
        """Number of features per image: A."""
        return self.layers[0].linear.in_features

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the features."""
        return self.layers[0].linear.weight

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of features, and the neurons of each layer of the head."""
        return (self.features, *(layer.linear.out_features for layer in self.layers))

    @property
    def trains_trunk(self) -> bool:
        """Whether the trunk has trained parameters."""
        return any(parameter.requires_grad for parameter in self.trunk.parameters())

    def whole(self, images: Tensor) -> Tensor:
        """Return the logits of images (B, C, H, W), like the undivided network."""
        outputs: Tensor = self.trunk(images)
        for layer in self.layers:
            outputs = layer.after(layer.linear(outputs))
        return outputs


def cut(model: nn.Module, image: Tensor | None) -> Cut:
    """Divide a classifier in front of the fully connected layers at its end.

    Args:
        model: a `nn.Sequential`, or a network that ends in an `nn.Linear` or a `nn.Sequential` of such layers;
            not changed.
        image: (1, C, H, W), to check that the two parts compute the same as the network; None, or on the meta device,
            if it has no numbers.

    Raises:
        RequestError: it does not end so, or does more than run its children one after the other.
    """
    if isinstance(model, nn.Sequential):
        start = _head_start(list(model))
        found = Cut(model[:start], tuple(_layers(list(model)[start:])))
    else:
        found = _cut_last_child(model)
    ours = {id(parameter) for layer in found.layers for parameter in layer.linear.parameters()}
    if any(id(parameter) in ours for parameter in found.trunk.parameters()):
        raise RequestError(f"a fully connected layer shares its weights with others: {_MEND}")
    if image is not None and not image.is_meta:
        _try_out(model, found, image)
    return found


def _cut_last_child(model: nn.Module) -> Cut:
    children = list(model.named_children())
    if not children:
        raise RequestError(f"{type(model).__name__} does not end in fully connected layers: {_MEND}")
    name, last = children[-1]
    modules = list(last) if isinstance(last, nn.Sequential) else [last]
    start = _head_start(modules)
    trunk = copy.copy(model)  # the same parameters and layers, in a table of its own
    trunk._modules = {**model._modules, name: nn.Sequential(*modules[:start])}
    return Cut(trunk, tuple(_layers(modules[start:])))


def _head_start(modules: Sequence[nn.Module]) -> int:
    start = len(modules)
    for position in reversed(range(len(modules))):
        if not isinstance(modules[position], (nn.Linear, *OF_SINGLE_NUMBERS)):
            break
        if isinstance(modules[position], nn.Linear):
            start = position
    if start == len(modules):
        raise RequestError(f"the network does not end in fully connected layers: {_MEND}")
    return start


def _layers(modules: Sequence[nn.Module]) -> Iterator[Layer]:
    starts = [position for position, module in enumerate(modules) if isinstance(module, nn.Linear)]
    for start, stop in zip(starts, [*starts[1:], len(modules)], strict=True):
        linear = modules[start]
        assert isinstance(linear, nn.Linear)
        yield Layer(linear, nn.Sequential(*modules[start + 1 : stop]))


def _try_out(model: nn.Module, found: Cut, image: Tensor) -> None:
    with torch.no_grad(), _tested(model, found.trunk):
        expected = model(image)
        try:
            outputs = found.whole(image)
        except RuntimeError:
            outputs = None
    if (
        not isinstance(outputs, Tensor)
        or not isinstance(expected, Tensor)
        or not torch.equal(outputs, expected)
    ):
        raise RequestError(f"{type(model).__name__} does more than its layers one after the other: {_MEND}")


@contextmanager
def _tested(*models: nn.Module) -> Iterator[None]:
    """Turn off randomness, and restore the modes of all modules afterwards."""
    modes = {module: module.training for model in models for module in model.modules()}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
