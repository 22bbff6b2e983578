"""The parameters of one stage of a network, as a flat vector of their own next to the whole network's.

    whole    [ conv1 | conv2 | conv3 | … | head ]      on rank 0, and there only between epochs; else no memory
    stage            [ conv2 | conv3 ]                 trained here: parameters, gradients, optimizer

Layers of a stage need not lie side by side in the whole vector: a stage has pieces of it, in the order of the vector.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from polyrhythm.training.flat_optimizer import ELEMENTWISE, Packed, Span, joined
from polyrhythm.training.flat_parameters import TAIL, FlatParameters, View
from polyrhythm.training.memory import return_freed
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizer_state import recut_optimizer


class WeightVersions:
    """Versions of a vector of parameters: the newest, and copies of those that something is still computed with.

    A pass goes forward and backward on the same memory: autograd keeps views of weights, which an update of the newest
    version would change under it.

    Args:
        flat: the parameters.

    Attributes:
        newest: number of the newest one: the number of updates.
        most: largest number of copies at once.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._kept: dict[int, Tensor] = {}
        self.newest = 0
        self.most = 0

    @contextmanager
    def at(self, version: int, *, updated_before_backward: bool) -> Iterator[None]:
        """Let the model compute with a version of its parameters, in a `with`.

        Args:
            version: number of the version; of an older one there is a copy.
            updated_before_backward: whether the newest may be updated between a pass and its backward pass.
        """
        if version == self.newest and not (updated_before_backward or version in self._kept):
            yield
            return
        if version == self.newest:
            self.keep()
        self._show(self._kept[version])
        try:
            yield
        finally:
            self._show(self._flat.vector)

    def keep(self) -> None:
        """Copy the newest version, which will still be needed when it has been updated."""
        if self.newest not in self._kept:
            self._kept[self.newest] = self._flat.vector.clone()
            self.most = max(self.most, len(self._kept))

    def updated(self, oldest: int) -> None:
        """Note that there is a new version, and forget those before the oldest that is needed."""
        self.newest += 1
        for version in [version for version in self._kept if version < oldest]:
            del self._kept[version]

    def clear(self) -> None:
        """Begin to count again."""
        self._kept.clear()
        self.newest = 0

    def _show(self, vector: Tensor) -> None:
        for view in self._flat.views:
            view.parameter.data = vector[view.start : view.stop].view(view.parameter.shape)


def hold(
    model: nn.Module, parameters: Collection[nn.Parameter], device: torch.device
) -> dict[int, nn.Parameter]:
    """Give buffers, and some parameters, of a network of shapes memory, of any content; in place.

    Args:
        model: model on the meta device.
        parameters: parameters to allocate.
        device: device of the memory.

    Returns:
        What has taken the place of each of these, by its `id`.
    """
    made = {
        id(each): nn.Parameter(torch.empty_like(each, device=device), requires_grad=each.requires_grad)
        for each in parameters
    }
    buffers: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = torch.zeros_like(buffer, device=device)
                module._buffers[name] = buffers[id(buffer)]
    return made


class StageParameters:
    """Parameters of a network that one worker trains.

    Args:
        whole: the network's parameters; those of this worker's stage move to memory of their own.
        owned: parameters of each rank of the pipeline in the whole vector.
        rank: rank of this worker.
        device: device of the stage.
        gradients: whether its gradients get memory now; else by `allocate_gradients`.

    Attributes:
        flat: the stage's; the whole network's, where there is one rank.
        pieces: pieces of each rank, the slices of the whole vector that are its own, in order.
    """

    def __init__(
        self,
        whole: FlatParameters,
        owned: Sequence[Sequence[View]],
        rank: int = 0,
        device: torch.device | None = None,
        *,
        gradients: bool = True,
    ) -> None:
        self._whole = whole
        self._released, self._frees = False, len(owned) > 1
        self.flat = whole
        self.pieces = [_slices(views) for views in owned]
        self._own = self.pieces[rank]
        if len(owned) > 1:
            views = sorted(owned[rank], key=lambda view: view.start)
            like = torch.empty(1, dtype=whole.vector.dtype, device=device or whole.vector.device)
            held = _held([view.parameter for view in views], like)
            self.flat = FlatParameters(held, elsewhere=not gradients)

    @classmethod
    def of_sizes(cls, whole: FlatParameters, numbers: Sequence[int], rank: int) -> StageParameters:
        """Return those of a dry run, with proxy numbers.

        Args:
            whole: proxy of the network.
            numbers: number of values of each rank's stages, represented by `whole`.
            rank: rank of this worker.
        """
        made = cls(whole, [whole.views])
        if len(numbers) > 1:
            ends = [round(end / whole.stands_for) for end in accumulate(numbers)]
            ends[-1] = whole.size
            made.pieces = [[slice(*place)] if place[0] < place[1] else [] for place in pairwise([0, *ends])]
            made._own = made.pieces[rank]
            size = sum(piece.stop - piece.start for piece in made._own)
            parameters = [nn.Parameter(whole.vector.new_zeros(size))] if size else []
            held = _held(parameters, whole.vector)
            made.flat = type(whole)(held, bucket_bytes=0, stands_for=whole.stands_for)
        return made

    @classmethod
    def in_place(cls, whole: FlatParameters, pieces: Sequence[Sequence[slice]], rank: int) -> StageParameters:
        """Return those of a worker that holds the whole vector and trains its pieces in it, as in a dry run.

        Args:
            whole: the network's parameters.
            pieces: pieces of each rank.
            rank: rank of this worker.
        """
        made = cls(whole, [whole.views])
        made.pieces = [_joined(each) for each in pieces]
        made._own = made.pieces[rank]
        return made

    def place_of(self, piece: slice) -> slice:
        """Return the place in the stage's vector of a slice of the whole one that lies in one of the own pieces."""
        if self.flat is self._whole:
            return piece
        for own, place in self._places():
            if own.start <= piece.start and piece.stop <= own.stop:
                offset = place.start - own.start
                return slice(piece.start + offset, piece.stop + offset)
        raise ValueError(f"elements {piece.start} to {piece.stop} are not of this rank")

    def release(self) -> None:
        """Free the whole network's memory, which is unused while stages train."""
        if self._frees and not self._released:
            self._whole.release()
            self._released = True

    def allocate(self) -> None:
        """Get it back, with the stage's part in it."""
        if self._released:
            return_freed()  # memory of activations
            self._whole.allocate()
            self._released = False
        if self.flat is not self._whole:
            for piece, place in self._places():
                self._whole.vector[piece].copy_(self.flat.vector[place])

    def allocate_gradients(self) -> None:
        """Get memory for the stage's gradients, zero, if there is none yet."""
        if not len(self.flat.gradients):
            self.flat.renew_gradients(self.flat.vector.new_zeros(self.flat.size + TAIL))

    def suspend(self) -> None:
        """Free the stage's own memory, with gradients of zero, while the whole network has its parameters."""
        if self.flat is not self._whole:
            for view, place in self._places_of_views():
                view.parameter.data = self._whole.vector[place].view(view.parameter.shape)
            for memory in (self.flat.vector_and_tail, self.flat.gradients_and_tail):
                memory.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Get it back, with the parameters of the whole network and gradients of zero."""
        if self.flat is not self._whole:
            for memory in (self.flat.vector_and_tail, self.flat.gradients_and_tail):
                memory.untyped_storage().resize_(memory.nbytes)
                memory.zero_()
            self.take()
            for view, _ in self._places_of_views():
                own = self.flat.vector[view.start : view.stop]
                view.parameter.data = own.view(view.parameter.shape)

    def of_rank(self, rank: int) -> list[Tensor]:
        """Return the pieces of the whole vector that are of a rank's stages."""
        return [self._whole.vector[piece] for piece in self.pieces[rank]]

    def own(self) -> list[Tensor]:
        """Return the same pieces of this worker's stages, as they are trained."""
        if self.flat is self._whole:
            return [self._whole.vector[piece] for piece in self._own]
        return [self.flat.vector[place] for _, place in self._places()]

    def take(self) -> None:
        """Overwrite the stage's parameters with those in the whole vector."""
        if self.flat is not self._whole:
            for piece, place in self._places():
                self.flat.vector[place].copy_(self._whole.vector[piece])

    def plan(self, plan: OptimizerPlan) -> OptimizerPlan:
        """Return the plan of the stage's vector, from that of the whole one."""
        return plan if self.flat is self._whole else stage_plan(plan, self._own)

    def recut(self, states: Sequence[tuple[list[slice], Packed]], plan: OptimizerPlan) -> Packed:
        """Return the state of the stage's optimizer, from those of other stages.

        Args:
            states: states of each of these, its pieces of the whole vector and its packed state; together
                they are all of it.
            plan: plan of the whole vector.
        """
        before: list[slice] = []
        packed: list[Packed] = []
        for pieces, state in states:
            its_plan, size = stage_plan(plan, pieces), sum(each.stop - each.start for each in pieces)
            for piece, place in _paired(pieces):
                before.append(piece)
                packed.append(recut_optimizer([state], its_plan, [slice(0, size)], place))
        order = sorted(range(len(before)), key=lambda number: before[number].start)
        before, packed = [before[number] for number in order], [packed[number] for number in order]
        places = [place for _, place in _paired(self._own)]
        own = [recut_optimizer(packed, plan, before, piece) for piece in self._own]
        trained = [(place, state) for place, state in zip(places, own, strict=True) if state[1]]
        if not trained:
            return {}, {}
        size = places[-1].stop
        return recut_optimizer(
            [state for _, state in trained],
            stage_plan(plan, self._own),
            [place for place, _ in trained],
            slice(0, size),
        )

    def _places_of_views(self) -> Iterator[tuple[View, slice]]:
        """Yield the stage's views, each with its place in the whole vector."""
        for piece, place in self._places():
            for view in self.flat.views:
                if place.start <= view.start and view.stop <= place.stop:
                    offset = piece.start - place.start
                    yield view, slice(view.start + offset, view.stop + offset)

    def _places(self) -> list[tuple[slice, slice]]:
        return _paired(self._own)


def stage_plan(plan: OptimizerPlan, pieces: Sequence[slice]) -> OptimizerPlan:
    """Return the plan of a vector made of pieces of a plan's."""
    spans = [
        Span(place.start + span.start, place.start + span.stop, span.options)
        for piece, place in _paired(pieces)
        for span in plan.part(piece.start, piece.stop).spans
    ]
    found = joined(tuple(spans)) if plan.kind in ELEMENTWISE and spans else tuple(spans)
    return replace(plan, spans=found, own=None)


def _held(parameters: Sequence[nn.Parameter], like: Tensor) -> nn.Module:
    """Return a module of parameters; of one number that nothing depends on, where there are none."""
    return nn.ParameterList(parameters or [nn.Parameter(torch.zeros_like(like[:1]))])


def _slices(views: Sequence[View]) -> list[slice]:
    """Return the pieces of the vector that these parameters are, neighbors together."""
    return _joined([slice(view.start, view.stop) for view in views])


def _joined(pieces: Sequence[slice]) -> list[slice]:
    """Return pieces in their order, neighbors together."""
    found: list[slice] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if found and found[-1].stop == piece.start:
            found[-1] = slice(found[-1].start, piece.stop)
        else:
            found.append(piece)
    return found


def _paired(pieces: Sequence[slice]) -> list[tuple[slice, slice]]:
    """Return each piece with its place in the vector that they make together."""
    ends = [0, *accumulate(piece.stop - piece.start for piece in pieces)]
    return [(piece, slice(*place)) for piece, place in zip(pieces, pairwise(ends), strict=True)]
