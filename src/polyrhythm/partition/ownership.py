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
from torch import Tensor, nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.partition.activations import neurons
from polyrhythm.partition.branches import Branches, parts_of
from polyrhythm.partition.cut import Cut
from polyrhythm.partition.divided_trunk import DividedTrunk, Trunk, cut_rows
from polyrhythm.partition.held_rows import HeldRows
from polyrhythm.partition.hybrid_pass import DryRunPass, HeadSizes, HybridPass, Pass, Scheme
from polyrhythm.training.flat_parameters import FlatParameters, View
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.training.stage_parameters import StageParameters, hold


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

    def views(self, flat: FlatParameters, worker: int) -> list[View]:
        """Return what a worker trains of each parameter, the shared ones included, as views of the same parameters."""
        pieces = [*self.shared, *self._pieces[worker]]
        found = []
        for view in flat.views:
            for piece in pieces:
                start, stop = max(view.start, piece.start), min(view.stop, piece.stop)
                if start < stop:
                    found.append(replace(view, start=start, stop=stop))
        return found


@dataclass(frozen=True)
class Division:
    """Division of a network among workers, on one of them.

    Attributes:
        ownership: numbers that each worker trains.
        own: parameters of this worker: those that all train, and its pieces.
        passes: function of the workers and the scheme that returns one worker's passes.
    """

    ownership: Ownership
    own: StageParameters
    passes: Callable[[Communicator, Scheme], Pass]


def division(
    model: nn.Module, flat: FlatParameters, image: Tensor, how: Trunk | None, workers: int, rank: int
) -> Division:
    """Return the division of a network that is computed.

    Args:
        model: network; on the meta device, what this worker computes with gets memory, in place.
        flat: parameters of the network.
        image: zeros in the shape of an input image, (1, C, H, W), on the device of the computation.
        how: division of the layers before the head; not by channels on the meta device.
        workers: workers that share the head.
        rank: rank of this worker.

    Raises:
        RequestError: the network cannot be divided so.
    """
    hollow = flat.vector.is_meta
    parts = parts_of(model, torch.empty_like(image, device="meta") if hollow else image)
    divided = None if hollow else divided_trunk(parts, image, how, workers)
    ownership = Ownership.of(flat, parts, workers, divided)
    if workers == 1:
        own = StageParameters(flat, [flat.views])
        return Division(ownership, own, lambda group, scheme: HybridPass(parts, group, scheme))
    owned = [ownership.views(flat, worker) for worker in range(workers)]
    apart = {id(view.parameter): view for view in flat.views}  # divided, or of other workers alone
    for view in owned[rank]:
        if view.stop - view.start == view.parameter.numel():
            del apart[id(view.parameter)]
    held: dict[int, nn.Parameter] = {}
    if hollow:
        used = [parameter for parameter in model.parameters() if id(parameter) not in apart]
        held = hold(model, used, image.device)
        divided = divided_trunk(parts, image, how, workers)
    rows: dict[int, nn.Parameter] = {}
    for parameter in (view.parameter for view in apart.values()):
        none = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=image.device)
        rows[id(parameter)] = nn.Parameter(none, requires_grad=parameter.requires_grad)
    mine = []
    for view in owned[rank]:
        parameter = view.parameter
        if id(parameter) not in apart:
            mine.append(replace(view, parameter=held.get(id(parameter), parameter)))
            continue
        width = parameter.numel() // len(parameter)
        first = apart[id(parameter)].start
        part = parameter.detach()[(view.start - first) // width : (view.stop - first) // width]
        if hollow:
            part = torch.empty_like(part, device=image.device)
        rows[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        mine.append(replace(view, parameter=rows[id(parameter)]))
    owned[rank] = mine
    own = StageParameters(
        flat, owned, rank, image.device, gradients=False
    )  # worker 0 has the whole network now
    of_worker = HeldRows(own.flat.vector[:0], rows)
    return Division(
        ownership, own, lambda group, scheme: HybridPass(parts, group, scheme, divided, of_worker)
    )


def dry_division(flat: FlatParameters, sizes: ModelSizes, workers: int, rank: int) -> Division:
    """Return the division of a network that only its messages are known of.

    Args:
        flat: proxy of its parameters.
        sizes: sizes of the network; without a head nothing is shared.
        workers: workers that share the head.
        rank: rank of this worker.
    """
    features, *widths = sizes.head or (0,)
    ownership = Ownership.of_sizes(flat, sizes, workers)
    trains = bool(ownership.shared) or bool(sizes.owned)
    head_sizes = HeadSizes(
        features,
        tuple(widths),
        trains,
        flat.vector[:0],
        flat.stands_for,
        sizes.exchanges if workers > 1 else (),
    )
    pieces = [[*ownership.shared, *ownership.pieces(worker)] for worker in range(workers)]
    own = StageParameters.in_place(flat, pieces, rank)
    return Division(ownership, own, lambda group, scheme: DryRunPass(head_sizes, group, scheme))


def divided_trunk(
    parts: Cut | Branches, image: Tensor, how: Trunk | None, workers: int
) -> DividedTrunk | None:
    """Return how the layers before the head are cut; None where every worker has them all.

    Raises:
        RequestError: the layers cannot be cut in this way.
    """
    if how in (None, "copied") or workers == 1:
        return None
    if isinstance(parts, Branches):
        raise RequestError(f"hybrid shares out a treenet by its branches alone: leave trunk={how} out")
    return DividedTrunk(parts, image, how, workers)


def sizes_of_cut(
    sizes: ModelSizes, flat: FlatParameters, parts: Cut, image: Tensor, how: Trunk | None, workers: int
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
