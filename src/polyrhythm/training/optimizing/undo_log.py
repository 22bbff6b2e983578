"""What an optimiser's step is about to change, so that the step can be taken back to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyrhythm.training.optimizing.flat_optimizer import FlatOptimizer

_State = dict[str, Any]


class UndoLog:
    """Copies of a vector, and of what its optimiser keeps, in memory that is made once.

    Args:
        vector: `(n,)`, which the optimiser changes.
        optimizer: of this vector.
    """

    def __init__(self, vector: Tensor, optimizer: FlatOptimizer) -> None:
        self._vector = vector
        self._optimizer = optimizer.inner
        self._before = torch.empty_like(vector)
        self._states: list[_State] = []

    def note(self) -> None:
        """Copies what there is now; called before a step."""
        if self._optimizer is None:  # nothing of the vector is trained
            return
        self._before.copy_(self._vector)
        now = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters()]
        memory = self._states or [{} for _ in now]
        self._states = [_copied(state, old) for state, old in zip(now, memory, strict=True)]

    def take_back(self) -> None:
        """Makes all that has been noted as it was then."""
        if self._optimizer is None:
            return
        self._vector.copy_(self._before)
        states = {
            parameter: state
            for parameter, state in zip(self._parameters(), self._states, strict=True)
            if state  # else there was none before the first step
        }
        self._optimizer.state.clear()
        self._optimizer.state.update(states)
        self._states = []  # these copies are the optimiser's own now

    def _parameters(self) -> list[Tensor]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [parameter for group in groups for parameter in group["params"]]


def _copied(state: _State, memory: _State) -> _State:
    return {
        key: _copy(value, memory.get(key)) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def _copy(value: Tensor, memory: Tensor | None) -> Tensor:
    return value.clone() if memory is None else memory.copy_(value)
