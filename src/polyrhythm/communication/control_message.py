"""Typed messages: one frozen dataclass per kind, and those with which members of a view agree on the next one.

On the wire the fields of a message are JSON; where one of them holds tensors, all are one safetensors payload.
Decoding checks every field against its declared type, so a decoded message conforms to its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from torch import Tensor

from polyrhythm.communication.log import Report
from polyrhythm.communication.message import (
    Kind,
    MalformedMessage,
    Message,
    pack_json,
    pack_tensors,
    unpack_json,
    unpack_tensors,
)

VIEW_TAG = 2
"""Tag of a view, and of what else is sent to a worker that waits for one."""


class ControlMessage:
    """Base of the frozen dataclasses: their layout on the wire.

    Attributes:
        KIND: kind of the message, unique among the classes.
        TAG: tag of the message.
    """

    KIND: ClassVar[Kind]
    TAG: ClassVar[int] = 0

    def message(self) -> Message:
        """Return the message to send."""
        own: Any = type(self)
        values = vars(self)
        if not values:
            return Message(self.KIND, tag=self.TAG)
        held = _tensor_fields(own)
        # Most are numbers and texts, sent by thousands of simulated workers.
        facts = {
            name: value if type(value) in _SCALARS else _plain(value)
            for name, value in values.items()
            if name not in held
        }
        if not held:
            return Message(self.KIND, pack_json(facts), tag=self.TAG)
        tensors = {each: tensor for name in held for each, tensor in _named(name, values[name]).items()}
        return Message(self.KIND, pack_tensors(tensors, facts), tag=self.TAG)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Return the dataclass in a received message.

        Raises:
            MalformedMessage: it is of another kind, or a field is missing, unknown or of another type.
        """
        own: Any = cls
        kinds = _types(own)
        if message.kind is not cls.KIND or (message.tensor is None) is bool(kinds):
            raise MalformedMessage(f"a {message.kind.name} message is no {cls.__name__}")
        if message.tensor is None:
            return cls()
        tensors: dict[str, Tensor] = {}
        held = _tensor_fields(own)
        if held:
            tensors, facts = unpack_tensors(message.tensor)
        else:
            facts = unpack_json(message.tensor)
        found = {name: _unnamed(name, kinds[name], tensors) for name in held}
        try:
            if not isinstance(facts, dict) or facts.keys() != kinds.keys() - found.keys():
                raise ValueError(f"its fields are {', '.join(map(str, facts))}")
            valid = {
                name: value
                if type(value) is kinds[name] and kinds[name] in _SCALARS
                else checked(value, kinds[name])
                for name, value in facts.items()
            }
        except (ValueError, TypeError) as error:
            raise MalformedMessage(f"a {message.kind.name} message is no {cls.__name__}: {error}") from None
        return cls(**found, **valid)


_SCALARS = frozenset([int, str, bool])
"""Types with values that are sent unchanged."""


@cache
def _types(kind: Any) -> dict[str, Any]:
    """Return the declared types of a dataclass's fields, by name."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


@cache
def _tensor_fields(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that hold tensors."""
    return tuple(name for name, of in _types(kind).items() if of is Tensor or of == dict[str, Tensor])


def _named(name: str, value: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    return {f"{name}.{key}": tensor for key, tensor in value.items()}


def _unnamed(name: str, kind: Any, tensors: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    if kind is Tensor:
        if name not in tensors:
            raise MalformedMessage(f"a message lacks its {name}")
        return tensors[name]
    prefix = f"{name}."
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(part) for name, part in vars(value).items()}
    return value


def checked(value: Any, kind: Any) -> Any:
    """Return a JSON value converted to its declared type: lists become tuples, texts of numbers become keys.

    Raises:
        ValueError: it is of another type.
    """
    if type(value) is kind:
        return value
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        if value is None and NoneType in parts:
            return None
        return checked(value, next(part for part in parts if part is not NoneType))
    if origin is tuple and isinstance(value, list):
        each = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return tuple([checked(part, of) for part, of in zip(value, each, strict=True)])
    if origin is list and isinstance(value, list):
        return [checked(part, parts[0]) for part in value]
    if origin is dict and isinstance(value, dict):
        key_of: Callable[[str], Any] = int if parts[0] is int else str
        return {key_of(key): checked(part, parts[1]) for key, part in value.items()}
    if isinstance(value, dict) and is_dataclass(kind) and isinstance(kind, type):
        kinds = _types(kind)
        if value.keys() != kinds.keys():
            raise ValueError(f"the fields of {kind.__name__} are {', '.join(kinds)}")
        return kind(**{name: checked(part, kinds[name]) for name, part in value.items()})
    if kind is Any or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{value!r} is no {kind.__name__ if origin is None else kind}")


@dataclass(frozen=True, kw_only=True)
class MembershipView(ControlMessage):
    """Workers that train together from now on.

    Attributes:
        number: number of previous views.
        workers: indices of the members among all workers of the run, in order; worker 0 is the coordinator.
        generations: number of previous processes of each member's rank.
        step: steps done by the newest member.
        over: whether members only have to leave.
        absences: step from which workers are absent, and which, oldest first, this view's last.
        missed: step of the others at which a worker was missed, and which, replaced or not.
        since: per entry of `missed`, the first and last step without effect on the others.
        begins: first entry of the log that no member had opened.
        gives: states to send: the worker that has it, the worker that begins with it.
        hands: results of the log to send: number of the entry, the worker that has it, the worker that lacks it.
    """

    KIND = Kind.REGROUP
    TAG = VIEW_TAG
    number: int
    workers: tuple[int, ...]
    generations: tuple[int, ...] = ()
    step: int = 0
    over: bool = False
    absences: tuple[tuple[int, tuple[int, ...]], ...] = ((0, ()),)
    missed: tuple[tuple[int, int], ...] = ()
    since: tuple[tuple[int, int], ...] = ()
    begins: int = 0
    gives: tuple[tuple[int, int], ...] = ()
    hands: tuple[tuple[int, int, int], ...] = ()

    @property
    def leader(self) -> int:
        """Generation of the coordinator that made the view."""
        return self.generations[0] if self.generations else 0


@dataclass(frozen=True, kw_only=True)
class StepBroken(ControlMessage):
    """Report of a worker that cannot finish a step, or a newcomer without one, and waits for the next view.

    Attributes:
        number: number of the broken view.
        report: progress of the worker.
        generation: number of previous processes of its rank.
        view: the broken view, for a coordinator that has not made it.
    """

    KIND = Kind.BROKEN
    number: int
    report: Report
    generation: int = 0
    view: MembershipView | None = None

    @property
    def fresh(self) -> bool:
        """Whether the worker holds no parameters yet."""
        return self.report.fresh
