"""Which elements of a flat vector each worker trains, if its last layers are distributed.

    vector     [ trunk, shared by all | W of layer 1: rows of 0 | rows of 1 | … | b: 0 | 1 | … | W of layer 2 … ]

Rows of a weight are adjacent in the vector, so a worker's slice of a layer is one piece of it for the weight and one
for the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.partition.cut import Cut
from polyrhythm.partition.hybrid_pass import (
    Activations,
    DryRunPass,
    HeadSizes,
    HybridPass,
    Pass,
    Scheme,
    neurons,
)
from polyrhythm.training.flat_parameters import FlatParameters


class Ownership:
    """The pieces of every worker.

    Args:
        vector: the network's parameters.
        tensors: weights and biases of the head, as (start, stop, rows), in order.
        workers: number of workers that share the head.

    Attributes:
        trunk: the elements that all workers train alike.

    Raises:
        RequestError: elements of the trunk lie between or behind them.
    """

    def __init__(self, vector: Tensor, tensors: Sequence[tuple[int, int, int]], workers: int) -> None:
        end = min((start for start, _, _ in tensors), default=len(vector))
        if sum(stop - start for start, stop, _ in tensors) != len(vector) - end:
            raise RequestError("the fully connected layers must be the last that the network defines")
        self._vector = vector
        self.trunk = slice(0, end)
        self._pieces = [
            [piece for tensor in tensors if (piece := _rows(*tensor, workers, worker))]
            for worker in range(workers)
        ]

    @classmethod
    def of(cls, flat: FlatParameters, parts: Cut, workers: int) -> Ownership:
        """Return the ownership for a network that has been divided."""
        views = {id(view.parameter): view for view in flat.views}
        parameters = [each for layer in parts.layers for each in layer.linear.parameters()]
        found = [views[id(each)] for each in parameters if id(each) in views]
        return cls(flat.vector, [(view.start, view.stop, len(view.parameter)) for view in found], workers)

    @classmethod
    def of_sizes(cls, flat: FlatParameters, features: int, widths: Sequence[int], workers: int) -> Ownership:
        """Return the ownership for layers at the end of a vector; in proportion if elements stand for several."""
        sizes = list(zip((features, *widths), widths, strict=False))
        numbers = sum(inputs * outputs + outputs for inputs, outputs in sizes)
        start = max(0, flat.size - round(numbers / flat.stands_for))
        if flat.stands_for != 1:
            return cls(
                flat.vector, [(start, flat.size, flat.size - start)] if start < flat.size else [], workers
            )
        tensors = []
        for inputs, outputs in sizes:
            tensors += [(start, start + inputs * outputs, outputs)]
            start += inputs * outputs
            tensors += [(start, start + outputs, outputs)]
            start += outputs
        return cls(flat.vector, tensors, workers)

    def pieces(self, worker: int) -> list[slice]:
        """Return the pieces of the head that a worker trains, in order."""
        return self._pieces[worker]

    def gather(self, activations: Activations) -> None:
        """Complete the vector on all workers, who must all call it, in place.

        Args:
            activations: exchange with the others.
        """
        own = self._joined(activations.rank).reshape(1, -1)
        shapes = [(1, sum(piece.stop - piece.start for piece in pieces)) for pieces in self._pieces]
        taken = activations.swap([own] * activations.size, shapes)
        for worker, numbers in enumerate(taken):
            start = 0
            for piece in self._pieces[worker] if worker != activations.rank else []:
                stop = start + piece.stop - piece.start
                self._vector[piece].copy_(numbers[0, start:stop])
                start = stop

    def _joined(self, worker: int) -> Tensor:
        pieces = [self._vector[piece] for piece in self._pieces[worker]]
        return torch.cat(pieces) if pieces else self._vector[:0]


@dataclass(frozen=True)
class Division:
    """How a network is divided among workers.

    Attributes:
        ownership: which numbers each of them trains.
        passes: returns what computes one worker's passes, given the workers and the scheme.
    """

    ownership: Ownership
    passes: Callable[[Communicator, Scheme], Pass]


def division(flat: FlatParameters, parts: Cut, workers: int) -> Division:
    """Return the division of a network that is computed.

    Args:
        flat: its parameters.
        parts: of the network.
        workers: that share the head.

    Raises:
        RequestError: elements of the trunk lie between or behind those of the head.
    """
    return Division(
        Ownership.of(flat, parts, workers), lambda group, scheme: HybridPass(parts, group, scheme).run
    )


def dry_division(flat: FlatParameters, head: Sequence[int], workers: int) -> Division:
    """Return the division of a network that only its messages are known of.

    Args:
        flat: stands for its parameters.
        head: features that go into the head, and the neurons of each of its layers; empty: there is none.
        workers: that share the head.
    """
    features, *widths = head or (0,)
    ownership = Ownership.of_sizes(flat, features, widths, workers)
    trains = ownership.trunk.stop > 0
    sizes = HeadSizes(features, tuple(widths), trains, flat.vector[:0], flat.stands_for)
    return Division(ownership, lambda group, scheme: DryRunPass(sizes, group, scheme).run)


def _rows(start: int, stop: int, rows: int, workers: int, worker: int) -> slice | None:
    """Return a worker's rows of a weight or bias as a piece of the vector; None if it has none."""
    width = (stop - start) // rows
    place = neurons(rows, workers)[worker]
    if place.start == place.stop:
        return None
    return slice(start + place.start * width, start + place.stop * width)
