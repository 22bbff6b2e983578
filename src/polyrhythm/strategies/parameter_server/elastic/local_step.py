"""A worker's own step between two exchanges: the optimiser's, or one with Nesterov's momentum around it.

The flat vector holds the point at which the next gradient is computed. With momentum that is ahead of the worker's
parameters, which are therefore kept apart.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from polyrhythm.strategies.state import State
from polyrhythm.training.optimizing.flat_optimizer import FlatOptimizer
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan

_OPTIMIZER = "optimizer."


class LocalStep(Protocol):
    """How a worker steps on its own.

    Attributes:
        own: `(size,)`, the worker's parameters, which pull and are pulled.
    """

    own: Tensor

    def begin_from(self, parameters: Tensor) -> None:
        """Takes over parameters, `(size,)`, without any momentum."""

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        """Steps from `own`, with a gradient computed at the flat vector as it was; leaves the vector ahead."""

    def look_ahead(self) -> None:
        """Lets the flat vector hold the point at which the next gradient is to be computed."""

    def rest(self) -> None:
        """Lets the flat vector hold the worker's parameters."""

    def state(self) -> State:
        """Gives all that a resumed worker needs, its parameters included."""

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""


class PlainStep:
    """The optimiser's own step, on the flat vector.

    Args:
        vector: `(size,)`, the flat parameters.
        plan: of the optimiser.
    """

    def __init__(self, vector: Tensor, plan: OptimizerPlan) -> None:
        self.own = vector
        self._plan = plan
        self._optimizer = plan.build(vector)

    def begin_from(self, parameters: Tensor) -> None:
        """Takes over parameters."""
        self.own.copy_(parameters)
        self._optimizer = self._plan.build(self.own)

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        """Steps."""
        self._optimizer.step(gradient, learning_rate)

    def look_ahead(self) -> None:
        """Nothing is ahead."""

    def rest(self) -> None:
        """The vector always holds them."""

    def state(self) -> State:
        """Gives parameters and optimiser."""
        return _state_of(self._optimizer, {"own": self.own})

    def load_state(self, state: State) -> None:
        """Takes them back."""
        self.own.copy_(state[0]["own"])
        _restore(self._optimizer, state)


class NesterovStep:
    """The optimiser's step from a point ahead; for SGD, `v' = delta v - lr g(x + delta v)` and `x' = x + v'`.

    Args:
        vector: `(size,)`, the flat parameters.
        plan: of the optimiser, without a momentum of its own.
        delta: share of the velocity that is kept.
    """

    def __init__(self, vector: Tensor, plan: OptimizerPlan, delta: float) -> None:
        self.own = vector.clone()
        self._velocity = torch.zeros_like(vector)
        self._vector = vector
        self._plan = plan
        self._optimizer = plan.build(vector)
        self._delta = delta

    def begin_from(self, parameters: Tensor) -> None:
        """Takes over parameters, at rest."""
        self.own.copy_(parameters)
        self._velocity.zero_()
        self._optimizer = self._plan.build(self._vector)
        self.look_ahead()

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        """Steps; the velocity is what came of it."""
        self.look_ahead()  # the centre has pulled since
        self._optimizer.step(gradient, learning_rate)
        torch.sub(self._vector, self.own, out=self._velocity)
        self.own.copy_(self._vector)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Goes ahead by the velocity."""
        torch.add(self.own, self._velocity, alpha=self._delta, out=self._vector)

    def rest(self) -> None:
        """Comes back."""
        self._vector.copy_(self.own)

    def state(self) -> State:
        """Gives parameters, velocity and optimiser."""
        return _state_of(self._optimizer, {"own": self.own, "velocity": self._velocity})

    def load_state(self, state: State) -> None:
        """Takes them back."""
        self.own.copy_(state[0]["own"])
        self._velocity.copy_(state[0]["velocity"])
        _restore(self._optimizer, state)
        self.look_ahead()


def _state_of(optimizer: FlatOptimizer, own: dict[str, Tensor]) -> State:
    tensors, facts = optimizer.state()
    return own | {_OPTIMIZER + name: tensor for name, tensor in tensors.items()}, {"optimizer": facts}


def _restore(optimizer: FlatOptimizer, state: State) -> None:
    tensors, facts = state
    named = {
        name.removeprefix(_OPTIMIZER): tensor
        for name, tensor in tensors.items()
        if name.startswith(_OPTIMIZER)
    }
    optimizer.load_state(named, facts["optimizer"])
