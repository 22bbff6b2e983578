"""An optimiser of torch on one flat vector: its step without torch's overhead, its state, and its undo log.

The vector is divided into spans, each with the options that its optimiser has there. Kinds of optimiser that
treat every number alike may run on any slice of the vector; those that look at whole layers keep each
parameter as a span of its own. Kinds are known by the names of their classes.

Steps are torch's, without the wrappers that torch puts around `step`: nobody can hook an optimiser that no one
else sees, and the wrapper that keeps it out of compiled code imports the compiler, which takes a second. Steps of
SGD on the CPU are written out, in the same operations and the same order as `torch.optim.SGD` without `foreach`
and `fused`, so with the same bits:

    d = g + weight_decay * w      m = momentum * m + (1 - dampening) * d      w = w - lr * m

For a model of a few thousand numbers, torch's checks and preparations take as long as the three operations: without
this the `mlp` of `benchmarks/step-efficiency` is 6 % slower alone.

A state is named tensors and JSON-able facts, so that a checkpoint needs no pickle:

    state.<index>.<key>     a tensor of the state of parameter number <index>, counted over all groups
    facts["state"]          the state's other values, {index: {key: value}}
    facts["groups"]         what `param_groups` holds besides the parameters, one dict a group
    facts["shapes"]         of the parameters, one list a group
    facts["optimizer"]      the class's name

`Optimizer.load_state_dict` is not used to go back: it casts every floating tensor but `step` to the
parameter's dtype, which turns NAdam's float32 product of momenta into float64 and so changes the numbers of a
resumed run.

`UndoLog` copies what a step is about to change, so that the step can be undone to the bit.

`make_optimizers_quickly` makes optimisers without importing torch's compiler, which takes nearly as long as
importing torch. torch keeps some methods of its optimisers out of compiled code, and imports the compiler to
do so when the first of them is called. Nothing here compiles a function that makes an optimiser or asks for
its state, so there is nothing to be kept out of. This is the one place that knows how torch 2.13 does it;
where another torch does it otherwise, nothing happens, and the compiler is imported after all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.training.optimizers.downpour_adagrad import DownpourAdagradOptimizer
from polyrhythm.training.optimizers.lamb import LAMBOptimizer
from polyrhythm.training.optimizers.lars import LARSOptimizer
from polyrhythm.training.optimizers.ngsgd import NaturalGradientSGD
from polyrhythm.training.optimizers.tf1_rmsprop import TF1RMSPropOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping


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

KINDS = ELEMENTWISE | LAYERWISE


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


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Make one span of neighbours with the same options."""
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
        RequestError: they are.
    """
    end = 0
    for span in spans:
        if type(span.start) is not int or type(span.stop) is not int or not end <= span.start < span.stop:
            raise RequestError(
                "the spans of an optimiser plan must be whole numbers, in order and without overlap"
            )
        end = span.stop


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
        self._step = _unwrapped(kind)
        self._parameters = [group["params"][0] for group in groups]
        self._is_sgd = kind == "SGD" and vector.dtype == torch.float32 and not vector.is_cuda
        self._gradient: Tensor | None = None
        self._rates = [group["lr"] for group in groups]
        self._rate = rate

    @property
    def inner(self) -> torch.optim.Optimizer | None:
        """The optimiser, with a parameter a slice; None where nothing is trained."""
        return self._optimizer

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Update the vector.

        Args:
            gradient: `(n,)`, not changed.
            learning_rate: of the first span of the whole vector, of which this one may be a part; all spans keep
                their ratio to it.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return
        groups = optimizer.param_groups
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

    def _show(self, gradient: Tensor, groups: list[dict[str, Any]]) -> None:
        """Make a vector the gradient of all slices."""
        self._gradient = gradient
        whole = self._slices == [slice(0, len(gradient))]
        for group, place in zip(groups, self._slices, strict=True):
            group["params"][0].grad = gradient if whole else gradient[place]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that a resumed optimiser needs, as named tensors and JSON-able facts."""
        return pack_optimizer_state(self._optimizer) if self._optimizer is not None else ({}, {})

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Load what `state` returned."""
        if self._optimizer is not None:
            unpack_optimizer_state(self._optimizer, tensors, facts)


def _made(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    maker: Any = KINDS[kind]  # every class of the table has defaults for what the groups do not say
    made: torch.optim.Optimizer = maker(groups)
    return made


def _unwrapped(kind: str) -> Callable[[torch.optim.Optimizer], object]:
    method: Any = KINDS[kind].step
    while (inner := getattr(method, "__wrapped__", None)) is not None:
        method = inner
    step: Callable[[torch.optim.Optimizer], object] = method
    return step


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _is_ordinary(group: dict[str, Any], momentum: Tensor | None) -> bool:
    """Return whether a group's step is the three operations: the first step makes the momentum, which torch does."""
    return (
        not group["maximize"]
        and not group["differentiable"]
        and bool(group["momentum"]) == (momentum is not None)
    )


def pack_optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Pack an optimiser's state.

    Returns:
        Its tensors, live and not copied: write or copy them before the next step; and its facts.

    Raises:
        RequestError: the state holds something that is neither a tensor nor a plain value.
    """
    kind = type(optimizer).__name__
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"state.{index}.{key}"] = value
            else:
                values.setdefault(str(index), {})[key] = _plain(value, f"{kind}'s state {key!r}")
    groups = [
        {key: _plain(value, f"{kind}'s option {key!r}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return tensors, {"optimizer": kind, "state": values, "groups": groups, "shapes": _shapes(optimizer)}


def unpack_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Put a state back, as copies and bit for bit.

    Args:
        optimizer: of the same class and over parameters of the same shapes as the packed one; changed in
            place.
        tensors: what `pack_optimizer_state` gave.
        facts: the same; may have been through JSON.

    Raises:
        RequestError: the state is of another optimiser, or of other parameters; the optimiser is unchanged.
    """
    parameters = _parameters(optimizer)
    _check_same(optimizer, facts)
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
            f"the saved state is of the optimiser {facts['optimizer']}, not {kind}: resume with it"
        )
    if facts["shapes"] != shapes:
        raise RequestError(
            f"the saved {kind} state is of other parameters ({_size(facts['shapes'])}) than these "
            f"({_size(shapes)}): resume with the same model and number of servers"
        )


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
        """Copy what there is now; called before a step."""
        if self._optimizer is None:  # nothing of the vector is trained
            return
        self._before.copy_(self._vector)
        now = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters()]
        memory = self._states or [{} for _ in now]
        self._states = [_copied(state, old) for state, old in zip(now, memory, strict=True)]

    def take_back(self) -> None:
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


_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
_KNOWN_FORM = "__dynamo_disable"
"""Where torch looks for the form of a method that is kept out of compiled code, before it makes one."""


def make_optimizers_quickly() -> None:
    """From now on, in this process and in those forked from it, optimisers do without torch's compiler."""
    for name in _METHODS:
        method = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if method is not None and not hasattr(method, _KNOWN_FORM):
            setattr(method, _KNOWN_FORM, method)
