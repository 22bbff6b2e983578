"""An optimizer as a serializable plan: its class, and its options for each part of the flat vector.

A server must run the optimizer that the user made for the whole model, on its shard and without the model.
The plan is JSON: nothing that a server receives is executed or unpickled.

`SlicedOptimizer` runs a plan on one slice of a vector at a time, and is saved as if it updated the whole:

    vector     [      slice 2      |   slice 1   | slice 0 ]      each has an optimizer of its own
    saved      [                 one                       ]      so a resumed run may cut differently
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from itertools import accumulate, pairwise
from sys import float_info
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.training.flat_optimizer import (
    ELEMENTWISE,
    KINDS,
    LAYERWISE,
    FlatOptimizer,
    Packed,
    Span,
    check_spans,
    has_hooks,
    joined,
    pack_optimizer_state,
    quick_step,
    unpack_optimizer_state,
)
from polyrhythm.training.flat_parameters import FlatParameters, shards
from polyrhythm.training.joint_optimizer import JointOptimizer, SteppedOnModel

_NOT_THE_RULE = ("params", "initial_lr", "foreach", "fused", "clip_norm")
"""Entries of `param_groups` that do not travel. `fused` rounds differently in a slice's tail than in its body, so
that results would depend on where a shard is cut."""


@dataclass(frozen=True)
class OptimizerPlan:
    """Optimizer of a slice of the vector.

    Attributes:
        kind: name of the class.
        spans: ordered, without overlap; what none covers is not trained.
        rate: learning rate of the whole vector's first span; a part keeps it, and all spans their ratio to it.
        clip_norm: bound of the total norm of the gradients of all spans; None: no bound.
        own: the user's own object, which a user's loop steps where a worker holds the whole vector.
        joint: optimizer that uses all workers' data, for strategies of `Traits.mean_updates` alone; None:
            another kind.
    """

    kind: str
    spans: tuple[Span, ...]
    rate: float
    clip_norm: float | None = None
    own: OwnOptimizer | None = field(default=None, compare=False, repr=False)
    joint: SteppedOnModel | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, flat: FlatParameters, *, keeps: bool = False
    ) -> OptimizerPlan:
        """Make the plan of an optimizer over the model's own parameters.

        Args:
            optimizer: the user's.
            flat: the parameters that it trains.
            keeps: whether the object itself is to be used on the whole vector; it may then be of any class.

        Raises:
            RequestError: its class cannot run on a slice, or it trains parameters outside the vector.
        """
        kind = type(optimizer).__name__
        clip_norm = optimizer.param_groups[0].get("clip_norm")
        if isinstance(optimizer, JointOptimizer) and not keeps:
            if clip_norm is not None:
                raise RequestError(
                    f"{kind} has a bound of its steps of its own: leave clip_norm out, or use sgd"
                )
            first = min(flat.views, key=lambda view: view.start).parameter
            rate = next(
                group["lr"]
                for group in optimizer.param_groups
                if any(first is each for each in group["params"])
            )
            return cls(kind, (), float(rate), joint=SteppedOnModel(optimizer, flat))
        if KINDS.get(kind) is not type(optimizer):
            if keeps:
                rate = float(optimizer.param_groups[0]["lr"])
                return cls(kind, (), rate, own=OwnOptimizer(optimizer, flat))
            raise _not_on_slices(kind)
        places = {view.parameter: (view.start, view.stop) for view in flat.views}
        spans = []
        for group in optimizer.param_groups:
            options = {key: _plain(value) for key, value in group.items() if key not in _NOT_THE_RULE}
            for parameter in group["params"]:
                if not parameter.requires_grad:  # frozen: torch's own optimizers pass over it too
                    continue
                if parameter not in places:
                    raise RequestError("the optimizer trains a parameter that the model does not have")
                spans.append(Span(*places[parameter], options))
        if not spans:
            raise RequestError(
                "the optimizer has nothing to train: every parameter that it was given is frozen"
            )
        ordered = tuple(sorted(spans, key=lambda span: span.start))
        if kind in ELEMENTWISE:
            ordered = joined(ordered)
        own = OwnOptimizer(optimizer, flat) if keeps else None
        return cls(kind, ordered, float(ordered[0].options["lr"]), clip_norm, own)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> OptimizerPlan:
        """Rebuild a plan from `to_json`'s dict.

        Raises:
            RequestError: no such class, fields are missing, or an optimizer made like this could not make a step.
        """
        try:
            spans = tuple(
                Span(span["start"], span["stop"], dict(span["options"])) for span in record["spans"]
            )
            kind, rate = record["kind"], float(record["rate"])
            clip_norm = None if record.get("clip_norm") is None else float(record["clip_norm"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise RequestError("an optimizer plan lacks its kind, spans or rate") from None
        if not isinstance(kind, str) or kind not in KINDS:
            raise RequestError(f"an optimizer plan names {kind!r:.80}, which is none of ours")
        if clip_norm is not None and not 0 < clip_norm <= float_info.max:
            raise RequestError("the clip_norm of an optimizer plan must be a number above 0")
        plan = cls(kind, spans, rate, clip_norm)
        check_spans(spans)
        _try_out(plan)
        return plan

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON-able dict."""
        spans = [{"start": span.start, "stop": span.stop, "options": span.options} for span in self.spans]
        record = {"kind": self.kind, "spans": spans, "rate": self.rate}
        return record if self.clip_norm is None else record | {"clip_norm": self.clip_norm}

    def part(self, start: int, stop: int) -> OptimizerPlan:
        """Return the plan of the slice `[start, stop)`, counted from its own start.

        Raises:
            RequestError: the optimizer looks at whole layers, and the slice cuts one; or gradients are clipped, and the
                slice has not all of them.
        """
        if self.clip_norm is not None and any(span.start < start or stop < span.stop for span in self.spans):
            raise clips_parts()
        touched = [span for span in self.spans if span.start < stop and span.stop > start]
        cut = any(span.start < start or span.stop > stop for span in touched)
        if cut and self.kind in LAYERWISE:
            raise RequestError(
                f"{self.kind} looks at whole layers, and a server's shard cuts one: use one server, or a strategy "
                "with workers that update the whole model, such as synchronous"
            )
        inside = [
            Span(max(span.start, start) - start, min(span.stop, stop) - start, span.options)
            for span in touched
        ]
        return replace(self, spans=tuple(inside), own=None, joint=None)

    def without(self, places: Iterable[tuple[int, int]]) -> OptimizerPlan:
        """Return the plan of a step in which some parameters, given by start and stop, are not trained."""
        spans = list(self.spans)
        for start, stop in places:
            cut: list[Span] = []
            for span in spans:
                if span.stop <= start or stop <= span.start:
                    cut.append(span)
                    continue
                if span.start < start:
                    cut.append(Span(span.start, start, span.options))
                if stop < span.stop:
                    cut.append(Span(stop, span.stop, span.options))
            spans = cut
        return replace(self, spans=tuple(spans), own=None, joint=None)

    def united(self, others: Sequence[OptimizerPlan]) -> OptimizerPlan:
        """Return the plan that trains what this one or another does, each with the options of the first that does."""
        plans = [self, *others]
        edges = sorted({edge for plan in plans for span in plan.spans for edge in (span.start, span.stop)})
        spans = []
        for start, stop in pairwise(edges):
            found = (
                span for plan in plans for span in plan.spans if span.start <= start and stop <= span.stop
            )
            if (first := next(found, None)) is not None:
                spans.append(Span(start, stop, first.options))
        whole = joined(spans) if self.kind in ELEMENTWISE else tuple(spans)
        return replace(self, spans=whole, own=None, joint=None)

    def whole(self, vector: Tensor) -> FlatOptimizer | OwnOptimizer:
        """Return the user's own optimizer of the model's flat vector, or make one of its kind."""
        return self.build(vector) if self.own is None else self.own

    @classmethod
    def of_step(cls, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> OptimizerPlan:
        """Make the plan of one step, of what is trained and of the options as they are now."""
        plan = cls.of(optimizer, flat)
        return replace(plan, rate=max(float(span.options["lr"]) for span in plan.spans))

    def build(self, vector: Tensor) -> FlatOptimizer:
        """Make the optimizer of a vector which this plan covers.

        Raises:
            RequestError: an optimizer of its class cannot run on any vector.
        """
        if self.kind not in KINDS:
            raise _not_on_slices(self.kind)
        return FlatOptimizer(self.kind, self.spans, self.rate, vector, self.clip_norm)


def update_as(
    optimizer: FlatOptimizer, flat: FlatParameters, plan: OptimizerPlan | None, rate: float
) -> None:
    """Update with the flat gradients, by the plan of a step of a user's loop; None: as at the start."""
    if plan is None:
        optimizer.step(flat.gradients, rate)
        return
    missing = [flat.views[position] for position in flat.without_gradient]
    spans = plan.without([(view.start, view.stop) for view in missing]).spans
    optimizer.step_as(flat.gradients, rate, spans, plan.rate)


def _plain(option: Any) -> Any:
    """Return an option that may be a tensor of one number, as a learning rate may, as what JSON has."""
    if isinstance(option, tuple | list):
        return type(option)(map(_plain, option))
    return option.item() if isinstance(option, Tensor) else option


def _not_on_slices(kind: str) -> RequestError:
    return RequestError(
        f"{kind} cannot run on a slice of the parameters: use one of {', '.join(sorted(KINDS))}, or synchronous"
    )


def clips_parts() -> RequestError:
    """Return the refusal of `clip_norm` where each update has a part of the gradients."""
    return RequestError(
        "clip_norm needs the norm of all gradients, and each update has a part of them here: use one server, or a "
        "strategy with workers that update the whole model, such as synchronous"
    )


class OwnOptimizer:
    """The user's own optimizer object, on a model's parameters, which are views of the flat vector.

    It sees what it would see alone: parameters that have no gradient have None, so that it passes over them, and its
    param groups are the user's, in which schedulers may change any option.

    Args:
        optimizer: optimizer over the model's parameters.
        flat: flat parameters of the model.

    Attributes:
        inner: the optimizer.
        asks_for_closure: whether its steps need one, as those of LBFGS.
        closure: function that evaluates the model, for the next step of an optimizer that needs it.
        step_of_inner: function that takes the next step instead of the optimizer's `step`; None: `step` is used.
        loss: result of such a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> None:
        self.inner = optimizer
        closure = signature(optimizer.step).parameters.get("closure")
        self.asks_for_closure = closure is not None and closure.default is Parameter.empty
        self.closure: Callable[[], float] | None = None
        self.step_of_inner: Callable[[], object] | None = None
        self.loss: float | None = None
        self._flat = flat
        self._at_once = SGDAtOnce(optimizer, flat) if type(optimizer) is torch.optim.SGD else None

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Update the flat vector.

        Args:
            gradient: the flat gradients.
            learning_rate: unused, because the param groups have it.
        """
        at_once = None if self.step_of_inner is not None else self._at_once
        if at_once is not None and not self._flat.without_gradient and at_once.step():
            return
        hidden = [self._flat.views[position] for position in self._flat.without_gradient]
        for view in hidden:
            view.parameter.grad = None
        try:
            if self.step_of_inner is not None:
                self.step_of_inner()
            elif self.closure is None:
                (quick_step(self.inner) or self.inner.step)()
            else:
                self.loss = self.inner.step(self.closure)
        finally:
            for view in hidden:
                view.place_gradient()
        self._flat.gather_parameters()

    def state(self) -> Packed:
        """Return all that a resumed optimizer needs, as named tensors and JSON-able facts."""
        return pack_optimizer_state(self.inner)

    def load_state(self, state: Packed) -> None:
        """Load what `state` returned, or a `FlatOptimizer` of the same plan, as users' loops saved it before."""
        tensors, facts = state
        groups = self.inner.param_groups
        if facts and facts["shapes"] != [[list(each.shape) for each in group["params"]] for group in groups]:
            tensors, facts = self._by_parameter(tensors, facts)
        unpack_optimizer_state(self.inner, tensors, facts)

    def _by_parameter(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Packed:
        """Return the state of spans as that of the parameters in them; as it is, where they are not in these."""
        groups = [group["params"] for group in self.inner.param_groups]
        known = {id(each) for group in groups for each in group}
        trained = [
            view for view in self._flat.views if view.parameter.requires_grad and id(view.parameter) in known
        ]
        sizes = [shape[0] for group in facts["shapes"] for shape in group if len(shape) == 1]
        ends = list(accumulate(sizes))
        if len(sizes) != len(facts["groups"]) or ends[-1:] != [
            sum(view.stop - view.start for view in trained)
        ]:
            return tensors, facts
        places: dict[int, tuple[int, int, int]] = {}
        done = 0
        for view in trained:
            span, length = bisect_right(ends, done), view.stop - view.start
            first = done - (ends[span] - sizes[span])
            places[id(view.parameter)] = span, first, first + length
            done += length
        found: dict[str, Tensor] = {}
        values: dict[str, dict[str, Any]] = {}
        options: list[dict[str, Any]] = []
        index = 0
        for group in groups:
            spans = [places[id(each)][0] for each in group if id(each) in places]
            options.append(facts["groups"][spans[0]] if spans else {})
            for each in group:
                span, start, stop = places.get(id(each), (-1, 0, 0))
                for name, value in tensors.items():
                    _, number, key = name.split(".", 2)
                    if int(number) == span:
                        sliced = value[start:stop].view(each.shape) if value.ndim else value
                        found[f"state.{index}.{key}"] = sliced
                if str(span) in facts["state"]:
                    values[str(index)] = facts["state"][str(span)]
                index += 1
        shapes = [[list(each.shape) for each in group] for group in groups]
        return found, {**facts, "state": values, "groups": options, "shapes": shapes}


class SGDAtOnce:
    """Steps of torch's SGD on the whole flat vector: three operations in place of three for every parameter.

    The momenta stay in the optimizer's state, as views of one vector.

    Args:
        optimizer: optimizer over the model's parameters.
        flat: flat parameters of the model.
    """

    def __init__(self, optimizer: torch.optim.SGD, flat: FlatParameters) -> None:
        self._optimizer = optimizer
        self._flat = flat
        self._momenta: list[Tensor] = []
        self._momentum: Tensor | None = None
        groups = optimizer.param_groups
        optimized = {id(each) for group in groups for each in group["params"]}
        self._fits = (
            len(groups) == 1 and not flat.apart and {id(view.parameter) for view in flat.views} == optimized
        )

    def step(self) -> bool:
        """Take a step, if it is one of those that can be taken at once; return whether it is."""
        optimizer = self._optimizer
        group = optimizer.param_groups[0]
        if (
            not self._fits
            or len(optimizer.param_groups) > 1
            or group["maximize"]
            or group["differentiable"]
            or has_hooks(optimizer)
            or not (group["momentum"] == 0 or self._has_momenta())
        ):
            return False
        flat = self._flat
        if not all(view.holds_gradient() for view in flat.views):  # the loop has set some itself
            return False
        flat.gather_parameters()
        values, change, momentum = flat.vector, flat.gradients, self._momentum
        with torch.no_grad():
            if group["weight_decay"]:
                change = change.add(values, alpha=group["weight_decay"])
            if group["momentum"] and momentum is not None:
                momentum.mul_(group["momentum"]).add_(change, alpha=1 - group["dampening"])
                change = change.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
            values.add_(change, alpha=-group["lr"])
        return True

    def _has_momenta(self) -> bool:
        """Return whether every parameter has a momentum, which then lies in one vector: the first step makes them."""
        state, views = self._optimizer.state, self._flat.views
        found = [
            state[view.parameter].get("momentum_buffer") if view.parameter in state else None
            for view in views
        ]
        if any(each is None for each in found):
            return False
        if self._momenta and all(each is ours for each, ours in zip(found, self._momenta, strict=True)):
            return True
        self._momentum = torch.empty_like(self._flat.vector)
        self._momenta = []
        for view, each in zip(views, found, strict=True):
            assert each is not None, "all have one"
            ours = self._momentum[view.start : view.stop].view(view.parameter.shape)
            ours.copy_(each)
            state[view.parameter]["momentum_buffer"] = ours
            self._momenta.append(ours)
        return True


def check_shards(optimizer: torch.optim.Optimizer, model: nn.Module, count: int) -> None:
    """Refuse to cut a model into shards that the optimizer cannot work on, before anything starts.

    Args:
        optimizer: optimizer over the model's own parameters.
        model: model; its parameters become views of one vector.
        count: count of the shards.

    Raises:
        RequestError: there are fewer numbers than shards, or the optimizer looks at whole layers and a shard cuts one.
    """
    flat = FlatParameters(model)
    plan = OptimizerPlan.of(optimizer, flat)
    for shard in shards(flat.size, count):
        plan.part(shard.start, shard.stop)


def _try_out(plan: OptimizerPlan) -> None:
    """Make two steps of two numbers with the options of every span: torch looks at most of them only then."""
    rates: list[Any] = [plan.rate, *(span.options.get("lr") for span in plan.spans)]
    if not all(type(rate) in (int, float) and 0 <= rate <= float_info.max for rate in rates):
        raise RequestError("the learning rates of an optimizer plan must be numbers that are not negative")
    tried: list[dict[str, Any]] = []
    for span in plan.spans:
        if span.options in tried:
            continue
        tried.append(span.options)
        if not set(_NOT_THE_RULE).isdisjoint(span.options):
            raise RequestError("an optimizer plan holds options that do not travel")
        try:
            vector = torch.zeros(2)
            optimizer = replace(plan, spans=(Span(0, 2, span.options),)).build(vector)
            for _ in range(2):
                optimizer.step(torch.ones(2), plan.rate)
        except Exception as error:  # torch has many exceptions for invalid options
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(
                f"an optimizer plan's options for {plan.kind} cannot be used: {reason:.200}"
            ) from None


_Group = dict[str, Any]


class SlicedOptimizer:
    """The optimizer of a plan, slice by slice.

    Args:
        plan: plan to run.
        vector: `(n,)`; changed in place.
        slices: disjoint, and together all of the vector. Each has to be updated equally often.

    Attributes:
        parts: the optimizers of the slices, in the same order.
    """

    def __init__(self, plan: OptimizerPlan, vector: Tensor, slices: Sequence[slice]) -> None:
        self.parts: list[FlatOptimizer] = [
            plan.part(place.start, place.stop).build(vector[place]) for place in slices
        ]
        self._order = sorted(range(len(slices)), key=lambda number: slices[number].start)
        self._whole = replace(plan, own=None).build(vector)  # never steps

    def step(self, number: int, gradient: Tensor, learning_rate: float) -> None:
        """Update a slice.

        Args:
            number: number of the slice.
            gradient: gradient of the slice's shape, not changed.
            learning_rate: see `FlatOptimizer.step`.
        """
        self.parts[number].step(gradient, learning_rate)

    def state(self) -> Packed:
        """Return the state that the optimizer of the whole vector would have."""
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

    def load_state(self, saved: Packed) -> None:
        """Load what `state` returned, however it was cut then."""
        self._whole.load_state(saved)
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

    @property
    def pieces(self) -> Pieces:
        """State slice by slice, as needed where some have been updated once more than others."""
        return Pieces(self.parts)

    def _forget_whole(self) -> None:
        if self._whole.inner is not None:
            self._whole.inner.state.clear()

    def _pairs(self) -> Iterator[tuple[_Place, list[_Place]]]:
        """Return each parameter of the whole, with those of the parts that lie in it, in their order."""
        pieces = [place for number in self._order for place in _places(self.parts[number].inner)]
        following = iter(pieces)
        for whole in _places(self._whole.inner):
            inside: list[_Place] = []
            while sum(piece.numel() for *_, piece in inside) < whole[2].numel():
                inside.append(next(following))
            yield whole, inside


_Place = tuple[torch.optim.Optimizer, _Group, nn.Parameter]


class Pieces:
    """State of several optimizers, each by itself."""

    def __init__(self, parts: Sequence[FlatOptimizer]) -> None:
        self._parts = parts

    def state(self) -> Packed:
        """Return the states of all."""
        states = [part.state() for part in self._parts]
        tensors = {
            f"{at}.{name}": value for at, (named, _) in enumerate(states) for name, value in named.items()
        }
        return tensors, {"slices": [facts for _, facts in states]}

    def load_state(self, state: Packed) -> None:
        """Load what `state` returned, of the same slices."""
        tensors, facts = state
        for at, part in enumerate(self._parts):
            own = {
                name.removeprefix(f"{at}."): value.clone()
                for name, value in tensors.items()
                if name.startswith(f"{at}.")
            }
            part.load_state((own, facts["slices"][at]))


def _places(optimizer: torch.optim.Optimizer | None) -> Iterator[_Place]:
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            yield optimizer, group, parameter  # type: ignore[misc]


def _is_sliced(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
