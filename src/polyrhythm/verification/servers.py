"""Parameter servers: what they answer, count and add up, derived from their messages alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.consistency.backup import Backup
from polyrhythm.strategies.parameter_server.consistency.bounded_staleness import BoundedStaleness
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync
from polyrhythm.strategies.parameter_server.replication.messages import KEPT
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.training.flat_parameters import shards
from polyrhythm.verification.general import Undisturbed
from polyrhythm.verification.invariant import (
    Conditions,
    Delivered,
    Ended,
    Handled,
    Invariant,
    Stepped,
    Violation,
)

_ASKING = (Kind.PULL, Kind.PUSH, Kind.FETCH)


class Answers(Invariant):
    """A worker gets an answer for each of its questions, and no replacement gets its predecessor's answers.

    Args:
        roles: ranks by role.
        asking: kinds of message that are answered with parameters.
    """

    def __init__(self, roles: RoleAssignment, asking: tuple[Kind, ...] = _ASKING) -> None:
        self._asking = asking
        self._servers = frozenset(roles.servers)
        self._open: Counter[tuple[int, int, int]] = Counter()

    def delivered(self, event: Delivered) -> None:
        if event.to in self._servers and event.message.kind in self._asking:
            self._open[event.to, event.source, event.source_generation] += 1
        elif event.source in self._servers and event.message.kind is Kind.PARAMETERS:
            key = event.source, event.to, event.to_generation
            self._open[key] -= 1
            if self._open[key] < 0:
                raise Violation(
                    f"an answer of rank {event.source} to a question of another rank, or to none",
                    event.to,
                    event.time_s,
                    expected=f"none for generation {event.to_generation}, which has no open question",
                    found=f"one of version {event.message.version}, step {event.message.step}",
                )


@dataclass(slots=True)
class Push:
    """A gradient that a server holds or has applied.

    Attributes:
        source: rank of the pusher.
        message: the push.
        doubtful: whether an update may have been made without it.
    """

    source: int
    message: Message
    doubtful: bool = False


class Pushes:
    """Follow gradients from their arrival to their update.

    A server holds gradients on arrival, and an update takes all held ones. A repeated step does not count
    again.

    Args:
        drops: whether a gradient of an earlier step than the server's is dropped, and so is what a lost pusher had
            pushed; pushers then skip steps, and every update is a step.
        doubts: whether servers drop the pushes of a lost pusher unless all have them; then they are repeated.
    """

    def __init__(self, *, drops: bool = False, doubts: bool = False) -> None:
        self._drops = drops
        self._doubts = doubts
        self._steps_pushed: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._held: defaultdict[int, list[Push]] = defaultdict(list)

    def steps_pushed(self, server: int, source: int) -> int:
        """Return the number of a pusher's steps that have arrived at a server."""
        return self._steps_pushed[server, source]

    def follow(self, event: Handled) -> list[Push]:
        """Return the gradients of the update that the event made; empty if it made none.

        Raises:
            Violation: a step arrived before its predecessor.
        """
        message, key = event.message, (event.server, event.source)
        if self._drops and message is None:
            held = self._held[event.server]
            self._held[event.server] = [push for push in held if push.source != event.source]
        if message is not None and message.kind is Kind.PUSH:
            ahead = message.step - self._steps_pushed[key]
            if ahead > self._doubts and not self._drops:
                raise Violation(
                    f"a gradient of rank {event.source}",
                    event.server,
                    event.time_s,
                    expected=f"step {self._steps_pushed[key]}",
                    found=f"step {message.step}",
                )
            if message.step >= (event.version_before if self._drops else self._steps_pushed[key]):
                self._steps_pushed[key] = message.step + 1
                self._held[event.server].append(Push(event.source, message))
        if self._doubts and message is None:
            for push in self._held[event.server]:
                if push.source == event.source:
                    push.doubtful = True
                    self._steps_pushed[key] = min(self._steps_pushed[key], push.message.step)
        if event.version == event.version_before:
            return []
        return self._held.pop(event.server, [])


class Staleness(Invariant):
    """Staleness as counted is the version at the update minus the version of the last answer to the pusher.

    Args:
        drops: whether late gradients are dropped.
        doubts: whether servers drop what a lost pusher had pushed unless all have it.
    """

    def __init__(self, *, drops: bool = False, doubts: bool = False) -> None:
        self._read: dict[tuple[int, int], int] = {}
        self._read_before: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        """For a server: what was read before a gradient that is held, by its rank and step."""
        self._pushes = Pushes(drops=drops, doubts=doubts)
        self._drops = drops

    def delivered(self, event: Delivered) -> None:
        if event.message.kind is Kind.PARAMETERS:
            self._read[event.source, event.to] = event.message.version

    def handled(self, event: Handled) -> None:
        message, before = event.message, self._read_before[event.server]
        if message is not None and message.kind is Kind.PUSH:
            read = self._read.get((event.server, event.source), 0)
            before.setdefault((event.source, message.step), read)  # it may be repeated while it is held
        elif message is None and self._drops:
            for key in [key for key in before if key[0] == event.source]:
                del before[key]
        applied = self._pushes.follow(event)
        expected, doubtful = Counter[int](), Counter[int]()
        for push in applied:
            if push.message.weight > 0:
                age = event.version_before - before[push.source, push.message.step]
                (doubtful if push.doubtful else expected)[age] += 1
        if event.version != event.version_before:
            before.clear()
        if not expected <= event.applied <= expected + doubtful:
            raise Violation(
                "staleness of the gradients that an update takes",
                event.server,
                event.time_s,
                expected=dict(expected),
                found=dict(event.applied),
            )


Behind = Callable[[int, int, int], tuple[int, ...]]


class Ledger(Invariant):
    """Every gradient that a server has taken is applied exactly once, whole, and on all shards.

        values = 0 - sum over updates of the mean of its workers' gradients      steps of rate 1, exact numbers

    Args:
        conditions: conditions with known gradients.
        behind: returns the indices of the workers in the mean that a gradient is, from its server, pusher and
            step.
        drops: whether late gradients are dropped, so that not all are applied in the end.
    """

    def __init__(self, conditions: Conditions, behind: Behind, *, drops: bool = False) -> None:
        assert conditions.gradient is not None, "a ledger is kept of gradients that are known"
        servers = conditions.roles.servers
        self._gradient = conditions.gradient
        self._behind = behind
        self._shards = dict(zip(servers, shards(conditions.numbers, len(servers)), strict=True))
        self._values = {
            server: torch.zeros(shard.stop - shard.start) for server, shard in self._shards.items()
        }
        self._pushes = Pushes(drops=drops)
        self._drops = drops

    def handled(self, event: Handled) -> None:
        applied = self._pushes.follow(event)
        if applied:
            members = [
                (worker, push.message.step)
                for push in applied
                for worker in self._behind(event.server, push.source, push.message.step)
            ]
            shard = self._shards[event.server]
            total = sum(
                (self._gradient(*member)[shard] for member in members[1:]), self._gradient(*members[0])[shard]
            )
            self._values[event.server] -= total if len(members) == 1 else total / len(members)
        for to, reply in event.replies:
            if reply.kind is Kind.PARAMETERS and reply.tensor is not None:
                self._compare(event, to, reply.tensor)

    def _compare(self, event: Handled, to: int, found: Tensor) -> None:
        expected = self._values[event.server]
        if expected.shape == found.shape and torch.equal(expected, found.to(expected.dtype)):
            return
        what = f"parameters for rank {to}, the sum of what was acknowledged"
        if expected.shape != found.shape:
            sizes = f"{len(expected)} numbers", f"{len(found)}"
            raise Violation(what, event.server, event.time_s, expected=sizes[0], found=sizes[1])
        wrong = torch.nonzero(expected != found.to(expected.dtype)).flatten()
        first = int(wrong[0])
        raise Violation(
            f"{what}, number {first} of {len(expected)} ({len(wrong)} are wrong)",
            rank=event.server,
            time_s=event.time_s,
            expected=float(expected[first]),
            found=float(found[first]),
        )

    def ended(self, event: Ended) -> None:
        """All steps of all survivors have arrived at all servers."""
        if self._drops:
            return
        for server in self._shards:
            for source in event.survivors:
                pushed = self._pushes.steps_pushed(server, source)
                if self._behind(server, source, 0) and event.steps_of(source) not in (None, pushed):
                    raise Violation(
                        f"steps of rank {source} at the end",
                        server,
                        event.time_s,
                        expected=event.steps_of(source),
                        found=pushed,
                    )


class Sums(Invariant):
    """Every gradient is in exactly one sum that was pushed and applied.

        values = 0 - sum over pushes of (gradients since the pusher's push before)      steps of rate 1, exact numbers

    Args:
        conditions: conditions with known gradients.
    """

    def __init__(self, conditions: Conditions) -> None:
        assert conditions.gradient is not None, "sums are checked of gradients that are known"
        roles = conditions.roles
        self._gradient = conditions.gradient
        self._workers = roles.workers
        self._shards = dict(zip(roles.servers, shards(conditions.numbers, len(roles.servers)), strict=True))
        self._values = {
            server: torch.zeros(shard.stop - shard.start) for server, shard in self._shards.items()
        }
        self._steps: defaultdict[tuple[int, int], int] = defaultdict(int)

    def handled(self, event: Handled) -> None:
        message = event.message
        if message is not None and message.kind is Kind.PUSH and message.tensor is not None:
            self._book(event, message.step + 1, message.tensor)
        for to, reply in event.replies:
            if reply.kind is Kind.PARAMETERS and reply.tensor is not None:
                self._compare(event, f"parameters for rank {to}", self._values[event.server], reply.tensor)

    def _book(self, event: Handled, steps: int, found: Tensor) -> None:
        key = event.server, event.source
        worker, before = self._workers.index(event.source), self._steps[key]
        if steps <= before:
            return
        expected = torch.zeros_like(found)
        for step in range(before, steps):
            expected += self._gradient(worker, step)[self._shards[event.server]]
        self._compare(
            event, f"the sum of rank {event.source}'s steps {before} to {steps - 1}", expected, found
        )
        self._steps[key] = steps
        self._values[event.server] -= expected

    def ended(self, event: Ended) -> None:
        """All steps of all survivors have arrived at all servers."""
        for server in self._shards:
            for source in event.survivors:
                if event.steps_of(source) not in (None, self._steps[server, source]):
                    raise Violation(
                        f"steps of rank {source} at the end",
                        server,
                        event.time_s,
                        expected=event.steps_of(source),
                        found=self._steps[server, source],
                    )

    @staticmethod
    def _compare(event: Handled, what: str, expected: Tensor, found: Tensor) -> None:
        wrong = int((expected != found.to(expected.dtype)).sum())
        if wrong:
            raise Violation(
                what, event.server, event.time_s, expected="the same", found=f"{wrong} numbers differ"
            )


class ShardsTogether(Invariant):
    """With synchronous workers, every server has made as many updates as every worker steps."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def handled(self, event: Handled) -> None:
        self._versions[event.server] = event.version

    def stepped(self, event: Stepped) -> None:
        for server, version in self._versions.items():
            if version != event.step + 1:
                raise Violation(
                    f"version of server {server} after step {event.step}",
                    event.rank,
                    event.time_s,
                    expected=event.step + 1,
                    found=version,
                )


class Gathered(Invariant):
    """Every update has exactly `count` gradients.

    Args:
        count: count of gradients.
        drops: whether late gradients are dropped, so that what is applied is fresh.
        leftover: whether an update may have fewer when a pusher leaves or is lost, which may have been the last.
    """

    def __init__(self, count: int, *, drops: bool = False, leftover: bool = False) -> None:
        self._count = count
        self._drops = drops
        self._leftover = leftover

    def handled(self, event: Handled) -> None:
        if event.version == event.version_before:
            return
        found = sum(event.applied.values())
        parting = event.message is None or event.message.kind is Kind.LEAVE
        if found > self._count or (found < self._count and not (self._leftover and parting)):
            raise Violation(
                "gradients of an update", event.server, event.time_s, expected=self._count, found=found
            )
        if self._drops and set(event.applied) != {0}:
            raise Violation(
                "staleness where late gradients are dropped",
                event.server,
                event.time_s,
                expected={0: found},
                found=dict(event.applied),
            )


class ClockBound(Invariant):
    """No worker continues more than s steps ahead of the slowest, nor with a copy that lacks older updates.

    Every pusher's clock on every server follows from the messages. A lost pusher does not count until its
    replacement pushes. The replacement's clock begins at the slowest of those present, if its own count of
    steps is behind that; while it catches up it does not pass the first of those that were never behind. If
    none of those remains, all clocks are set back alike.

    Args:
        roles: ranks by role.
        pushers: the ranks that push.
        s: the bound.
        cached: whether answers may be empty.
    """

    def __init__(
        self, roles: RoleAssignment, pushers: Collection[int], s: int, *, cached: bool = False
    ) -> None:
        self._s = s
        self._cached = cached
        self._clocks = {server: dict.fromkeys(pushers, 0) for server in roles.servers}
        self._gone: dict[int, set[int]] = {server: set() for server in roles.servers}
        self._credits = {server: dict.fromkeys(pushers, 0) for server in roles.servers}
        self._pushed = {server: dict.fromkeys(pushers, 0) for server in roles.servers}
        """Steps that have arrived; a replacement may repeat the last."""
        self._copies: dict[tuple[int, int], int] = {}

    def handled(self, event: Handled) -> None:
        """Move the sender's clock, then check every worker that may continue."""
        clocks, gone = self._clocks[event.server], self._gone[event.server]
        if event.message is None or event.message.kind is Kind.LEAVE:
            self._lose(event.server, event.source)
        elif (
            event.message.kind is Kind.PUSH and event.message.step >= self._pushed[event.server][event.source]
        ):
            self._pushed[event.server][event.source] = event.message.step + 1
            if event.source in gone:
                self._admit(event.server, event.source, event.message.step + 1)
            self._move(event.server, event.source, event.message.step + 1)
        present = [clock for pusher, clock in clocks.items() if pusher not in gone]
        for to, reply in event.replies:
            if to not in clocks or reply.kind is not Kind.PARAMETERS:
                continue
            if to not in gone:
                self._check(event, to, min(present), fresh=reply.tensor is not None)
            elif reply.tensor is not None:  # a replacement's first copy
                self._copies[event.server, to] = min(present, default=clocks[to])

    def _lose(self, server: int, pusher: int) -> None:
        """Set all remaining clocks back alike, if none of them is the count of its own steps."""
        gone, credits = self._gone[server], self._credits[server]
        gone.add(pusher)
        left = [other for other in credits if other not in gone]
        least = min((credits[other] for other in left), default=0)
        for other in left:
            credits[other] -= least
            self._clocks[server][other] -= least
            self._copies[server, other] = self._copies.get((server, other), -1) - least

    def _admit(self, server: int, pusher: int, steps: int) -> None:
        clocks, gone = self._clocks[server], self._gone[server]
        slowest = min((clocks[other] for other in clocks if other not in gone), default=0)
        self._credits[server][pusher] = max(0, slowest - steps)
        gone.discard(pusher)

    def _move(self, server: int, pusher: int, steps: int) -> None:
        clocks, credits, gone = self._clocks[server], self._credits[server], self._gone[server]
        if credits[pusher]:
            first = max(clocks[other] for other in clocks if other not in gone and not credits[other])
            credits[pusher] = max(0, min(credits[pusher], first - steps))
        clocks[pusher] = steps + credits[pusher]

    def _check(self, event: Handled, to: int, slowest: int, *, fresh: bool) -> None:
        clock = self._clocks[event.server][to]
        if clock - self._s > slowest:
            raise Violation(
                f"the step with which rank {to} may continue",
                event.server,
                event.time_s,
                expected=f"at most {slowest + self._s}, the slowest being at {slowest}",
                found=clock,
            )
        if fresh:
            self._copies[event.server, to] = slowest
        elif not self._cached or self._copies.get((event.server, to), -1) < clock - self._s:
            raise Violation(
                f"the copy with which rank {to} may begin step {clock}",
                event.server,
                event.time_s,
                expected=f"all updates of the steps before {clock - self._s}",
                found=f"those before {self._copies.get((event.server, to), -1)}",
            )


class Batches(Invariant):
    """Sandblaster: every pushed portion is in exactly one batch, which has the pushes of all workers.

    Args:
        roles: ranks by role.
    """

    def __init__(self, roles: RoleAssignment) -> None:
        self._workers = frozenset(roles.workers)
        self._steps: Counter[tuple[int, int]] = Counter()
        self._held: dict[int, dict[int, Message]] = {server: {} for server in roles.servers}
        self._gone: dict[int, set[int]] = {server: set() for server in roles.servers}

    def handled(self, event: Handled) -> None:
        """Record the push, and check each completed batch."""
        server, message = event.server, event.message
        held, gone = self._held[server], self._gone[server]
        answered = {to: reply for to, reply in event.replies if reply.kind is Kind.PARAMETERS}
        if message is None or message.kind is Kind.LEAVE:
            gone.add(event.source)
        elif message.kind is Kind.PUSH and message.step >= self._steps[server, event.source]:
            held[event.source] = message
        over = {rank for rank in held.keys() - gone if rank in answered}
        if over or event.version != event.version_before:
            self._check(event, over, held, gone)
            held.clear()
        for to, reply in answered.items():
            self._steps[server, to] = reply.step
            held.pop(to, None)
            gone.discard(to)  # a replacement begins

    def _check(self, event: Handled, over: set[int], held: dict[int, Message], gone: set[int]) -> None:
        portions, of_lost = Counter[int](), Counter[int]()
        for rank, message in held.items():
            if message.weight > 0:
                portion = message.step + 1 - self._steps[event.server, rank]
                (of_lost if rank in gone else portions)[0] += portion
        there = self._workers - gone
        updates, applied = event.version - event.version_before, +event.applied
        fits = +portions <= applied <= portions + of_lost and updates == bool(applied)
        if over != there or over != held.keys() - gone or not fits:
            raise Violation(
                "a batch that is over",
                event.server,
                event.time_s,
                expected=f"{portions[0]} fresh portions, of ranks {sorted(there | held.keys())}",
                found=f"{updates} updates of {dict(applied)}, ranks {sorted(over)}",
            )


def serving_invariants(
    conditions: Conditions,
    pushers: Mapping[int, tuple[int, ...]],
    consistency: Consistency,
    handling: Handling,
    *,
    in_step: bool,
    behind: Behind | None = None,
) -> list[Invariant]:
    """Return the invariants of servers that own the optimizer.

    Args:
        conditions: conditions of the run.
        pushers: indices of the workers in the mean that each pushing rank pushes, by rank.
        consistency: consistency of the servers.
        handling: handling of gradients.
        in_step: whether all workers are at the same step at all times.
        behind: see `Ledger`, where it is not always the same for a pusher.
    """
    drops = consistency.drops and not consistency.in_step()
    staleness = Staleness(drops=drops, doubts=handling.aggregator.whole and in_step)
    found: list[Invariant] = [Answers(conditions.roles), staleness]
    found += _of_consistency(consistency, conditions, pushers)
    if conditions.gradient is not None and adds_up(handling):
        behind = behind or (lambda server, rank, step: pushers.get(rank, ()))
        found.append(Ledger(conditions, behind, drops=drops))
    if in_step:
        found.append(Undisturbed(ShardsTogether()))
    return found


@singledispatch
def _of_consistency(
    consistency: Consistency, conditions: Conditions, pushers: Mapping[int, tuple[int, ...]]
) -> list[Invariant]:
    """Return the invariants of one consistency model, in addition to those of all."""
    return []


@_of_consistency.register
def _(consistency: Backup, conditions: Conditions, pushers: Mapping[int, tuple[int, ...]]) -> list[Invariant]:
    if consistency.in_step():
        return []
    return [Gathered(consistency.gathers(len(pushers)), drops=True, leftover=True)]


@_of_consistency.register
def _(
    consistency: Softsync, conditions: Conditions, pushers: Mapping[int, tuple[int, ...]]
) -> list[Invariant]:
    return [Gathered(consistency.gathers(len(pushers)), leftover=True)]


@_of_consistency.register
def _(
    consistency: BoundedStaleness, conditions: Conditions, pushers: Mapping[int, tuple[int, ...]]
) -> list[Invariant]:
    bound = ClockBound(conditions.roles, pushers, consistency.s, cached=consistency.own_updates)
    return [bound if consistency.s else Undisturbed(bound)]  # in lockstep a replacement's clock stays behind


def adds_up(handling: Handling) -> bool:
    """Return whether the parameters are the sum of the means of the gradients in order of arrival."""
    return handling.merge.keeps_gradients and not handling.aggregator.robust


class OfShards(Invariant):
    """Show invariants the events of a shard under the rank of its own server, wherever it is served.

    Args:
        roles: ranks by role.
        invariants: invariants that receive the events.
    """

    def __init__(self, roles: RoleAssignment, invariants: Sequence[Invariant]) -> None:
        self._workers = frozenset(roles.workers)
        self._invariants = invariants
        self._servers = roles.servers
        self._before = {rank: roles.servers[index - 1] for index, rank in enumerate(roles.servers)}
        self._relays: dict[tuple[int, int, int, int], int] = {}

    def delivered(self, event: Delivered) -> None:
        """Forward messages between workers and shards, but none among servers or about the serving rank."""
        source, to, message = event.source, event.to, event.message
        # Control messages have a communicator of their own: none of them is what a RELAY is about.
        link = source, event.source_generation, to, event.context
        if to in self._before and message.kind is Kind.RELAY:
            if source in self._workers:
                self._relays[link] = self._servers[message.version]
            return
        if source in self._before and (to in self._before or message.kind in (Kind.RELAY, Kind.JOIN)):
            return
        if link in self._relays:
            event = replace(event, to=self._relays.pop(link))
        elif source in self._before and message.tag == KEPT:
            event = replace(event, source=self._before[source])
        for entry in self._invariants:
            entry.delivered(event)

    def handled(self, event: Handled) -> None:
        for entry in self._invariants:
            entry.handled(event)

    def stepped(self, event: Stepped) -> None:
        for entry in self._invariants:
            entry.stepped(event)

    def ended(self, event: Ended) -> None:
        for entry in self._invariants:
            entry.ended(event)
