"""Ownership: the elements of a flat vector that each worker trains, if its last layers are distributed.

    vector     [ trunk, shared by all | W of layer 1: rows of 0 | rows of 1 | … | b: 0 | 1 | … | W of layer 2 … ]

Rows of a weight are adjacent in the vector, so a worker's slice of a layer is one piece of it for the weight and one
for the bias. Convolutions that are cut by their channels are like the layers of the head. Branches of a tree, which are
alike and adjacent, are rows of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.partition.activations import Activations, neurons
from polyrhythm.partition.branches import Branches
from polyrhythm.partition.cut import Cut
from polyrhythm.partition.divided_trunk import DividedTrunk, Trunk, cut_rows
from polyrhythm.partition.hybrid_pass import DryRunPass, HeadSizes, HybridPass, Pass, Scheme
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import ModelSizes


class Ownership:
    """The pieces of every worker.

    Args:
        vector: the network's parameters.
        tensors: weights and biases of the layers that are cut, as (start, stop, rows).
        workers: number of workers that share them.

    Attributes:
        shared: the pieces that all workers train alike, in order.
    """

    def __init__(self, vector: Tensor, tensors: Sequence[tuple[int, int, int]], workers: int) -> None:
        tensors = sorted(tensors)
        self._vector = vector
        bounds = [0, *(bound for start, stop, _ in tensors for bound in (start, stop)), len(vector)]
        self.shared = [
            slice(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True) if pair[0] < pair[1]
        ]
        self._pieces = [
            [piece for tensor in tensors if (piece := _rows(*tensor, workers, worker))]
            for worker in range(workers)
        ]

    @classmethod
    def of(
        cls, flat: FlatParameters, parts: Cut | Branches, workers: int, divided: DividedTrunk | None = None
    ) -> Ownership:
        """Return the ownership for a network that has been divided.

        Raises:
            RequestError: elements of the trunk lie between or behind those of the head.
        """
        if isinstance(parts, Branches):
            return cls(flat.vector, parts.rows(flat), workers)
        views = {id(view.parameter): view for view in flat.views}
        parameters = [each for layer in parts.layers for each in layer.linear.parameters()]
        found = [views[id(each)] for each in parameters if id(each) in views]
        tensors = [(view.start, view.stop, len(view.parameter)) for view in found]
        end = min((start for start, _, _ in tensors), default=flat.size)
        if sum(stop - start for start, stop, _ in tensors) != flat.size - end:
            raise RequestError("the fully connected layers must be the last that the network defines")
        if divided is not None:
            tensors += owned_rows(flat, divided)
        return cls(flat.vector, tensors, workers)

    @classmethod
    def of_sizes(cls, flat: FlatParameters, sizes: ModelSizes, workers: int) -> Ownership:
        """Return the ownership for layers at the end of a vector; in proportion if elements stand for several."""
        features, *widths = sizes.head or (0,)
        shapes = list(zip((features, *widths), widths, strict=False))
        numbers = sum(inputs * outputs + outputs for inputs, outputs in shapes)
        if flat.stands_for != 1:
            numbers += sum(stop - start for start, stop, _ in sizes.owned)
            start = max(0, flat.size - round(numbers / flat.stands_for))
            return cls(
                flat.vector, [(start, flat.size, flat.size - start)] if start < flat.size else [], workers
            )
        tensors, start = list(sizes.owned), max(0, flat.size - numbers)
        for inputs, outputs in shapes:
            tensors += [(start, start + inputs * outputs, outputs)]
            start += inputs * outputs
            tensors += [(start, start + outputs, outputs)]
            start += outputs
        return cls(flat.vector, tensors, workers)

    def pieces(self, worker: int) -> list[slice]:
        """Return the pieces of the head that a worker trains, in order."""
        return self._pieces[worker]

    def gather(self, activations: Activations) -> None:
        """Complete the vector on all workers, which must all call it, in place.

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
    """Division of a network among workers.

    Attributes:
        ownership: numbers that each worker trains.
        passes: function of the workers and the scheme that returns one worker's passes.
    """

    ownership: Ownership
    passes: Callable[[Communicator, Scheme], Pass]


def division(
    flat: FlatParameters, parts: Cut | Branches, workers: int, divided: DividedTrunk | None = None
) -> Division:
    """Return the division of a network that is computed.

    Args:
        flat: parameters of the network.
        parts: parts of the network.
        workers: workers that share the head.
        divided: layers of the trunk that they share, too; None: every worker has them all.

    Raises:
        RequestError: elements of the trunk lie between or behind those of the head.
    """
    return Division(
        Ownership.of(flat, parts, workers, divided),
        lambda group, scheme: HybridPass(parts, group, scheme, divided),
    )


def dry_division(flat: FlatParameters, sizes: ModelSizes, workers: int) -> Division:
    """Return the division of a network that only its messages are known of.

    Args:
        flat: stands for its parameters.
        sizes: sizes of the network; without a head nothing is shared.
        workers: workers that share the head.
    """
    features, *widths = sizes.head or (0,)
    ownership = Ownership.of_sizes(flat, sizes, workers)
    trains = bool(ownership.shared) or bool(sizes.owned)
    told = HeadSizes(
        features,
        tuple(widths),
        trains,
        flat.vector[:0],
        flat.stands_for,
        sizes.exchanges if workers > 1 else (),
    )
    return Division(ownership, lambda group, scheme: DryRunPass(told, group, scheme))


def divided_trunk(parts: Cut | Branches, image: Tensor, how: Trunk, workers: int) -> DividedTrunk | None:
    """Return how the layers before the head are cut; None where every worker has them all.

    Raises:
        RequestError: the layers cannot be cut in this way.
    """
    if how == "copied" or workers == 1:
        return None
    if isinstance(parts, Branches):
        raise RequestError(f"hybrid shares out a treenet by its branches alone: leave trunk={how} out")
    return DividedTrunk(parts, image, how, workers)


def sizes_of_cut(
    sizes: ModelSizes, flat: FlatParameters, parts: Cut, image: Tensor, how: Trunk, workers: int
) -> ModelSizes:
    """Return a network's sizes with those of its parts, for a dry run.

    Args:
        sizes: sizes of the whole.
        flat: parameters of the network.
        parts: parts of the network.
        image: (1, C, H, W), like the images that it will see; on the meta device where the network is.
        how: division of the layers before the head.
        workers: workers that share it.

    Raises:
        RequestError: the layers cannot be cut in this way.
    """
    divided = divided_trunk(parts, image, how, workers)
    if divided is None:
        return replace(sizes, head=parts.sizes)
    return replace(
        sizes,
        head=parts.sizes,
        exchanges=divided.exchanges(gradients=divided.trains),
        owned=tuple(owned_rows(flat, divided)),
    )


def owned_rows(flat: FlatParameters, divided: DividedTrunk) -> list[tuple[int, int, int]]:
    """Return the parameters of the trunk with rows distributed over workers, as (start, stop, rows)."""
    views = {id(view.parameter): view for view in flat.views}
    found = {id(each): views[id(each)] for each in cut_rows(divided) if id(each) in views}
    return [(view.start, view.stop, len(view.parameter)) for view in found.values()]


def _rows(start: int, stop: int, rows: int, workers: int, worker: int) -> slice | None:
    """Return a worker's rows of a weight or bias as a piece of the vector; None if it has none."""
    width = (stop - start) // rows
    place = neurons(rows, workers)[worker]
    if place.start == place.stop:
        return None
    return slice(start + place.start * width, start + place.stop * width)
