"""A strategy's state, declared field by field: snapshots, resume, joining workers and resharding follow from it.

    class RoundsWorker:                                        ─▶ state, load_state: here
        fields = (                                             ─▶ another number of workers: `strategies.resharding`
            StateField("vector", Tensor, MEAN, at="_flat.vector"),
            StateField("optimizer", Part, MEAN),
            StateField("updated", int, reset(-1)),
        )

A field has a name in the checkpoint, a kind (a tensor, an object with a state of its own, or a JSON value of a type),
and its conversion to another number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal, get_args, get_origin

from torch import Tensor

from polyrhythm.communication.control_message import checked
from polyrhythm.errors import RequestError

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Named tensors and JSON-able facts: all that a resumed part needs."""

Merge = Literal["keep", "mean", "reset"]
"""Conversion of a field: unchanged, the weighted mean over all workers, or reset to a value."""

Per = Literal["run", "worker", "server", "pusher"]
"""Scope of a field.

run: the same on all workers; if kept, that of rank 0. worker: one per worker; new workers have none.
server: one per server. pusher: each server has a list with one element per pusher, or one entry per pusher with a name
that ends in the pusher's number.
"""

MergeFunction = Callable[[str, Sequence[State], Sequence[float]], State]
"""Return the entries of this field, made of the states of all workers and how much each counts."""


@dataclass(frozen=True)
class Start:
    """Starting point of a different number of workers.

    Attributes:
        step: first step of all workers, in the new count of steps.
        index: index of the worker or server of the new state.
        pushers: pushers of the server.
    """

    step: int
    index: int
    pushers: int = 0


@dataclass(frozen=True)
class Conversion:
    """Conversion of a field to another number of workers.

    Attributes:
        merge: conversion of its entries.
        per: scope of the field.
        to: function that returns the value of a fact after a reset; None: no reset value.
        equal: whether all workers hold the same bits.
        stored: whether checkpoints have it.
    """

    merge: Merge | MergeFunction
    per: Per
    to: Callable[[Start], Any] | None = None
    equal: bool = False
    stored: bool = True


COMMON = Conversion("keep", "run", equal=True)
"""The same on all workers."""
OF_FIRST = Conversion("keep", "run")
"""Every worker has its own; all continue from that of rank 0."""
MEAN = Conversion("mean", "run")
"""Every worker has its own; all continue from the mean, also of an optimizer's momenta."""
OWN = Conversion("keep", "worker")
"""Every worker has its own, and keeps it."""
JOINING = Conversion("keep", "run", stored=False)
"""In no checkpoint: a worker that joins between two steps copies it from another."""
OF_SERVER = Conversion("keep", "server")
"""Every server has its own, and keeps it."""


def reset(value: Any, per: Per = "run") -> Conversion:
    """Return the conversion of a field that is reset.

    Args:
        value: value after the reset, or a function that returns it.
        per: scope of the fact.
    """
    return Conversion("reset", per, value if callable(value) else lambda start: value)


class Part:
    """Kind of a field that is an object with a state of its own; its tensors have the field's name before theirs."""


_REQUIRED: Any = object()
UNCHANGED: Any = object()
"""See `StateField.absent`."""


@dataclass(frozen=True)
class StateField:
    """Declaration of a field of an object's state.

    Attributes:
        name: name of its entry in the state; of a `Part`, also the prefix of its tensors. Empty: a part, the
            last field, with entries named as in its own state.
        kind: `Tensor`, `Part`, `dict[int, Tensor]`, or the type of a JSON value.
        conversion: conversion of the field to another number of workers.
        at: attribute that holds it, with dots for attributes of attributes; default: the name after an underscore.
            An attribute that is None has no entry.
        absent: value if a state, of an older version, lacks the entry, or `UNCHANGED`; default: it is refused.
        loads: whether a state's value is restored.
        under: prefix of the names of its tensors, where it has several; default: its name.
    """

    name: str
    kind: Any
    conversion: Conversion = COMMON
    at: str = ""
    absent: Any = _REQUIRED
    loads: bool = True
    under: str | None = None

    @property
    def prefix(self) -> str:
        """Prefix of the names of its tensors, where it has several."""
        if self.under is not None:
            return self.under
        return self.name if not self.name or self.name.endswith(".") else f"{self.name}."

    def covers(self, entry: str) -> bool:
        """Whether an entry of a state belongs to the field."""
        return entry == self.name or (self._has_several and entry.startswith(self.prefix))

    def save(self, owner: object, state: State) -> None:
        """Add the field's entries to a state.

        Args:
            owner: object with the field.
            state: state of the fields before it.

        Raises:
            RequestError: the object has no such attribute.
        """
        tensors, facts = state
        try:
            value = attrgetter(self.attribute)(owner)
        except AttributeError as error:
            raise RequestError(
                f"{type(owner).__name__} declares the field {self.name!r} of its state, but {error}"
            ) from error
        if self.kind is Tensor:
            if value is not None:
                tensors[self.name] = value
        elif self.kind is Part:
            if value is not None:
                named, stated = value.state()
                tensors |= prefixed(self.prefix, named)
                facts |= {self.name: stated} if self.name else stated
        elif self._has_several:
            tensors |= {f"{self.prefix}{key}": each for key, each in value.items()}
        else:
            facts[self.name] = _plain(value)

    def load(self, owner: object, state: State) -> None:
        """Restore the field from a state; tensors are copied.

        Raises:
            ValueError: the state lacks it, or it has another type or shape than the field.
        """
        if not self.loads:
            return
        tensors, facts = state
        path, _, attribute = self.attribute.rpartition(".")
        holder = attrgetter(path)(owner) if path else owner
        now = getattr(holder, attribute)
        if self.kind is Part:
            if now is not None:
                own = facts.get(self.name, {}) if self.name else facts
                now.load_state((below(self.prefix, tensors), own))
        elif self.kind is Tensor:
            given = tensors.get(self.name)
            if given is None and self.absent is UNCHANGED:
                return
            if given is None or now is None:
                setattr(holder, attribute, self._absent() if given is None else given.clone())
            else:
                check_shape(self.name, given, now)
                now.copy_(given)
        elif self._has_several:
            named = below(self.prefix, tensors).items()
            setattr(holder, attribute, {int(key): each.clone() for key, each in named})
        elif self.name in facts:
            setattr(holder, attribute, checked(facts[self.name], self.kind))
        elif self.absent is not UNCHANGED:
            setattr(holder, attribute, self._absent())

    @property
    def attribute(self) -> str:
        """Attribute that holds it."""
        return self.at or f"_{self.name}"

    @property
    def _has_several(self) -> bool:
        return self.kind is Part or (get_origin(self.kind) is dict and get_args(self.kind)[1] is Tensor)

    def _absent(self) -> Any:
        if self.absent is _REQUIRED:
            raise ValueError(f"it lacks {self.name}")
        return copy(self.absent)


class Stateful:
    """Object with a state: the values of its fields.

    Attributes:
        fields: declarations of the state's fields.
    """

    __slots__ = ()
    fields: ClassVar[tuple[StateField, ...]] = ()

    def state(self) -> State:
        """Return all that it needs to continue: tensors that may still change, and JSON-able facts."""
        return self.save_fields(self._stored_fields())

    def load_state(self, state: State) -> None:
        """Restore what `state` returned.

        Raises:
            ValueError: an entry is missing, or of another type or shape.
        """
        self.load_fields(self._stored_fields(), state)

    def save_fields(self, fields: Sequence[StateField]) -> State:
        """Return the state of some fields."""
        found: State = {}, {}
        for field in fields:
            field.save(self, found)
        return found

    def load_fields(self, fields: Sequence[StateField], state: State) -> None:
        """Restore some fields; see `load_state`."""
        for field in fields:
            if field.name:
                field.load(self, state)
            else:
                rest = [
                    {name: each for name, each in of.items() if not _covered(self.fields, name)}
                    for of in state
                ]
                field.load(self, (rest[0], rest[1]))

    @classmethod
    def _stored_fields(cls) -> list[StateField]:
        return [field for field in cls.fields if field.conversion.stored]


def _covered(fields: Sequence[StateField], entry: str) -> bool:
    return any(field.name and field.covers(entry) for field in fields)


def check_shape(name: str, given: Tensor, own: Tensor) -> None:
    """Raise `ValueError` if a tensor of a state has another shape than the one that it replaces."""
    if given.shape != own.shape:
        raise ValueError(f"{name} has the shape {tuple(given.shape)}, not {tuple(own.shape)}")


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a name prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def without(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without a name prefix."""
    return {name: value for name, value in tensors.items() if not name.startswith(prefix)}


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with a prefix before their names, which `below` takes away."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _plain(value: Any) -> Any:
    """Return a copy of a value, as JSON has it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
