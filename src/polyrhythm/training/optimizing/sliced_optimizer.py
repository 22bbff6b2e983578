"""An optimiser that updates one slice of a vector at a time, and is saved as if it updated the whole.

vector     [      slice 2      |   slice 1   | slice 0 ]      each has an optimiser of its own
saved      [                 one                       ]      so a resumed run may cut differently
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.training.optimizing.flat_optimizer import FlatOptimizer
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan

_Group = dict[str, Any]


class SlicedOptimizer:
    """The optimiser of a plan, slice by slice.

    Args:
        plan: what to run.
        vector: `(n,)`; changed in place.
        slices: disjoint, and together all of the vector. Each has to be updated equally often.

    Attributes:
        parts: the optimisers of the slices, in the same order.
    """

    def __init__(self, plan: OptimizerPlan, vector: Tensor, slices: Sequence[slice]) -> None:
        self.parts: list[FlatOptimizer] = [
            plan.part(place.start, place.stop).build(vector[place]) for place in slices
        ]
        self._order = sorted(range(len(slices)), key=lambda number: slices[number].start)
        self._whole = plan.build(vector)  # never steps

    def step(self, number: int, gradient: Tensor, learning_rate: float) -> None:
        """Updates a slice.

        Args:
            number: of the slice.
            gradient: of the slice's shape, not changed.
            learning_rate: as for `FlatOptimizer.step`.
        """
        self.parts[number].step(gradient, learning_rate)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gives what the optimiser of the whole vector would give."""
        for whole, parts in self._pairs():
            states = [optimizer.state.get(parameter, {}) for optimizer, _, parameter in parts]
            optimizer, group, parameter = whole
            group.update({key: value for key, value in parts[0][1].items() if key != "params"})
            if states[0]:
                optimizer.state[parameter] = {
                    key: torch.cat([state[key] for state in states])
                    if _is_sliced(value, parts[0][2])
                    else value
                    for key, value in states[0].items()
                }
        saved = self._whole.state()
        self._forget_whole()
        return saved

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes back what `state` gave, however it was cut then."""
        self._whole.load_state(tensors, facts)
        for (optimizer, group, parameter), parts in self._pairs():
            state, start = optimizer.state.get(parameter, {}), 0
            for inner, inner_group, piece in parts:
                inner_group.update({key: value for key, value in group.items() if key != "params"})
                place = slice(start, start + piece.numel())
                inner.state[piece] = {
                    key: value[place].clone() if _is_sliced(value, parameter) else _copied(value)
                    for key, value in state.items()
                }
                start = place.stop
        self._forget_whole()

    def pieces(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gives the state slice by slice, as it must be told where some have been updated once more than others."""
        states = [part.state() for part in self.parts]
        tensors = {
            f"{number}.{name}": value
            for number, (named, _) in enumerate(states)
            for name, value in named.items()
        }
        return tensors, {"slices": [facts for _, facts in states]}

    def load_pieces(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes back what `pieces` gave, of the same slices."""
        for number, part in enumerate(self.parts):
            prefix = f"{number}."
            named = {
                name.removeprefix(prefix): value.clone()
                for name, value in tensors.items()
                if name.startswith(prefix)
            }
            part.load_state(named, facts["slices"][number])

    def _forget_whole(self) -> None:
        if self._whole.inner is not None:
            self._whole.inner.state.clear()

    def _pairs(self) -> Iterator[tuple[_Place, list[_Place]]]:
        """Gives each parameter of the whole, with those of the parts that lie in it, in their order."""
        pieces = [place for number in self._order for place in _places(self.parts[number].inner)]
        following = iter(pieces)
        for whole in _places(self._whole.inner):
            inside: list[_Place] = []
            while sum(piece.numel() for *_, piece in inside) < whole[2].numel():
                inside.append(next(following))
            yield whole, inside


_Place = tuple[torch.optim.Optimizer, _Group, nn.Parameter]


def _places(optimizer: torch.optim.Optimizer | None) -> Iterator[_Place]:
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            yield optimizer, group, parameter  # type: ignore[misc]


def _is_sliced(value: Any, parameter: Tensor) -> bool:
    """Whether a part of the state has a number for each number of its parameter; counters have not."""
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
