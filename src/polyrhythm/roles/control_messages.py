"""Control messages: messages of ranks outside of training, one frozen dataclass per kind.

    worker ── EnterWorker ─────▶ coordinator  replacement asks to take part        ◀── Welcome
    all    ◀───── EnterLeader ── coordinator  replacement of the coordinator       ── Introduction, then WorkerState ──▶
    worker ── StepBroken ──────▶ coordinator  a step cannot be finished            ◀── MembershipView
    worker ◀───── RegroupAt ──── coordinator  regroup before a later step
    worker ◀───── RegroupNow ─── coordinator  regroup, although waiting elsewhere
    worker ◀───── StateAt ────── coordinator  send the state after a step, for a checkpoint
    worker ── EventReport, WorkerState or Account, TakenBatches ──▶ coordinator    ── MayLeave or FinalModel ──▶
    worker ── StatesGathered ──▶ parent       the last report and the state of itself and of those below it
    worker ── StateDigests ────▶ parent       to be compared, by the coordinator
    server ── EventReport, ShardState, ServerReady, ServerReport ─▶ coordinator    ── ShardStateRequest ──▶

They are typed messages, as `MembershipView` and `StepBroken` are (see `communication.control_message`).

Tags separate what a rank waits for: a worker that waits for a view leaves the coordinator's other messages unread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from polyrhythm.communication.control_message import ControlMessage
from polyrhythm.communication.message import Kind, MalformedMessage, Message, pack_json, unpack_json
from polyrhythm.events import Event, from_json

WELCOME_TAG, LEADER_TAG, CALL_TAG, STATE_TAG = 1, 3, 4, 5
GATHERED_TAG = 1 << 21
"""Tags of messages to a worker: its welcome, announcements of coordinator and departure, a call to regroup, a request
for its state; and of what members send each other, unique on the communicator of a view."""


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
        bytes_inside: bytes of `bytes_sent` to ranks of its host, in simulations of clusters.
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
    bytes_inside: int = 0


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
class StateAt(ControlMessage):
    """Request of a worker's state, for a checkpoint.

    Attributes:
        step: number of steps after which the worker sends it; at once where it has done more.
    """

    KIND = Kind.STATE_AT
    TAG = STATE_TAG
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
class StateDigests(ControlMessage):
    """Digests of the state that all members of a view hold alike.

    Attributes:
        number: number of the view.
        step: steps done by the workers.
        digests: by digest, below 2^64, and hash of what rounding depends on (see `digests.rounding`): the workers.
    """

    KIND = Kind.DIGEST
    number: int
    step: int
    digests: tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class StatesGathered(ControlMessage):
    """Messages of several workers at the end of an epoch, which one of them sends.

    Attributes:
        senders: index of each worker, number of previous processes of its rank, and its steps.
        kinds: kinds of the messages of each worker, in order.
        payloads: payload of each message, by the places of its sender and of itself.
    """

    KIND = Kind.GATHERED
    senders: tuple[tuple[int, int, int], ...]
    kinds: tuple[tuple[int, ...], ...]
    payloads: dict[str, Tensor]

    @classmethod
    def of(cls, worker: int, generation: int, step: int, messages: list[Message]) -> StatesGathered:
        """Return the messages of one worker, all with a payload."""
        payloads = {
            f"0.{place}": each.tensor for place, each in enumerate(messages) if each.tensor is not None
        }
        return cls(((worker, generation, step),), (tuple(int(each.kind) for each in messages),), payloads)

    def joined(self, others: list[StatesGathered]) -> StatesGathered:
        """Return these messages, followed by others."""
        senders, kinds, payloads = self.senders, self.kinds, dict(self.payloads)
        for other in others:
            for name, payload in other.payloads.items():
                sender, _, place = name.partition(".")
                payloads[f"{int(sender) + len(senders)}.{place}"] = payload
            senders, kinds = senders + other.senders, kinds + other.kinds
        return StatesGathered(senders, kinds, payloads)

    def messages(self) -> Iterator[tuple[int, int, int, list[Message]]]:
        """Return the messages by worker, with the number of previous processes of its rank, and its steps.

        Raises:
            MalformedMessage: one is neither a report nor a state, or lacks its payload.
        """
        if len(self.kinds) != len(self.senders):
            raise MalformedMessage("gathered messages lack their senders")
        for place, (sender, kinds) in enumerate(zip(self.senders, self.kinds, strict=True)):
            names = [f"{place}.{number}" for number in range(len(kinds))]
            if not {*kinds} <= {Kind.EVENT, Kind.RECORD} or not self.payloads.keys() >= {*names}:
                raise MalformedMessage("gathered messages are neither reports nor states")
            parts = zip(kinds, names, strict=True)
            yield *sender, [Message(Kind(kind), self.payloads[name]) for kind, name in parts]


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
