"""Which numbers of a flat vector each worker trains, where its last layers are cut.

    vector     [ trunk, everybody's | W of layer 1: rows of 0 | rows of 1 | … | b: 0 | 1 | … | W of layer 2 … ]

Rows of a weight are neighbours in the vector, so a worker's slice of a layer is one piece of it for the weight and one
for the bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.partition.activations import Activations
from polyrhythm.partition.cut import Cut
from polyrhythm.partition.sharded_layers import neurons
from polyrhythm.training.flat_parameters import FlatParameters, View


class Ownership:
    """The pieces of every worker.

    Args:
        flat: the network's parameters.
        parts: of the network.
        workers: how many share the head.

    Attributes:
        trunk: the numbers that all workers train alike.

    Raises:
        RequestError: a layer of the head comes before one of the trunk.
    """

    def __init__(self, flat: FlatParameters, parts: Cut, workers: int) -> None:
        self._vector = flat.vector
        views = {id(view.parameter): view for view in flat.views}
        layers = [layer.linear for layer in parts.layers]
        cut = [views[id(each)] for layer in layers for each in layer.parameters() if id(each) in views]
        end = min((view.start for view in cut), default=flat.size)
        if sum(view.stop - view.start for view in cut) != flat.size - end:
            raise RequestError("the fully connected layers must be the last that the network defines")
        self.trunk = slice(0, end)
        self._pieces = [
            [piece for view in cut if (piece := _rows(view, workers, worker))] for worker in range(workers)
        ]

    def pieces(self, worker: int) -> list[slice]:
        """Gives what a worker trains of the head, in order."""
        return self._pieces[worker]

    def gather(self, activations: Activations) -> None:
        """Makes the vector whole on all workers, who must all call it.

        Args:
            activations: the way to the others.
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


def _rows(view: View, workers: int, worker: int) -> slice | None:
    """Gives a worker's rows of a weight or bias as a piece of the vector; None if it has none."""
    rows = len(view.parameter)
    width = (view.stop - view.start) // rows
    place = neurons(rows, workers)[worker]
    if place.start == place.stop:
        return None
    return slice(view.start + place.start * width, view.start + place.stop * width)
