"""What is made of a worker's gradients before its own optimiser sees them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from polyrhythm.strategies.state import State
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.natural_gradient import Fisher, natural_gradient


class Preconditioner(Protocol):
    """A rule that changes gradients in place, and remembers something of them."""

    def apply(self) -> None:
        """Changes the flat gradients."""

    def state(self) -> State:
        """Gives all that a resumed rule needs."""

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""


class NaturalGradients:
    """Turns every layer's gradient into its natural gradient; biases and the like stay as they are.

    Args:
        flat: whose gradients.
        fisher: how Fisher matrices are estimated.
    """

    def __init__(self, flat: FlatParameters, fisher: Fisher) -> None:
        self._flat = flat
        self._fisher = fisher
        self._layers: dict[str, dict[str, Any]] = {view.name: {} for view in flat.views}

    def apply(self) -> None:
        """Changes the flat gradients."""
        for view in self._flat.views:
            shape = view.parameter.shape
            rows = shape[0] if len(shape) > 1 else 0
            gradient = self._flat.gradients[view.start : view.stop]
            natural = natural_gradient(gradient, rows, self._layers[view.name], self._fisher)
            if natural is not gradient:
                gradient.copy_(natural)

    def state(self) -> State:
        """Gives the estimates."""
        tensors = {
            f"{layer}/{name}": value
            for layer, state in self._layers.items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        return tensors, {layer: state["steps"] for layer, state in self._layers.items() if state}

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        tensors, steps = state
        self._layers = {view.name: {} for view in self._flat.views}
        for layer, count in steps.items():
            self._layers[layer]["steps"] = count
        for name, value in tensors.items():
            layer, _, key = name.rpartition("/")
            self._layers[layer][key] = value.detach().to(self._flat.vector.device, copy=True)
