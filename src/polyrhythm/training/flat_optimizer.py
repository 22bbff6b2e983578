"""An optimizer of torch on one flat vector: its step without torch's overhead, its state, and its undo log.

The vector is divided into spans, each with the options that its optimizer has there. Kinds of optimizer that
treat every number alike may run on any slice of the vector; those that look at whole layers keep each
parameter as a span of its own. Kinds are known by the names of their classes.

Steps are torch's, without the wrappers that torch puts around `step`: an internal optimizer has no hooks, and
the wrapper that keeps it out of compiled code imports the compiler, which takes a second. Steps of
SGD on the CPU are written out, in the same operations and the same order as `torch.optim.SGD` without `foreach`
and `fused`, so with the same bits:

    d = g + weight_decay * w      m = momentum * m + (1 - dampening) * d      w = w - lr * m

For a model of a few thousand numbers, torch's checks and preparations take as long as the three operations: without
this the `mlp` of `benchmarks/step-efficiency` is 6 % slower alone.

A state is named tensors and JSON-able facts, so that a checkpoint needs no pickle:

    state.<index>.<key>     a tensor of the state of parameter number <index>, counted over all groups
    facts["state"]          the state's other values, {index: {key: value}}
    facts["groups"]         what `param_groups` holds in addition to the parameters, one dict a group
    facts["shapes"]         of the parameters, one list a group
    facts["optimizer"]      the class's name

`Optimizer.load_state_dict` is not used to go back: it casts every floating tensor but `step` to the
parameter's dtype, which turns NAdam's float32 product of momenta into float64 and so changes the numbers of a
resumed run.

`UndoLog` copies what a step is about to change, so that the step can be undone to the bit.

`make_optimizers_quickly` makes optimizers without importing torch's compiler, which takes nearly as long as
importing torch. torch keeps some methods of its optimizers out of compiled code, and imports the compiler to
do so when the first of them is called; so does `step`, which `quick_step` avoids. As long as nothing is compiled,
there is nothing to be kept out of; a program that compiles something gets torch's own form of the methods. This is
the one place that knows how torch 2.13 does it; where another torch does it otherwise, nothing happens, and the
compiler is imported after all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import optimizer as torch_optimizer

from polyrhythm.errors import RequestError
from polyrhythm.training.checkpoint import restoring
from polyrhythm.training.closed_loop import ClosedLoopSGD
from polyrhythm.training.optimizers.downpour_adagrad import DownpourAdagradOptimizer
from polyrhythm.training.optimizers.lamb import LAMBOptimizer
from polyrhythm.training.optimizers.lars import LARSOptimizer
from polyrhythm.training.optimizers.ngsgd import NaturalGradientSGD
from polyrhythm.training.optimizers.tf1_rmsprop import TF1RMSPropOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping


# Optimizers that treat every number of the vector alike, so that they may run on any slice of it.
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
        ClosedLoopSGD,
    )
}

# Optimizers that look at whole layers: each parameter stays a span of its own.
LAYERWISE: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind for kind in (LARSOptimizer, LAMBOptimizer, NaturalGradientSGD)
}

Packed = tuple[dict[str, Tensor], dict[str, Any]]
"""State of an optimizer: named tensors and JSON-able facts."""

KINDS = ELEMENTWISE | LAYERWISE


@dataclass(frozen=True)
class Span:
    """A part of the vector with options of its own.

    Attributes:
        start: position of its first number.
        stop: end index, exclusive.
        options: options of the optimizer's `param_groups` entry, without the parameters.
    """

    start: int
    stop: int
    options: dict[str, Any]


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Make one span of neighbors with the same options."""
    whole: list[Span] = []
    for span in spans:
        if whole and whole[-1].stop == span.start and whole[-1].options == span.options:
            whole[-1] = Span(whole[-1].start, span.stop, span.options)
        else:
            whole.append(span)
    return tuple(whole)


def check_spans(spans: Iterable[Span]) -> None:
    """Refuse spans that overlap, are out of order, or are none.

    Raises:
        RequestError: the spans are invalid.
    """
    end = 0
    for span in spans:
        if type(span.start) is not int or type(span.stop) is not int or not end <= span.start < span.stop:
            raise RequestError(
                "the spans of an optimizer plan must be whole numbers, in order and without overlap"
            )
        end = span.stop


class FlatOptimizer:
    """An ordinary `torch.optim` optimizer over one vector, or over a few long slices of it.

    Args:
        kind: name of its class, one of `optimizer_kinds`.
        spans: ordered, without overlap; what none covers is not trained.
        rate: learning rate of the whole vector's first span; all spans keep their ratio to it.
        vector: `(n,)`; every step changes it in place.
        clip_norm: bound of the gradients' total norm, over all spans; None: no bound.
    """

    def __init__(
        self,
        kind: str,
        spans: Sequence[Span],
        rate: float,
        vector: Tensor,
        clip_norm: float | None = None,
    ) -> None:
        self._vector = vector
        self._slices = [slice(span.start, span.stop) for span in spans]
        groups = [
            {"params": [nn.Parameter(vector[place])], **_tuples(span.options)}
            for place, span in zip(self._slices, spans, strict=True)
        ]
        for group, place in zip(groups, self._slices, strict=True):
            group["params"][0].data = vector[place]
        self._optimizer = _made(kind, groups) if groups else None
        self._step = _unwrapped(kind)
        self._parameters = [group["params"][0] for group in groups]
        self._is_sgd = kind == "SGD" and vector.dtype == torch.float32 and not vector.is_cuda
        self._gradient: Tensor | None = None
        self._rates = [group["lr"] for group in groups]
        self._rate = rate
        self._kind = kind
        self._clip_norm = clip_norm
        self._clipped = torch.empty_like(vector) if clip_norm is not None else None
        self._options: list[dict[str, Any] | None] | None = None
        """Initial options of the groups, None for later groups; known once a step had a plan of its own."""

    @property
    def inner(self) -> torch.optim.Optimizer | None:
        """The optimizer, with a parameter a slice; None where nothing is trained."""
        return self._optimizer

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Update the vector.

        Args:
            gradient: `(n,)`, not changed.
            learning_rate: learning rate of the first span of the whole vector (this one may be a part); all
                spans keep their ratio to it.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return
        groups = optimizer.param_groups
        gradient = self._within_norm(gradient)
        if gradient is not self._gradient:
            self._show(gradient, groups)
        for group, rate in zip(groups, self._rates, strict=True):
            # Not multiplied where the rates are equal: the quotient might be off by a bit.
            group["lr"] = learning_rate if rate == self._rate else learning_rate * rate / self._rate
        if self._is_sgd:
            momenta = [optimizer.state[each].get("momentum_buffer") for each in self._parameters]
            if all(map(_is_ordinary, groups, momenta)):
                for group, parameter, momentum in zip(groups, self._parameters, momenta, strict=True):
                    # Detached, so that autograd does not record the update; the memory is the vector's.
                    values, change = parameter.detach(), parameter.grad
                    if group["weight_decay"]:
                        change = change.add(values, alpha=group["weight_decay"])
                    if momentum is not None:
                        momentum.mul_(group["momentum"]).add_(change, alpha=1 - group["dampening"])
                        change = (
                            change.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
                        )
                    values.add_(change, alpha=-group["lr"])
                return
        with torch.no_grad():
            self._step(optimizer)

    def _within_norm(self, gradient: Tensor) -> Tensor:
        """Return the gradient, scaled to `clip_norm` where it is longer."""
        if self._clip_norm is None or self._clipped is None:
            return gradient
        norms = [torch.linalg.vector_norm(gradient[place]) for place in self._slices]
        scale = self._clip_norm / (
            torch.linalg.vector_norm(torch.stack(norms)) + 1e-6
        )  # as torch.nn.utils has it
        return torch.mul(gradient, scale.clamp(max=1.0), out=self._clipped)

    def drop_gradient(self) -> None:
        """Hold the last step's gradient no more, where its memory is another's and wanted back."""
        self._gradient = None
        for parameter in self._parameters:
            parameter.grad = None

    def move_to(self, vector: Tensor) -> None:
        """Continue with other memory that holds the same numbers, `(n,)`."""
        self._vector = vector
        for parameter, place in zip(self._parameters, self._slices, strict=True):
            parameter.data = vector[place]

    def step_as(self, gradient: Tensor, learning_rate: float, spans: Sequence[Span], rate: float) -> None:
        """Update the vector with other options than at the start, and only in places.

        Where a span ends inside a slice with equal treatment of all numbers so far, the slice is cut in two.
        Numbers outside all spans rest: neither momentum nor decay moves them.

        Args:
            gradient: `(n,)`, not changed.
            learning_rate: learning rate to which that of every span has its ratio to `rate`.
            spans: spans with their options; ordered, without overlap.
            rate: learning rate that the spans' learning rates are relative to.
        """
        self._cut([span.start for span in spans] + [span.stop for span in spans])
        for span in spans:
            self._cover(span)
        optimizer, options = self._optimizer, self._options
        if optimizer is None or options is None:
            return
        scale = learning_rate / rate if rate else 1.0
        for group, place in zip(optimizer.param_groups, self._slices, strict=True):
            inside = (each for each in spans if each.start <= place.start and place.stop <= each.stop)
            found = next(inside, None)
            group["params"][0].grad = None if found is None else gradient[place]
            if found is not None:
                own = float(found.options["lr"])
                group.update(_tuples(found.options) | {"lr": own if scale == 1.0 else own * scale})
        with torch.no_grad():
            self._step(optimizer)
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.update(before or {})
        self._gradient = None

    def _cut(self, edges: Iterable[int]) -> None:
        """Cut slices in two, with copies of their state, so that every edge that is inside of one is between two."""
        optimizer = self._optimizer
        if optimizer is None:
            self._options = []
            return
        if self._options is None:
            self._options = [
                {key: group[key] for key in group if key != "params"} for group in optimizer.param_groups
            ]
        for edge in sorted(set(edges)):
            inside = [at for at, place in enumerate(self._slices) if place.start < edge < place.stop]
            for at in inside:
                place, group = self._slices[at], optimizer.param_groups[at]
                old = group["params"][0]
                state = optimizer.state.pop(old, {})
                parts = [slice(place.start, edge), slice(edge, place.stop)]
                news = [self._parameter(part) for part in parts]
                for new, part in zip(news, parts, strict=True):
                    inner = slice(part.start - place.start, part.stop - place.start)
                    if state:
                        optimizer.state[new] = {key: _part(value, old, inner) for key, value in state.items()}
                groups = [{**group, "params": [new]} for new in news]
                optimizer.param_groups[at : at + 1] = groups
                self._slices[at : at + 1] = parts
                self._options[at : at + 1] = [self._options[at]] * 2
                self._rates[at : at + 1] = [self._rates[at]] * 2
        self._changed()

    def _cover(self, span: Span) -> None:
        """Make slices for what of a span none covers: what was frozen when the optimizer was made."""
        begins = span.start
        inside = [place for place in self._slices if span.start <= place.start and place.stop <= span.stop]
        missing = []
        for place in inside:
            if begins < place.start:
                missing.append(slice(begins, place.start))
            begins = place.stop
        if begins < span.stop:
            missing.append(slice(begins, span.stop))
        for place in missing:
            group = {"params": [self._parameter(place)], **_tuples(span.options)}
            if self._optimizer is None:
                self._optimizer, self._options = _made(self._kind, [group]), [None]
                self._slices, self._rates = [place], [group["lr"]]
            else:
                assert self._options is not None, "it has been cut"
                at = sum(each.start < place.start for each in self._slices)
                self._optimizer.add_param_group(group)
                self._optimizer.param_groups.insert(at, self._optimizer.param_groups.pop())
                self._slices.insert(at, place)
                self._options.insert(at, None)
                self._rates.insert(at, group["lr"])
        self._changed()

    def _parameter(self, place: slice) -> nn.Parameter:
        made = nn.Parameter(self._vector[place])
        made.data = self._vector[place]
        return made

    def _changed(self) -> None:
        assert self._optimizer is None or self._options is not None, "it has been cut"
        self._gradient = None
        self._parameters = (
            [group["params"][0] for group in self._optimizer.param_groups] if self._optimizer else []
        )
        self._is_sgd = self._is_sgd and None not in (self._options or [])

    def _show(self, gradient: Tensor, groups: list[dict[str, Any]]) -> None:
        """Make a vector the gradient of all slices, except for those of other plans than the first."""
        self._gradient = gradient
        whole = self._slices == [slice(0, len(gradient))]
        for number, (group, place) in enumerate(zip(groups, self._slices, strict=True)):
            rests = self._options is not None and self._options[number] is None
            group["params"][0].grad = None if rests else gradient if whole else gradient[place]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of `state`, sooner."""
        optimizer = self._optimizer
        return {} if optimizer is None else _tensors_of(optimizer)

    def state(self) -> Packed:
        """Return all that a resumed optimizer needs, as named tensors and JSON-able facts."""
        if self._optimizer is None:
            return {}, {}
        tensors, facts = pack_optimizer_state(self._optimizer)
        if self._options is None:
            return tensors, facts
        cut = [
            [place.start, place.stop, options is None]
            for place, options in zip(self._slices, self._options, strict=True)
        ]
        return tensors, facts | {"slices": cut}

    def load_state(self, state: Packed) -> None:
        """Load what `state` returned, cut as it was then.

        Raises:
            RequestError: the state is of another optimizer, or of other parameters.
        """
        with restoring("the optimizer's saved state"):
            self._load(*state)

    def _load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        cut = facts.get("slices", ())
        if cut:
            self._cut([edge for start, stop, _ in cut for edge in (start, stop)])
            for (start, stop, later), options in zip(cut, facts["groups"], strict=True):
                if later:
                    self._cover(Span(start, stop, options))
        if self._optimizer is not None:
            for name, value in tensors.items():
                own = self._parameters[int(name.split(".", 2)[1])]
                if self._kind in ELEMENTWISE and value.ndim and value.shape != own.shape:
                    raise ValueError(f"{name} has the shape {tuple(value.shape)}")
            unpack_optimizer_state(self._optimizer, tensors, facts)


def _made(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    maker: Any = KINDS[kind]  # every class of the table has defaults for missing options
    made: torch.optim.Optimizer = maker(groups)
    return made


def _unwrapped(kind: str) -> Callable[[torch.optim.Optimizer], object]:
    method: Any = KINDS[kind].step
    while (inner := getattr(method, "__wrapped__", None)) is not None:
        method = inner
    step: Callable[[torch.optim.Optimizer], object] = method
    return step


def _part(value: Any, parameter: Tensor, place: slice) -> Any:
    """Return the optimizer state of a part of a parameter."""
    if not isinstance(value, Tensor):
        return value
    return value[place].clone() if value.shape == parameter.shape else value.clone()


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _is_ordinary(group: dict[str, Any], momentum: Tensor | None) -> bool:
    """Return whether a group's step is the three operations: the first step makes the momentum, which torch does."""
    return (
        not group["maximize"]
        and not group["differentiable"]
        and bool(group["momentum"]) == (momentum is not None)
    )


def pack_optimizer_state(optimizer: torch.optim.Optimizer) -> Packed:
    """Pack an optimizer's state.

    Returns:
        Its tensors, live and not copied: write or copy them before the next step; and its facts.

    Raises:
        RequestError: the state holds something that is neither a tensor nor a plain value.
    """
    kind = type(optimizer).__name__
    tensors = _tensors_of(optimizer)
    values: dict[str, dict[str, Any]] = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                values.setdefault(str(index), {})[key] = _plain(value, f"{kind}'s state {key!r}")
    groups = [
        {key: _plain(value, f"{kind}'s option {key!r}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return tensors, {"optimizer": kind, "state": values, "groups": groups, "shapes": _shapes(optimizer)}


def _tensors_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"state.{index}.{key}": value
        for index, parameter in enumerate(_parameters(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def unpack_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Put a state back, as copies and bit for bit.

    Args:
        optimizer: optimizer of the same class and over parameters of the same shapes as the packed one; changed in
            place.
        tensors: result of `pack_optimizer_state`.
        facts: facts of that result; may have been through JSON.

    Raises:
        RequestError: the state is of another optimizer, or of other parameters; the optimizer is unchanged.
    """
    with restoring("the optimizer's saved state"):
        _unpack(optimizer, tensors, facts)


def _unpack(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    parameters = _parameters(optimizer)
    _check_same(optimizer, facts)
    check_options(type(optimizer).__name__, optimizer.param_groups, facts["groups"])
    states: list[dict[str, Any]] = [{} for _ in parameters]
    for index, values in facts["state"].items():
        states[int(index)].update(values)
    for name, value in tensors.items():
        _, index, key = name.split(".", 2)
        states[int(index)][key] = _placed(value, parameters[int(index)])
    for group, options in zip(optimizer.param_groups, facts["groups"], strict=True):
        group.update({key: _tuple(value) for key, value in options.items()})
    optimizer.state.clear()
    optimizer.state.update(
        {parameter: state for parameter, state in zip(parameters, states, strict=True) if state}
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _plain(value: Any, where: str) -> Any:
    try:
        json.dumps(value)
    except TypeError:
        raise RequestError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold") from None
    return value


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def _check_same(optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> None:
    kind, shapes = type(optimizer).__name__, _shapes(optimizer)
    if facts["optimizer"] != kind:
        raise RequestError(
            f"the saved state is of the optimizer {facts['optimizer']}, not {kind}: resume with it"
        )
    if facts["shapes"] != shapes:
        raise RequestError(
            f"the saved {kind} state is of other parameters ({_size(facts['shapes'])}) than these "
            f"({_size(shapes)}): resume with the same model and number of servers"
        )


_CHOSEN_BY_TORCH = ("foreach", "fused")
"""Options that are None, true or false, by version and device."""


def check_options(what: str, groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that saved options have the types of an optimizer's own; a schedule may have added some.

    Args:
        what: name of the optimizer, for the error.
        groups: parameter groups of the optimizer.
        saved: options of as many groups.

    Raises:
        RequestError: an option has a value of another type, or one that float32 cannot hold.
    """
    for group, options in zip(groups, saved, strict=True):
        for key, value in options.items():
            own = group.get(key)
            misfit = own is not None and key not in _CHOSEN_BY_TORCH and _kind(value) != _kind(own)
            if misfit or not _fits_float32(value):
                raise RequestError(
                    f"the saved {what} state has {key}={value!r:.40}, which cannot be used: take another"
                )


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_kind(each) for each in value]
    return (
        bool if isinstance(value, bool) else float if isinstance(value, int | float | Tensor) else type(value)
    )


def _fits_float32(value: Any) -> bool:
    return not isinstance(value, int | float) or abs(value) <= torch.finfo(torch.float32).max


def _size(groups: list[list[list[int]]]) -> str:
    numbers = sum(prod(shape) for shapes in groups for shape in shapes)
    return f"{sum(map(len, groups))} tensors of {numbers} numbers"


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    # counters such as `step` stay with the program, so that reading them never waits for a GPU
    counter = value.ndim == 0 and parameter.ndim > 0
    return value.detach().to("cpu" if counter else parameter.device, copy=True)


def _tuple(value: Any) -> Any:
    # JSON has lists only; torch's options, such as `betas`, are tuples
    return tuple(value) if isinstance(value, list) else value


_State = dict[str, Any]


class UndoLog:
    """Copies of a vector, and of what its optimizer keeps, in memory that is made once.

    Args:
        vector: `(n,)`, which the optimizer changes.
        optimizer: optimizer of this vector.
    """

    def __init__(self, vector: Tensor, optimizer: FlatOptimizer) -> None:
        self._vector = vector
        self._optimizer = optimizer.inner
        self._before = torch.empty_like(vector)
        self._states: list[_State] = []

    def note(self) -> None:
        """Copy what there is now; called before a step."""
        if self._optimizer is None:  # nothing of the vector is trained
            return
        self._before.copy_(self._vector)
        now = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters()]
        memory = self._states or [{} for _ in now]
        self._states = [_copied(state, old) for state, old in zip(now, memory, strict=True)]

    def restore(self) -> None:
        """Restore all that has been noted."""
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
        self._states = []  # these copies are the optimizer's own now

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


_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
_COMPILER = "torch._dynamo"
_HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_KNOWN_FORM = "__dynamo_disable"
"""Key of torch for the form of a method that is kept out of compiled code."""


def make_optimizers_quickly() -> None:
    """From now on, in this process and in those forked from it, optimizers do without torch's compiler.

    Until it is imported: code that is compiled leaves the methods of optimizers out, as usual.
    """
    if _COMPILER in sys.modules or any(isinstance(finder, _CompilerWatch) for finder in sys.meta_path):
        return
    methods = [getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None) for name in _METHODS]
    quick = [method for method in methods if method is not None and not hasattr(method, _KNOWN_FORM)]
    for method in quick:
        setattr(method, _KNOWN_FORM, method)
    sys.meta_path.insert(0, _CompilerWatch(quick))


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its steps call something else: hooks, or what a program has put in the place of `step`."""
    own = optimizer.__dict__.get("step")
    return (
        bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        or any(getattr(torch_optimizer, name, True) for name in _HOOKS_OF_ALL)
        or not (own is None or hasattr(own, "_wrapped_by_lr_sched"))
    )


def quick_step(optimizer: torch.optim.Optimizer) -> Callable[[], None] | None:
    """Return a step without a closure that does not import torch's compiler; None: `step` itself is the only one.

    Most of torch's optimizers import it in `step`, to break the graph that is compiled. Where it is not imported there
    is none.
    """
    kind = type(optimizer)
    decorated = getattr(kind.step, "__wrapped__", None)  # without the calls of hooks
    plain = getattr(decorated, "__wrapped__", None)
    if (
        _COMPILER in sys.modules
        or decorated is None
        or plain is None
        or _COMPILER not in decorated.__code__.co_names
        or optimizer.defaults["differentiable"]
        or has_hooks(optimizer)
    ):
        return None

    def step() -> None:
        with record_function(f"Optimizer.step#{kind.__name__}.step"), torch.no_grad():
            plain(optimizer)

    return step


class _CompilerWatch(MetaPathFinder):
    """Gives methods the form back that torch makes of them, once its compiler is imported; finds no module."""

    def __init__(self, methods: Sequence[Callable[..., Any]]) -> None:
        self._methods = methods

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == _COMPILER:
            sys.meta_path.remove(self)
            for method in self._methods:
                method.__dict__.pop(_KNOWN_FORM, None)
