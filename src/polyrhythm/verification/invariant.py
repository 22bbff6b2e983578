"""Invariants: what must hold after every event of a run, whatever goes wrong.

They see from outside what ranks send, receive and hold; `Watch` observes a simulated run for them, and the first that
does not hold ends it. Ranks are global ones; a generation counts the processes that have had a rank before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.simulated.rank import Parcel, SimulatedRank
from polyrhythm.errors import RunError
from polyrhythm.roles.world import HandleLoss, HandleMessage
from polyrhythm.strategies.parameter_server.replication.replicated_server import ReplicatedServer
from polyrhythm.strategies.parameter_server.replication.shard_log import Entry
from polyrhythm.strategies.parameter_server.serving.parts import whole_replies
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerPart


class Violation(RunError):
    """An invariant does not hold."""

    def __init__(self, what: str, rank: int, time_s: float, *, expected: object, found: object) -> None:
        super().__init__(f"at {time_s:g} s, rank {rank}: {what}: expected {expected}, found {found}")
        self.rank = rank
        self.time_s = time_s


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Facts about a run that are known before it begins.

    Attributes:
        roles: ranks by role.
        numbers: numbers in the flat vector, which begins with zeros.
        gradient: returns the gradient, `(numbers,)`, of a worker's index and step; sums and means of them are exact,
            and optimizers are plain SGD with rate 1. None: gradients are not known.
        patience_s: virtual seconds within which there must be an update or a step.
        steps: steps that every worker takes; None: not known.
        units: ranks that draw batches together, where batches are dynamic and all together take `steps` each
            on average; empty where each worker takes `steps`.
        buckets: buckets of the flat vector.
    """

    roles: RoleAssignment
    numbers: int
    gradient: Callable[[int, int], Tensor] | None = None
    patience_s: float = float("inf")
    steps: int | None = None
    units: tuple[tuple[int, ...], ...] = ()
    buckets: int = 1


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message has arrived, and is about to be received.

    Attributes:
        context: context of the communicator that it was sent on; messages of different contexts do not mix.
    """

    time_s: float
    source: int
    source_generation: int
    to: int
    to_generation: int
    message: Message
    context: int = 0


@dataclass(frozen=True, slots=True)
class Handled:
    """A server has handled a message, or the loss of a worker.

    Attributes:
        time_s: virtual seconds.
        server: rank of the server.
        source: rank of the sender, or of the lost worker.
        message: None for a loss.
        replies: answers of the server.
        version_before: number of its updates before.
        version: number of its updates after.
        applied: number of gradients that it has counted, by their staleness.
    """

    time_s: float
    server: int
    source: int
    message: Message | None
    replies: list[tuple[int, Message]]
    version_before: int
    version: int
    applied: Counter[int]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A worker has taken a step.

    Attributes:
        time_s: virtual seconds.
        rank: rank of the worker.
        step: number of the step.
        vector: `(numbers,)`, the parameters after it; a view, which changes later.
        regrouped: generations of the members of the worker's view by rank; None before anyone has regrouped.
        generation: generation of the worker.
        view: identifier of the view, since another may have the same members; None before anyone has
            regrouped.
    """

    time_s: float
    rank: int
    step: int
    vector: Tensor
    regrouped: dict[int, int] | None = None
    generation: int = 0
    view: str | int | None = None


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A worker has got another membership view.

    Attributes:
        time_s: virtual seconds.
        rank: rank of the worker.
        vector: `(numbers,)`, its parameters; a view, which changes later.
        members: generations of all members by rank, in their order.
        steps: steps that each of them has done, by rank; a replacement counts as having done those of the
            worker that it
            replaces. The others may have gone on since.
    """

    time_s: float
    rank: int
    vector: Tensor
    members: dict[int, int]
    steps: dict[int, int]


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over.

    Attributes:
        time_s: virtual seconds.
        steps: steps that every worker had to take, or takes on average where batches are drawn.
        survivors: ranks of the workers that were alive at the end.
        generations: generation of each survivor, by rank.
        taken: steps of every worker, by rank, with dynamic batches.
    """

    time_s: float
    steps: int
    survivors: tuple[int, ...]
    generations: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] | None = None

    def steps_of(self, rank: int) -> int | None:
        """Return the steps that a survivor had to take.

        None where it is not known: with dynamic batches, others may have drawn a replacement's last ones.
        """
        if self.taken is None:
            return self.steps
        return None if self.generations.get(rank) else self.taken[rank]


class Invariant:
    """One rule. A subclass overrides what it has to see, and raises `Violation`."""

    def delivered(self, event: Delivered) -> None:
        """Called when a message arrives, before its receiver has it."""

    def handled(self, event: Handled) -> None:
        """Called when a server has handled a message or a loss."""

    def stepped(self, event: Stepped) -> None:
        """Called after each step of a worker."""

    def regrouped(self, event: Regrouped) -> None:
        """Called when a worker has got another membership view."""

    def ended(self, event: Ended) -> None:
        """Called once, after the run."""


def agreement(roles: RoleAssignment) -> Callable[[Entry, float], bool]:
    """Return a function that compares the replicas of a shard after each entry, in everything that a checkpoint holds.

    It takes an entry and the time, returns whether this is the entry's first report, and raises `Violation` if another
    server of the shard was not the same after it.

    Args:
        roles: ranks by role.
    """
    length = [0] * len(roles.servers)
    digests: dict[tuple[int, int], str] = {}

    def is_new(entry: Entry, time_s: float) -> bool:
        key = entry.shard, entry.number
        if entry.number >= length[entry.shard]:
            length[entry.shard] = entry.number + 1
            digests[key] = entry.digest
            return True
        expected = digests.pop(key)
        if expected != entry.digest:
            raise Violation(
                f"the replicas of shard {entry.shard} after entry {entry.number}",
                roles.servers[entry.shard],
                time_s,
                expected=expected,
                found=entry.digest,
            )
        return False

    return is_new


class Watch:
    """Pass events to invariants; implements `Observer`.

    Args:
        invariants: receiver of all events, in order.
        roles: ranks by role.
        now: virtual time, in seconds.
        ranks: returns the simulated ranks; the latest of every number counts.
    """

    def __init__(
        self,
        invariants: Sequence[Invariant],
        roles: RoleAssignment,
        now: Callable[[], float],
        ranks: Callable[[], Sequence[SimulatedRank]],
    ) -> None:
        # A call for every message and invariant adds up: none to those that do not listen.
        self._on_delivered = [
            each.delivered for each in invariants if type(each).delivered is not Invariant.delivered
        ]
        self._on_handled = [
            each.handled for each in invariants if type(each).handled is not Invariant.handled
        ]
        self._on_stepped = [
            each.stepped for each in invariants if type(each).stepped is not Invariant.stepped
        ]
        self._on_regrouped = [
            each.regrouped for each in invariants if type(each).regrouped is not Invariant.regrouped
        ]
        self._on_end = [each.ended for each in invariants]
        self._roles = roles
        self._now = now
        self._ranks = ranks
        self._is_new = agreement(roles)
        self._steps: dict[int, int] = {}
        self._views: dict[tuple[int, int], tuple[dict[int, int], str | int]] = {}
        """Members, with their generations, and view of every generation of a worker that has regrouped."""

    def ended(self, steps: int, *, drawn: bool = False) -> None:
        """Note that the run is over; every worker had to take `steps` steps, or took that many on average."""
        survivors = tuple(rank for rank in self._roles.workers if self._ranks()[rank].alive)
        taken = {rank: self._steps.get(rank, 0) for rank in self._roles.workers} if drawn else None
        event = Ended(self._now(), steps, survivors, self._generations(survivors), taken)
        for notify in self._on_end:
            notify(event)

    def delivered(self, parcel: Parcel) -> None:
        """Note that a message has arrived."""
        source, to = parcel.source, parcel.to
        ends = source.rank, source.generation, to.rank, to.generation
        event = Delivered(self._now(), *ends, parcel.message, parcel.context)
        for notify in self._on_delivered:
            notify(event)

    def joined(self, rank: int, members: dict[int, int], view: str | int) -> None:
        """Note the view in which a worker continues; see `Observer`."""
        self._views[rank, self._generation(rank)] = members, view

    def regrouped(self, rank: int, vector: Tensor, step: int | None = None) -> None:
        """Note that a worker has regrouped; see `Observer`."""
        members, _ = self._views[rank, self._generation(rank)]
        if step is not None:
            self._steps[rank] = step
        steps = {member: self._steps.get(member, 0) if step is None else step for member in members}
        event = Regrouped(self._now(), rank, vector, members, steps)
        for notify in self._on_regrouped:
            notify(event)

    def caught_up(self, rank: int, step: int) -> None:
        """Note the step with which a worker continues; see `Observer`."""
        self._steps[rank] = step

    def stepped(self, rank: int, step: int, vector: Tensor) -> None:
        """Note that a worker has taken a step; see `Observer`."""
        self._steps[rank] = step + 1
        generation = self._generation(rank)
        regrouped, view = self._views.get((rank, generation), (None, None))
        event = Stepped(self._now(), rank, step, vector, regrouped, generation, view)
        for notify in self._on_stepped:
            notify(event)

    def handlers(self, rank: int, part: ServerPart) -> tuple[HandleMessage, HandleLoss]:
        """Return functions that handle messages and losses instead of a server's own methods; see `Observer`."""
        if isinstance(
            part, ReplicatedServer
        ):  # its messages are not those of one shard: it reports each itself
            part.watch(self._taken)
            return part.on_message, part.on_loss

        def handle(source: int, message: Message | None) -> list[tuple[int, Message]]:
            if (
                message is not None and message.kind is Kind.PART
            ):  # nothing has happened until the whole is there
                return part.on_message(source, message)
            before = part.stats()
            replies = part.on_loss(source) if message is None else part.on_message(source, message)
            after = part.stats()
            applied = Counter(after.staleness) - Counter(before.staleness)
            versions = before.version, after.version
            answers = whole_replies(replies)
            self._handled(Handled(self._now(), rank, source, message, answers, *versions, applied))
            return replies

        return handle, lambda lost: handle(lost, None)

    def _taken(self, entry: Entry) -> None:
        """Note an entry of a shard that can be lost no more; two servers report it, and it counts once."""
        now_s = self._now()
        if self._is_new(entry, now_s):
            server = self._roles.servers[entry.shard]
            what = entry.message, entry.replies, entry.version_before, entry.version, entry.applied
            self._handled(Handled(now_s, server, entry.source, *what))

    def _handled(self, event: Handled) -> None:
        for notify in self._on_handled:
            notify(event)

    def _generation(self, rank: int) -> int:
        return self._ranks()[rank].generation

    def _generations(self, ranks: Sequence[int]) -> dict[int, int]:
        latest = self._ranks()
        return {rank: latest[rank].generation for rank in ranks}
