"""An optimiser as a plan that travels: which class, and which options for which part of the flat vector.

A server must run the optimiser that the user made for the whole model, on its shard and without the model. The
plan says how, in JSON: nothing that a server receives is executed or unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from sys import float_info
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.training.flat_parameters import FlatParameters, shards
from polyrhythm.training.optimizing.flat_optimizer import FlatOptimizer
from polyrhythm.training.optimizing.optimizer_kinds import ELEMENTWISE, KINDS, LAYERWISE
from polyrhythm.training.optimizing.spans import Span, check_spans, joined

_NOT_THE_RULE = ("params", "initial_lr", "foreach", "fused")
"""Entries of `param_groups` that do not travel. `fused` rounds differently in a slice's tail than in its body, so
that results would depend on where a shard is cut."""


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
        if KINDS.get(kind) is not type(optimizer):
            known = ", ".join(sorted(KINDS))
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
        ordered = tuple(sorted(spans, key=lambda span: span.start))
        if kind in ELEMENTWISE:
            ordered = joined(ordered)
        return cls(kind, ordered, float(ordered[0].options["lr"]))

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
        if not isinstance(kind, str) or kind not in KINDS:
            raise RequestError(f"an optimiser plan names {kind!r:.80}, which is none of ours")
        plan = cls(kind, spans, rate)
        check_spans(spans)
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
        return FlatOptimizer(self.kind, self.spans, self.rate, vector)


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


def _try_out(plan: OptimizerPlan) -> None:
    """Makes two steps of two numbers with the options of every span: torch looks at most of them only then."""
    rates: list[Any] = [plan.rate, *(span.options.get("lr") for span in plan.spans)]
    if not all(type(rate) in (int, float) and 0 <= rate <= float_info.max for rate in rates):
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
