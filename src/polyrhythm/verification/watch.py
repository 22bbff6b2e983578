"""Watch a simulated run: tell invariants what is sent, handled and updated; the first that does not hold ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.simulated.rank import Parcel, SimulatedRank
from polyrhythm.roles.world import HandleLoss, HandleMessage
from polyrhythm.strategies.parameter_server.replication.replicated_server import Entry, ReplicatedServer
from polyrhythm.strategies.parameter_server.serving.parts import whole_replies
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerPart
from polyrhythm.verification.invariant import Delivered, Ended, Handled, Invariant, Regrouped, Stepped
from polyrhythm.verification.servers import agreement


class Watch:
    """Pass what happens to invariants; implements `Observer`.

    Args:
        invariants: are told everything, in order.
        roles: which ranks do what.
        now: virtual time, in seconds.
        ranks: returns the simulated ranks, of which the latest of every number counts.
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
        self._views: dict[tuple[int, int], tuple[Sequence[int], str | int]] = {}
        """Members and view of every generation of a worker that has regrouped."""

    def ended(self, steps: int, *, drawn: bool = False) -> None:
        """Note that the run is over, in which every worker had to take so many steps, or so many on average."""
        survivors = tuple(rank for rank in self._roles.workers if self._ranks()[rank].alive)
        taken = {rank: self._steps.get(rank, 0) for rank in self._roles.workers} if drawn else None
        event = Ended(self._now(), steps, survivors, self._generations(survivors), taken)
        for tell in self._on_end:
            tell(event)

    def delivered(self, parcel: Parcel) -> None:
        """Note that a message has arrived."""
        source, to = parcel.source, parcel.to
        ends = source.rank, source.generation, to.rank, to.generation
        event = Delivered(self._now(), *ends, parcel.message, parcel.context)
        for tell in self._on_delivered:
            tell(event)

    def joined(self, rank: int, members: Sequence[int], view: str | int) -> None:
        """Note in which view a worker goes on; see `Observer`."""
        self._views[rank, self._generation(rank)] = members, view

    def regrouped(self, rank: int, vector: Tensor, step: int | None = None) -> None:
        """Note that a worker has regrouped; see `Observer`."""
        members, _ = self._views[rank, self._generation(rank)]
        if step is not None:
            self._steps[rank] = step
        steps = {member: self._steps.get(member, 0) if step is None else step for member in members}
        event = Regrouped(self._now(), rank, vector, self._generations(members), steps)
        for tell in self._on_regrouped:
            tell(event)

    def caught_up(self, rank: int, step: int) -> None:
        """Note with which step a worker goes on; see `Observer`."""
        self._steps[rank] = step

    def stepped(self, rank: int, step: int, vector: Tensor) -> None:
        """Note that a worker has taken a step; see `Observer`."""
        self._steps[rank] = step + 1
        generation = self._generation(rank)
        regrouped, view = None, None
        if (rank, generation) in self._views:
            members, view = self._views[rank, generation]
            regrouped = self._generations(members)
        event = Stepped(self._now(), rank, step, vector, regrouped, generation, view)
        for tell in self._on_stepped:
            tell(event)

    def handlers(self, rank: int, part: ServerPart) -> tuple[HandleMessage, HandleLoss]:
        """Return what handles messages and losses in the place of a server's own methods; see `Observer`."""
        if isinstance(
            part, ReplicatedServer
        ):  # its messages are not those of one shard: it tells of each itself
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
            told = whole_replies(replies)
            self._handled(Handled(self._now(), rank, source, message, told, *versions, applied))
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
        for tell in self._on_handled:
            tell(event)

    def _generation(self, rank: int) -> int:
        return self._ranks()[rank].generation

    def _generations(self, ranks: Sequence[int]) -> dict[int, int]:
        latest = self._ranks()
        return {rank: latest[rank].generation for rank in ranks}
