"""Fully connected layers of which every worker computes a slice of the neurons.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997, section 4.

    forward    y_s = f(x W_s' + b_s)  on worker s;   x of the next layer = (y_0 | y_1 | … )       for all examples
    backward   dW_s = dz_s' x         on worker s;   dx = sum_s dz_s W_s, each worker its own columns of it

W_s are the rows of W that belong to the slice, z_s what f is applied to. The examples' owners get their logits, and
give the gradients of these. Autograd works inside a layer only, so nothing ever waits for another worker inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from polyrhythm.partition.activations import Activations
from polyrhythm.partition.cut import Layer


@dataclass(frozen=True)
class _Call:
    """What a layer's backward pass needs: its inputs, its slice of the parameters, and its outputs."""

    inputs: Tensor
    slices: list[tuple[Tensor, Tensor]]
    outputs: Tensor


class ShardedLayers:
    """One worker's slices of a head.

    Args:
        layers: all of the head; their gradients are added to in this worker's rows only.
        activations: the way to the others.
        wants_inputs: whether somebody wants to know the gradient of the first layer's inputs.
    """

    def __init__(self, layers: Sequence[Layer], activations: Activations, *, wants_inputs: bool) -> None:
        self._layers = layers
        self._activations = activations
        self._wants_inputs = wants_inputs
        workers = activations.size
        self._places = [neurons(layer.linear.out_features, workers) for layer in layers]
        self._calls: list[_Call] = []

    @property
    def places(self) -> list[slice]:
        """This worker's neurons of each layer."""
        return [places[self._activations.rank] for places in self._places]

    def forward(self, inputs: Tensor, counts: Sequence[int]) -> Tensor:
        """Gives the logits of this worker's own examples.

        Args:
            inputs: (sum of counts, A), everybody's examples, in rank order.
            counts: how many of them each worker owns.

        Returns:
            (counts[rank], classes).
        """
        rank, rows = self._activations.rank, sum(counts)
        self._calls = []
        for number, layer in enumerate(self._layers):
            call = self._call(number, layer, inputs)
            self._calls.append(call)
            if number + 1 == len(self._layers):
                parts, height = list(call.outputs.split(list(counts))), counts[rank]
            else:
                parts, height = [call.outputs] * len(counts), rows
            shapes = [(height, width) for width in self._widths(number)]
            inputs = _joined(self._activations.swap(parts, shapes), dim=1)
        return inputs

    def backward(self, gradient: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Adds this worker's slices of the layers' gradients up, and gives what is wanted of the inputs'.

        Args:
            gradient: (counts[rank], classes), of the logits that `forward` gave.
            counts: as given to `forward`.

        Returns:
            (sum of counts, A): what this worker's neurons contribute, to be added up over the workers; None if nobody
            wants it.
        """
        rank, rows = self._activations.rank, sum(counts)
        widths = self._widths(len(self._layers) - 1)
        shapes = [(count, widths[rank]) for count in counts]
        gradient = _joined(self._activations.swap(gradient.split(widths, dim=1), shapes), dim=0)
        partial: Tensor | None = None
        for number in reversed(range(len(self._layers))):
            partial = _backward(self._calls[number], gradient, self._places[number][rank])
            if number:
                assert partial is not None, "all layers but the first want to know of their inputs"
                widths = self._widths(number - 1)
                shapes = [(rows, widths[rank])] * len(counts)
                gradient = added(self._activations.swap(partial.split(widths, dim=1), shapes))
        self._calls = []
        return partial

    def _call(self, number: int, layer: Layer, inputs: Tensor) -> _Call:
        place = self._places[number][self._activations.rank]
        linear = layer.linear
        leaf = inputs.detach().requires_grad_(self._wants_inputs or number > 0)
        weight = linear.weight.detach()[place].requires_grad_(linear.weight.requires_grad)
        slices: list[tuple[Tensor, Tensor]] = [(linear.weight, weight)]
        bias = None
        if linear.bias is not None:
            bias = linear.bias.detach()[place].requires_grad_(linear.bias.requires_grad)
            slices.append((linear.bias, bias))
        with torch.enable_grad():
            outputs = layer.finish(functional.linear(leaf, weight, bias))
        return _Call(leaf, slices, outputs)

    def _widths(self, number: int) -> list[int]:
        return [place.stop - place.start for place in self._places[number]]


def neurons(count: int, workers: int) -> list[slice]:
    """Cuts so many neurons into neighbouring slices whose lengths differ by at most one; one a worker, maybe empty."""
    return [slice(count * worker // workers, count * (worker + 1) // workers) for worker in range(workers)]


def added(parts: Sequence[Tensor]) -> Tensor:
    """Adds tensors of one shape up, in their order."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _backward(call: _Call, gradient: Tensor, place: slice) -> Tensor | None:
    """Adds to the gradients of a slice's parameters; gives that of the inputs, if they want one."""
    trained = [(parameter, leaf) for parameter, leaf in call.slices if leaf.requires_grad]
    leaves = [leaf for _, leaf in trained] + ([call.inputs] if call.inputs.requires_grad else [])
    if not leaves:
        return None
    found = torch.autograd.grad(call.outputs, leaves, gradient)
    for (parameter, _), slice_gradient in zip(trained, found, strict=False):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad[place] += slice_gradient
    return found[-1] if call.inputs.requires_grad else None
