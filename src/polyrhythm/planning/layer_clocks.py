"""What every layer takes of a step, from hooks on a model that trains as it always does."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """A layer's share of a step.

    Attributes:
        name: of the module.
        kind: its class.
        parameters: how many numbers it trains.
        forward_s: median seconds of its forward pass, or of all of them if it is used several times.
        backward_s: median seconds from the moment at which the gradients of the layers behind it were final to the
            moment at which its own are. So a layer without parameters counts with the one before it; its own is 0.
    """

    name: str
    kind: str
    parameters: int
    forward_s: float
    backward_s: float


class LayerClocks:
    """Takes the time of a model's layers, step by step.

    Args:
        model: gets hooks, on all modules without children and on all parameters.
        now: gives seconds.
    """

    def __init__(self, model: nn.Module, now: Callable[[], float]) -> None:
        self._now = now
        self._forward_end = 0.0
        self._begun: dict[str, float] = {}
        self._forward: dict[str, float] = {}
        self._ready: dict[str, float] = {}
        self._forwards: dict[str, list[float]] = defaultdict(list)
        self._backwards: dict[str, list[float]] = defaultdict(list)
        self._layers = {
            name: module for name, module in model.named_modules() if next(module.children(), None) is None
        }
        for name, module in self._layers.items():
            self._hook(name, module)
        model.register_forward_hook(self._end_forward)

    def end_step(self) -> float:
        """Adds a step to the samples; gives the time at which its forward pass ended."""
        for name, seconds in self._forward.items():
            self._forwards[name].append(seconds)
        before = self._forward_end
        for name, at in sorted(self._ready.items(), key=lambda entry: entry[1]):
            self._backwards[name].append(at - before)
            before = at
        self._forward, self._ready = {}, {}
        return self._forward_end

    def read(self, skip: int) -> tuple[Layer, ...]:
        """Gives what every layer took, in the order of the model.

        Args:
            skip: so many steps at the beginning do not count.
        """
        return tuple(
            Layer(
                name,
                type(module).__name__,
                sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad),
                statistics.median(self._forwards[name][skip:] or [0.0]),
                statistics.median(self._backwards[name][skip:] or [0.0]),
            )
            for name, module in self._layers.items()
        )

    def _hook(self, name: str, module: nn.Module) -> None:
        def begin(_module: nn.Module, _inputs: object) -> None:
            self._begun[name] = self._now()

        def end(_module: nn.Module, _inputs: object, _output: object) -> None:
            self._forward[name] = self._forward.get(name, 0.0) + self._now() - self._begun[name]

        def ready(_: Tensor) -> None:
            self._ready[name] = self._now()  # of several parameters, the last

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(ready)

    def _end_forward(self, _model: nn.Module, _inputs: object, _output: object) -> None:
        self._forward_end = self._now()
