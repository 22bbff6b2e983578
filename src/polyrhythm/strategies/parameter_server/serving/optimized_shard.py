"""A shard of the parameters with the optimiser that worker 0 has said to run on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.message import Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import (
    admitted_initial,
    admitted_plan,
)
from polyrhythm.strategies.state import State
from polyrhythm.training.optimizing.flat_optimizer import FlatOptimizer
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan

_PREFIX = "optimizer."


class OptimizedShard:
    """Values, and what changes them.

    Attributes:
        values: `(n,)`, changed in place; empty until worker 0 has sent them.
    """

    def __init__(self) -> None:
        self.values = torch.empty(0)
        self._plan: OptimizerPlan | None = None
        self._optimizer: FlatOptimizer | None = None
        self._resumed: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._copy: Tensor | None = None

    @property
    def ready(self) -> bool:
        """Whether there are parameters."""
        return self._optimizer is not None

    def configure(self, message: Message) -> None:
        """Takes the plan of the optimiser.

        Raises:
            RefusedMessage: there are parameters already, or it is no plan.
        """
        if self.ready:
            raise RefusedMessage(Reason.ORDER, "an optimiser's plan came although training has begun")
        self._plan = admitted_plan(message)

    def initialise(self, values: Tensor) -> None:
        """Takes the parameters, unless they were in a checkpoint.

        Raises:
            RefusedMessage: they come before the plan or a second time, or do not fit it.
        """
        plan = admitted_initial(self._plan, values, ready=self.ready)
        self.values = values if self._resumed is None else self._resumed[0]["values"]
        self._optimizer = plan.build(self.values)
        if self._resumed is not None:
            tensors, facts = self._resumed
            names = [name for name in tensors if name.startswith(_PREFIX)]
            named = {name.removeprefix(_PREFIX): tensors[name] for name in names}
            self._optimizer.load_state(named, facts["optimizer"])
            self._resumed = None

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Updates the values."""
        if self._optimizer is None:
            raise RefusedMessage(Reason.ORDER, "a gradient came before the parameters")
        self._copy = None
        self._optimizer.step(gradient, learning_rate)

    def change(self, how: Callable[[Tensor], None]) -> None:
        """Changes the values in place without the optimiser."""
        self._copy = None
        how(self.values)

    def shown(self) -> Tensor:
        """Gives a copy of the values, one for all who are given this version: it leaves while updates go on."""
        if self._copy is None:
            self._copy = self.values.clone()
        return self._copy

    def state(self) -> State:
        """Gives all that a resumed shard needs."""
        if self._optimizer is None:
            raise RefusedMessage(Reason.ORDER, "a server was asked for its state before it had parameters")
        tensors, facts = self._optimizer.state()
        return {"values": self.values} | {_PREFIX + name: value for name, value in tensors.items()}, {
            "optimizer": facts
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave, before `initialise`."""
        self._resumed = state
