"""An optimiser of torch on one flat vector, and its step without what torch puts around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.training.optimizing.direct_sgd import DirectSGD
from polyrhythm.training.optimizing.flatten_state import pack_optimizer_state, unpack_optimizer_state
from polyrhythm.training.optimizing.optimizer_kinds import KINDS
from polyrhythm.training.optimizing.spans import Span


class FlatOptimizer:
    """An ordinary `torch.optim` optimiser over one vector, or over a few long slices of it.

    Args:
        kind: name of its class, one of `optimizer_kinds`.
        spans: ordered, without overlap; what none covers is not trained.
        rate: learning rate of the whole vector's first span; all spans keep their ratio to it.
        vector: `(n,)`; every step changes it in place.
    """

    def __init__(self, kind: str, spans: Sequence[Span], rate: float, vector: Tensor) -> None:
        self._vector = vector
        self._slices = [slice(span.start, span.stop) for span in spans]
        groups = [
            {"params": [nn.Parameter(vector[place])], **_tuples(span.options)}
            for place, span in zip(self._slices, spans, strict=True)
        ]
        for group, place in zip(groups, self._slices, strict=True):
            group["params"][0].data = vector[place]
        self._optimizer = _made(kind, groups) if groups else None
        self._step = _quick_step(self._optimizer)
        self._gradient: Tensor | None = None
        self._rates = [group["lr"] for group in groups]
        self._rate = rate

    @property
    def inner(self) -> torch.optim.Optimizer | None:
        """The optimiser, with a parameter a slice; None where nothing is trained."""
        return self._optimizer

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Updates the vector.

        Args:
            gradient: `(n,)`, not changed.
            learning_rate: of the first span of the whole vector, of which this one may be a part; all spans keep
                their ratio to it.
        """
        if self._optimizer is None:
            return
        if gradient is not self._gradient:
            self._show(gradient, self._optimizer.param_groups)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = learning_rate if rate == self._rate else learning_rate * rate / self._rate
        self._step()

    def _show(self, gradient: Tensor, groups: list[dict[str, Any]]) -> None:
        """Makes a vector the gradient, which it nearly always is already."""
        self._gradient = gradient
        whole = self._slices == [slice(0, len(gradient))]
        for group, place in zip(groups, self._slices, strict=True):
            group["params"][0].grad = gradient if whole else gradient[place]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gives all that a resumed optimiser needs, as named tensors and JSON-able facts."""
        return pack_optimizer_state(self._optimizer) if self._optimizer is not None else ({}, {})

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes back what `state` gave."""
        if self._optimizer is not None:
            unpack_optimizer_state(self._optimizer, tensors, facts)


def _made(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    maker: Any = KINDS[kind]  # every class of the table has defaults for what the groups do not say
    made: torch.optim.Optimizer = maker(groups)
    return made


def _quick_step(optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Gives a step without torch's wrappers, and without all that is not arithmetic where that is known."""
    bare = _bare_step(optimizer)
    if type(optimizer) is not torch.optim.SGD:
        return bare
    direct = DirectSGD(optimizer)

    def step() -> None:
        if not direct.step():
            bare()

    return step


def _bare_step(optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Gives the method `step` without torch's wrappers.

    Nobody can hook an optimiser that no one else sees, and for a small model the wrappers take longer than the update.
    The one that keeps it out of compiled code imports the compiler first.
    """
    method: Any = type(optimizer).step if optimizer is not None else None
    while (wrapped := getattr(method, "__wrapped__", None)) is not None:
        method = wrapped

    def step() -> None:
        with torch.no_grad():
            method(optimizer)

    return step


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Turns JSON's lists back into the tuples (`betas`) that optimisers expect."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
