"""An optimiser as a plan that travels: which class, and which options for which part of the flat vector.

A server must run the optimiser that the user made for the whole model, on its shard and without the model. The
plan says how, in JSON: nothing that a server receives is executed or unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.training.direct_sgd import DirectSGD
from polyrhythm.training.flat_parameters import FlatParameters, shards
from polyrhythm.training.flatten_state import pack_optimizer_state, unpack_optimizer_state
from polyrhythm.training.optimizers.downpour_adagrad import DownpourAdagradOptimizer
from polyrhythm.training.optimizers.lamb import LAMBOptimizer
from polyrhythm.training.optimizers.lars import LARSOptimizer
from polyrhythm.training.optimizers.ngsgd import NaturalGradientSGD
from polyrhythm.training.optimizers.tf1_rmsprop import TF1RMSPropOptimizer

# Optimisers that treat every number of the vector alike, so that they may run on any slice of it.
ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Rprop,
        torch.optim.ASGD,
        TF1RMSPropOptimizer,
        DownpourAdagradOptimizer,
    )
}

# Optimisers that look at whole layers: each parameter stays a span of its own.
LAYERWISE: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind for kind in (LARSOptimizer, LAMBOptimizer, NaturalGradientSGD)
}

_KINDS = ELEMENTWISE | LAYERWISE
_NOT_THE_RULE = ("params", "initial_lr", "foreach", "fused")
"""Entries of `param_groups` that do not travel. `fused` rounds differently in a slice's tail than in its body, so
that results would depend on where a shard is cut."""


@dataclass(frozen=True)
class Span:
    """A part of the vector with options of its own.

    Attributes:
        start: its first number.
        stop: one past its last number.
        options: what the optimiser's `param_groups` entry holds, less the parameters.
    """

    start: int
    stop: int
    options: dict[str, Any]


@dataclass(frozen=True)
class OptimizerPlan:
    """What to run on a slice of the vector.

    Attributes:
        kind: name of the class.
        spans: ordered, without overlap; what none covers is not trained.
        rate: learning rate of the whole vector's first span; a part keeps it, and all spans their ratio to it.
    """

    kind: str
    spans: tuple[Span, ...]
    rate: float

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> OptimizerPlan:
        """Reads a plan off an optimiser over the model's own parameters.

        Raises:
            RequestError: its class cannot run on a slice, or it trains what is not in the vector.
        """
        kind = type(optimizer).__name__
        if _KINDS.get(kind) is not type(optimizer):
            known = ", ".join(sorted(_KINDS))
            raise RequestError(f"{kind} cannot run on a slice of the parameters: use one of {known}")
        places = {view.parameter: (view.start, view.stop) for view in flat.views}
        spans = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in _NOT_THE_RULE}
            for parameter in group["params"]:
                if not parameter.requires_grad:  # frozen: torch's own optimisers pass over it too
                    continue
                if parameter not in places:
                    raise RequestError("the optimiser trains a parameter that the model does not have")
                spans.append(Span(*places[parameter], options))
        if not spans:
            raise RequestError(
                "the optimiser has nothing to train: every parameter that it was given is frozen"
            )
        joined = tuple(sorted(spans, key=lambda span: span.start))
        if kind in ELEMENTWISE:
            joined = _joined(joined)
        return cls(kind, joined, float(joined[0].options["lr"]))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> OptimizerPlan:
        """Rebuilds a plan from `to_json`'s dict.

        Raises:
            RequestError: no such class, fields are missing, or an optimiser made like this could not make a step.
        """
        try:
            spans = tuple(
                Span(span["start"], span["stop"], dict(span["options"])) for span in record["spans"]
            )
            kind, rate = record["kind"], float(record["rate"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise RequestError("an optimiser plan lacks its kind, spans or rate") from None
        if not isinstance(kind, str) or kind not in _KINDS:
            raise RequestError(f"an optimiser plan names {kind!r:.80}, which is none of ours")
        plan = cls(kind, spans, rate)
        _check_spans(spans)
        _try_out(plan)
        return plan

    def to_json(self) -> dict[str, Any]:
        """Gives the plan as a JSON-able dict."""
        spans = [{"start": span.start, "stop": span.stop, "options": span.options} for span in self.spans]
        return {"kind": self.kind, "spans": spans, "rate": self.rate}

    def part(self, start: int, stop: int) -> OptimizerPlan:
        """Gives the plan of the slice `[start, stop)`, counted from its own start.

        Raises:
            RequestError: the optimiser looks at whole layers, and the slice cuts one.
        """
        touched = [span for span in self.spans if span.start < stop and span.stop > start]
        cut = any(span.start < start or span.stop > stop for span in touched)
        if cut and self.kind in LAYERWISE:
            raise RequestError(
                f"{self.kind} looks at whole layers, and a server's shard cuts one: use one server, or a strategy "
                "whose workers update the whole model, such as synchronous"
            )
        inside = [
            Span(max(span.start, start) - start, min(span.stop, stop) - start, span.options)
            for span in touched
        ]
        return OptimizerPlan(self.kind, tuple(inside), self.rate)

    def build(self, vector: Tensor) -> FlatOptimizer:
        """Makes the optimiser of a vector which this plan covers."""
        return FlatOptimizer(self, vector)


def check_shards(optimizer: torch.optim.Optimizer, model: nn.Module, count: int) -> None:
    """Refuses to cut a model into shards that the optimiser cannot work on, before anything starts.

    Args:
        optimizer: over the model's own parameters.
        model: its parameters become views of one vector.
        count: of the shards.

    Raises:
        RequestError: there are fewer numbers than shards, or the optimiser looks at whole layers and a shard cuts one.
    """
    flat = FlatParameters(model)
    plan = OptimizerPlan.of(optimizer, flat)
    for shard in shards(flat.size, count):
        plan.part(shard.start, shard.stop)


class FlatOptimizer:
    """An ordinary `torch.optim` optimiser over one vector, or over a few long slices of it.

    Args:
        plan: what to run.
        vector: `(n,)`; every step changes it in place.
    """

    def __init__(self, plan: OptimizerPlan, vector: Tensor) -> None:
        self._vector = vector
        self._slices = [slice(span.start, span.stop) for span in plan.spans]
        groups = [
            {"params": [nn.Parameter(vector[place])], **_tuples(span.options)}
            for place, span in zip(self._slices, plan.spans, strict=True)
        ]
        for group, place in zip(groups, self._slices, strict=True):
            group["params"][0].data = vector[place]
        self._optimizer = _make(plan.kind, groups) if groups else None
        self._step = _quick_step(self._optimizer)
        self._gradient: Tensor | None = None
        self._rates = [group["lr"] for group in groups]
        self._rate = plan.rate

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


def _check_spans(spans: Iterable[Span]) -> None:
    end = 0
    for span in spans:
        if type(span.start) is not int or type(span.stop) is not int or not end <= span.start < span.stop:
            raise RequestError(
                "the spans of an optimiser plan must be whole numbers, in order and without overlap"
            )
        end = span.stop


def _try_out(plan: OptimizerPlan) -> None:
    """Makes two steps of two numbers with the options of every span: torch looks at most of them only then."""
    rates: list[Any] = [plan.rate, *(span.options.get("lr") for span in plan.spans)]
    if not all(type(rate) in (int, float) and 0 <= float(rate) < inf for rate in rates):
        raise RequestError("the learning rates of an optimiser plan must be numbers that are not negative")
    tried: list[dict[str, Any]] = []
    for span in plan.spans:
        if span.options in tried:
            continue
        tried.append(span.options)
        if not set(_NOT_THE_RULE).isdisjoint(span.options):
            raise RequestError("an optimiser plan holds options that do not travel")
        try:
            vector = torch.zeros(2)
            optimizer = OptimizerPlan(plan.kind, (Span(0, 2, span.options),), plan.rate).build(vector)
            for _ in range(2):
                optimizer.step(torch.ones(2), plan.rate)
        except Exception as error:  # torch says in many ways that it does not like an option
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(
                f"an optimiser plan's options for {plan.kind} cannot be used: {reason:.200}"
            ) from None


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start and joined[-1].options == span.options:
            joined[-1] = Span(joined[-1].start, span.stop, span.options)
        else:
            joined.append(span)
    return tuple(joined)


def _make(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    maker: Any = _KINDS[kind]  # every class of the table has defaults for what the groups do not say
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
