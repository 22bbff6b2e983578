"""Control messages: messages of ranks outside of training, one frozen dataclass per kind.

    worker ── EnterWorker ─────▶ coordinator  replacement asks to take part        ◀── Welcome
    all    ◀───── EnterLeader ── coordinator  replacement of the coordinator       ── Introduction, then WorkerState ──▶
    worker ── StepBroken ──────▶ coordinator  a step cannot be finished            ◀── MembershipView
    worker ◀───── RegroupAt ──── coordinator  regroup before a later step
    worker ◀───── RegroupNow ─── coordinator  regroup, although waiting elsewhere
    worker ── EventReport, WorkerState or Account, TakenBatches ──▶ coordinator    ── MayLeave or FinalModel ──▶
    server ── EventReport, ShardState, ServerReady, ServerReport ─▶ coordinator    ── ShardStateRequest ──▶

On the wire the fields of a message are JSON; where one of them holds tensors, all are one safetensors payload.
Decoding checks every field against its declared type, so a decoded message conforms to its class.

Tags separate what a rank waits for: a worker that waits for a view leaves the coordinator's other messages unread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
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
from polyrhythm.events import Event, from_json

WELCOME_TAG, VIEW_TAG, LEADER_TAG, CALL_TAG = 1, 2, 3, 4
"""Tags of messages to a worker: its welcome, a view, announcements of coordinator and departure, a call to regroup."""


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


@dataclass(frozen=True)
class EventReport(ControlMessage):
    """An event of this rank, for the run's log.

    Attributes:
        event: the event.
    """

    KIND = Kind.EVENT
    event: Event

    def message(self) -> Message:
        """Return the message to send."""
        return Message(Kind.EVENT, pack_json(self.event.to_json()))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Return the report in a message.

        Raises:
            MalformedMessage: it holds no event.
        """
        if message.kind is not Kind.EVENT or message.tensor is None:
            raise MalformedMessage(f"a {message.kind.name} message is no event")
        try:
            return cls(from_json(unpack_json(message.tensor)))
        except (ValueError, AttributeError) as error:
            raise MalformedMessage(f"a message holds no event: {error}") from None


@dataclass(frozen=True)
class Account(ControlMessage):
    """Progress of a worker. The last message of a dry run's worker; otherwise a part of `WorkerState`.

    Attributes:
        worker: index of the worker.
        step: steps done since the run began.
        session_steps: steps done since this process started.
        session_images: images seen since this process started.
        epoch_images: images seen in the current epoch.
        epoch_loss: sum of the training loss over those.
        bytes_sent: bytes sent by the strategy on this worker, since this process started.
        staleness: number of gradients applied at each staleness since the run began, where the worker
            knows it.
        stopped: whether the worker was stopped early.
        final: whether the worker has left.
        through: whether it has found that no batches remain.
        arrivals: record of received messages, as `Arrivals` writes it, once it has left; empty if not recorded.
        peak_bytes: peak memory of training on it, where that is measured.
    """

    KIND = Kind.ACCOUNT
    worker: int
    step: int
    session_steps: int
    session_images: int
    epoch_images: int
    epoch_loss: float
    bytes_sent: int
    staleness: dict[str, int]
    stopped: bool = False
    final: bool = False
    through: bool = False
    arrivals: dict[str, str] = field(default_factory=dict)
    peak_bytes: int = 0


@dataclass(frozen=True)
class EnterWorker(ControlMessage):
    """Request of a replacement of a failed worker to take part.

    Attributes:
        generation: number of previous processes of its rank.
    """

    KIND = Kind.JOIN
    generation: int


@dataclass(frozen=True)
class Welcome(ControlMessage):
    """State that a replacement needs and no server holds.

    Attributes:
        untrained: untrained tensors (batch-norm statistics, frozen parameters) of the coordinator, by name.
        time_s: seconds since training started, on the run's clock.
        begun: progress of other numbers of workers in unfinished epochs, as `Begun` writes it.
    """

    KIND = Kind.WELCOME
    TAG = WELCOME_TAG
    untrained: dict[str, Tensor]
    time_s: float
    begun: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EnterLeader(ControlMessage):
    """Announcement of a replacement of worker 0 as the coordinator, with a request for introductions.

    Attributes:
        generation: number of previous coordinators.
    """

    KIND = Kind.LEAD
    TAG = LEADER_TAG
    generation: int


@dataclass(frozen=True)
class Introduction(ControlMessage):
    """First message of a worker to a new coordinator.

    Attributes:
        generation: number of previous processes of its rank.
        behind: whether it had done fewer steps than the coordinator in the checkpoint from which the run resumed.
        record_follows: whether its latest state is its next message.
        untrained: untrained tensors, see `Welcome`; empty in a dry run.
    """

    KIND = Kind.INTRODUCTION
    generation: int
    behind: bool
    record_follows: bool
    untrained: dict[str, Tensor]


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
        since: first and last step without effect on the others, for each of these.
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

    @property
    def name(self) -> str:
        """Name of these workers' communicator; two coordinators may make views of the same number."""
        return f"workers {self.number} of {self.leader}"


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


@dataclass(frozen=True)
class RegroupAt(ControlMessage):
    """Request to regroup before a step.

    Attributes:
        number: number of the present view.
        step: number of the step.
    """

    KIND = Kind.REGROUP_AT
    TAG = LEADER_TAG
    number: int
    step: int


@dataclass(frozen=True)
class RegroupNow(ControlMessage):
    """Notice that the coordinator regroups: workers that wait for it elsewhere must stop waiting.

    Attributes:
        number: number of the broken view.
    """

    KIND = Kind.CALL
    TAG = CALL_TAG
    number: int


@dataclass(frozen=True)
class Handover(ControlMessage):
    """State that the newest member of a view sends to those behind.

    Attributes:
        vector: `(size,)`, its parameters.
        part: tensors of its strategy part, by name.
        part_facts: remaining state of its strategy part.
    """

    KIND = Kind.HANDOVER
    vector: Tensor
    part: dict[str, Tensor]
    part_facts: Any


@dataclass(frozen=True)
class TakenBatches(ControlMessage):
    """Progress of a worker in its share of an epoch, in a loop of a user's own.

    Attributes:
        taken: number of batches taken.
        of: number of batches of the share.
    """

    KIND = Kind.TAKEN
    taken: int
    of: int


@dataclass(frozen=True)
class StepsCounted(ControlMessage):
    """Number of steps of a failed worker that a server has counted.

    Attributes:
        rank: rank of the worker.
        steps: number of steps that count.
        losses: number of processes of that rank that have failed.
    """

    KIND = Kind.COUNTED
    rank: int
    steps: int
    losses: int


@dataclass(frozen=True)
class MayLeave(ControlMessage):
    """Notice that the coordinator needs no more of a worker."""

    KIND = Kind.LEAVE
    TAG = LEADER_TAG


@dataclass(frozen=True)
class FinalModel(ControlMessage):
    """Final model of the run, with which a worker of a user's own loop may leave.

    Attributes:
        vector: `(size,)`, the parameters.
        buffers: buffers by name.
    """

    KIND = Kind.FINAL_MODEL
    TAG = LEADER_TAG
    vector: Tensor
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class ShardStateRequest(ControlMessage):
    """Request of the coordinator for the state of a shard of a server.

    Attributes:
        shard: number of the shard.
    """

    KIND = Kind.CHECKPOINT
    shard: int


@dataclass(frozen=True)
class ShardState(ControlMessage):
    """State of a shard: to the coordinator, for a checkpoint, and from it, where a run is resumed.

    Attributes:
        shard: number of the shard.
        tensors: tensors by name.
        facts: remaining state.
    """

    KIND = Kind.STATE
    shard: int
    tensors: dict[str, Tensor]
    facts: Any


@dataclass(frozen=True)
class ServerReady(ControlMessage):
    """Notice that the replacement of a failed server has all of its shards.

    Attributes:
        generation: number of previous processes of its rank.
    """

    KIND = Kind.READY
    generation: int
