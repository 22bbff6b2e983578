"""Control messages: what ranks tell each other beside training, one frozen dataclass a kind.

    worker ── EnterWorker ─────▶ leader    successor asks to take part      ◀── Welcome
    all    ◀───── EnterLeader ── leader    successor of the leader          ── Introduction, then WorkerState ──▶
    worker ── StepBroken ──────▶ leader    a step cannot be finished        ◀── MembershipView
    worker ◀───── RegroupAt ──── leader    regroup before a step to come
    worker ◀───── RegroupNow ─── leader    regroup, though you wait elsewhere
    worker ── EventReport, WorkerState or Account, TakenBatches ──▶ leader  ── MayLeave or FinalModel ──▶
    server ── EventReport, ShardState, ServerReady, ServerReport ─▶ leader  ── ShardStateRequest ──▶

On the wire the fields of a message are JSON; where one of them holds tensors, all are one safetensors payload.
Decoding checks every field against its declared type, so a message that decodes holds what its class says.

A tag tells apart what a rank waits for: a worker that waits for a view leaves the leader's other messages alone.
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
"""Tags of what a worker receives: its welcome, a view, who leads and who may leave, a call to regroup now."""

NOTHING_DONE = -1
"""Steps, and meetings, of a worker that holds no parameters yet."""


class ControlMessage:
    """Base of the frozen dataclasses: how they are laid out on the wire.

    Attributes:
        KIND: of the message; no other class has it.
        TAG: of the message.
    """

    KIND: ClassVar[Kind]
    TAG: ClassVar[int] = 0

    def message(self) -> Message:
        """Return the message as it is sent."""
        own: Any = type(self)
        values = vars(self)
        if not values:
            return Message(self.KIND, tag=self.TAG)
        held = _tensor_fields(own)
        # Most are numbers and texts, of which thousands of simulated workers send some.
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
        """Return the dataclass that a received message holds.

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
"""Whatever value they have may be sent as it is."""


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
    """Return a value out of JSON as a declared type has it: lists become tuples, texts of numbers become keys.

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
        """Return the message as it is sent."""
        return Message(Kind.EVENT, pack_json(self.event.to_json()))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Return the report that a message holds.

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
    """What a worker has done. The last message of a dry run's worker; otherwise a part of `WorkerState`.

    Attributes:
        worker: its index.
        step: steps done since the run began.
        session_steps: of those, since this process started.
        session_images: seen since this process started.
        epoch_images: seen in the epoch under way.
        epoch_loss: sum of the training loss over those.
        bytes_sent: by the strategy on this worker, since this process started.
        staleness: how many gradients were applied at which staleness since the run began, where the worker
            knows it.
        stopped: whether the worker was stopped early.
        final: whether the worker has left.
        through: whether it has found nothing left to do.
        arrivals: whom it has heard, as `Arrivals` writes it, once it has left; empty if nothing was noted.
        peak_bytes: the most memory that training has taken on it, where that is measured.
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
    """A successor of a lost worker asks to take part.

    Attributes:
        generation: how many processes have had its rank before it.
    """

    KIND = Kind.JOIN
    generation: int


@dataclass(frozen=True)
class Welcome(ControlMessage):
    """What a successor needs that no server holds.

    Attributes:
        untrained: what is not trained (batch-norm statistics, frozen parameters) of the leader, by name.
        time_s: seconds since training started, on the run's clock.
        begun: what other numbers of workers did of epochs that were not over, as `Begun` writes it.
    """

    KIND = Kind.WELCOME
    TAG = WELCOME_TAG
    untrained: dict[str, Tensor]
    time_s: float
    begun: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EnterLeader(ControlMessage):
    """A successor of worker 0 leads from now on, and asks for introductions.

    Attributes:
        generation: how many have led before it.
    """

    KIND = Kind.LEAD
    TAG = LEADER_TAG
    generation: int


@dataclass(frozen=True)
class Introduction(ControlMessage):
    """What a worker tells a new leader first.

    Attributes:
        generation: how many processes have had its rank before it.
        behind: whether it had done fewer steps than the leader in the checkpoint from which the run goes on.
        record_follows: whether its latest state is its next message.
        untrained: as in `Welcome`; empty in a dry run.
    """

    KIND = Kind.INTRODUCTION
    generation: int
    behind: bool
    record_follows: bool
    untrained: dict[str, Tensor]


@dataclass(frozen=True, order=True)
class Progress:
    """How far a worker has come.

    Attributes:
        over: whether it has done all that there was to do.
        meetings: of all workers that it has been at; see `Regroups.meetings`.
        steps: that it has done.
    """

    over: bool = field(default=False, kw_only=True)
    meetings: int
    steps: int


NOTHING = Progress(NOTHING_DONE, NOTHING_DONE)


@dataclass(frozen=True, kw_only=True)
class MembershipView(ControlMessage):
    """The workers that train together from now on.

    Attributes:
        number: how many views there have been before.
        workers: their indices among all workers of the run, in order; worker 0 leads.
        generations: how many have had each one's rank before it.
        step: steps that the newest has done.
        newest: the worker that has come furthest, and hands on what it holds.
        behind: those who have not met the others so often.
        over: whether nothing is left to do but to leave.
        absences: since which step which workers have taken no part, oldest first, this view's last.
        missed: after how many steps of the others which workers were missed, be they replaced or not.
        since: for each of those, where exchanges are entries of a log: the steps, from and to, of which others have
            nothing; else empty.
        begins: first entry of the log that no member had opened.
        gives: states to pass on, in place of `behind`: the worker that has it, the worker that begins with it.
        hands: results of the log to pass on: number of the entry, the worker that has it, the worker that lacks it.
    """

    KIND = Kind.REGROUP
    TAG = VIEW_TAG
    number: int
    workers: tuple[int, ...]
    generations: tuple[int, ...] = ()
    step: int = 0
    newest: int = 0
    behind: tuple[int, ...] = ()
    over: bool = False
    absences: tuple[tuple[int, tuple[int, ...]], ...] = ((0, ()),)
    missed: tuple[tuple[int, int], ...] = ()
    since: tuple[tuple[int, int], ...] = ()
    begins: int = 0
    gives: tuple[tuple[int, int], ...] = ()
    hands: tuple[tuple[int, int, int], ...] = ()

    @property
    def leader(self) -> int:
        """How many have led before the one that made it."""
        return self.generations[0] if self.generations else 0

    @property
    def name(self) -> str:
        """Name of these workers' communicator; two leaders may make views of the same number."""
        return f"workers {self.number} of {self.leader}"


@dataclass(frozen=True, kw_only=True)
class StepBroken(ControlMessage):
    """A worker cannot finish a step, or a newcomer has none to finish, and waits for the next view.

    Attributes:
        number: of the view that broke.
        progress: how far the worker has come.
        generation: how many processes have had its rank before it.
        view: that broke, for a leader who has not made it.
        report: in place of `progress`, of a worker whose exchanges are entries of a log.
    """

    KIND = Kind.BROKEN
    number: int
    progress: Progress
    generation: int = 0
    view: MembershipView | None = None
    report: Report | None = None

    @property
    def fresh(self) -> bool:
        """Whether the worker holds no parameters yet."""
        return self.progress == NOTHING if self.report is None else self.report.fresh


@dataclass(frozen=True)
class RegroupAt(ControlMessage):
    """All must regroup before a step.

    Attributes:
        number: of the present view.
        step: the step's number.
    """

    KIND = Kind.REGROUP_AT
    TAG = LEADER_TAG
    number: int
    step: int


@dataclass(frozen=True)
class RegroupNow(ControlMessage):
    """The leader regroups: who waits for it elsewhere must break that off.

    Attributes:
        number: of the view that broke.
    """

    KIND = Kind.CALL
    TAG = CALL_TAG
    number: int


@dataclass(frozen=True)
class Handover(ControlMessage):
    """What the newest member of a view hands to those who are behind.

    Attributes:
        vector: `(size,)`, its parameters.
        part: tensors of its strategy part, by name.
        part_facts: the rest of its strategy part.
    """

    KIND = Kind.HANDOVER
    vector: Tensor
    part: dict[str, Tensor]
    part_facts: Any


@dataclass(frozen=True)
class TakenBatches(ControlMessage):
    """How much of its share of an epoch a worker has taken, in a loop of a user's own.

    Attributes:
        taken: batches.
        of: batches of the share.
    """

    KIND = Kind.TAKEN
    taken: int
    of: int


@dataclass(frozen=True)
class StepsCounted(ControlMessage):
    """How many steps of a lost worker a server has counted.

    Attributes:
        rank: of the worker.
        steps: that count.
        losses: how many processes of that rank have been lost.
    """

    KIND = Kind.COUNTED
    rank: int
    steps: int
    losses: int


@dataclass(frozen=True)
class MayLeave(ControlMessage):
    """The leader needs nothing more of a worker."""

    KIND = Kind.LEAVE
    TAG = LEADER_TAG


@dataclass(frozen=True)
class FinalModel(ControlMessage):
    """The run's final model, with which a worker of a user's own loop may leave.

    Attributes:
        vector: `(size,)`, the parameters.
        buffers: by name.
    """

    KIND = Kind.FINAL_MODEL
    TAG = LEADER_TAG
    vector: Tensor
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class ShardStateRequest(ControlMessage):
    """The leader asks a server for the state of a shard that it holds.

    Attributes:
        shard: its number.
    """

    KIND = Kind.CHECKPOINT
    shard: int


@dataclass(frozen=True)
class ShardState(ControlMessage):
    """The state of a shard: to the leader, for a checkpoint, and from it, where a run is resumed.

    Attributes:
        shard: its number.
        tensors: by name.
        facts: the rest.
    """

    KIND = Kind.STATE
    shard: int
    tensors: dict[str, Tensor]
    facts: Any


@dataclass(frozen=True)
class ServerReady(ControlMessage):
    """The successor of a lost server has all of its shards.

    Attributes:
        generation: how many processes have had its rank before it.
    """

    KIND = Kind.READY
    generation: int
