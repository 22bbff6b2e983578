"""A site's server: a shard of its own full copy of the parameters, and its messages with other sites.

    workers of the site ── PUSH ─▶ held until all are there ─▶ optimiser step: w += u, U += u
    other sites         ◀─ what of U is significant ──┘      ─▶ w += what they send
    workers of the site ◀─ PARAMETERS ── unless another site is too many rounds behind,
                                         or has announced a large packet

Without a lost worker its site goes on with those who are left, as lockstep servers do. A site whose workers
are all lost is not waited for; when one of them has a successor, its rounds count on from the slowest site's.
At the end such a site is asked for its last packet, after which it admits no worker. The worker that asked
for that may be lost, and has a successor: one that asks again, and has no step left to take.

Between one shard's servers of all sites:

    site ── ANNOUNCE(round) ─▶                                  all other sites, before a large packet
         ── DIFFERENCE(packet or nothing, round, the newest round of yours that I have) ─▶       every round
         ── LEAVE(packet, round, …) ─▶                                                    after its last
         ── ANNOUNCE(round, stop) ─▶          that round will not come for now: all workers are lost

A packet is kept until all others have acknowledged it, so that a checkpoint holds what is on its way. Rounds
that a resumed site makes again are ignored by those who have them.

A site's copy of a shard keeps its own updates that other sites have not received (`Significance`):

    U += u            every update u of the site's own
    |U_j| > t |w_j|   number j is sent, and U_j becomes 0: what was sent and is kept add up to all updates

At w_j = 0 every change is significant; a number that has not changed never is, and with t = 0 all others are.
A packet is U with zeros for what is kept, or, where that is shorter, only the numbers that are sent and their
places: as whole numbers of 4 bytes (8 beside float64), in the bits of the parameters' dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.consistency.synchronous import SynchronousGate
from polyrhythm.strategies.parameter_server.rules.aggregator import mean
from polyrhythm.strategies.parameter_server.serving.admission import (
    admit_announcement,
    admit_bare,
    admit_push,
    payload,
)
from polyrhythm.strategies.parameter_server.serving.gate import Decision
from polyrhythm.strategies.parameter_server.serving.membership import PusherRegistry
from polyrhythm.strategies.parameter_server.serving.pusher_state import HeldGradients
from polyrhythm.strategies.parameter_server.serving.rule import Contribution
from polyrhythm.strategies.parameter_server.serving.shard import OptimizedShard
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerStats
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_parameters import shards


@dataclass(frozen=True)
class SiteMap:
    """The ranks of all sites.

    Attributes:
        members: ranks of every site's workers, neighbours; a site may have none.
        servers: ranks of every site's servers, in the order of their shards.
    """

    members: tuple[tuple[int, ...], ...]
    servers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cast: RoleAssignment, sites: int) -> SiteMap:
        """Shares out the workers and the servers."""
        cuts = shards(len(cast.workers), min(sites, len(cast.workers)))
        members = [cast.workers[cut] for cut in cuts] + [()] * (sites - len(cuts))
        each = len(cast.servers) // sites
        servers = tuple(cast.servers[site * each : (site + 1) * each] for site in range(sites))
        return cls(tuple(members), servers)

    @property
    def busy(self) -> tuple[int, ...]:
        """Numbers of the sites that have workers."""
        return tuple(site for site, members in enumerate(self.members) if members)

    def site_of(self, worker: int) -> int:
        """Gives the number of a worker's site."""
        return next(site for site, members in enumerate(self.members) if worker in members)


@dataclass(frozen=True, kw_only=True)
class SiteRule:
    """When a site tells others, and when it waits for them.

    Attributes:
        threshold: share of a number's value, above which its change is significant in the first round; in round t,
            this divided by the root of t.
        lag: how many rounds the slowest site may be behind.
        barrier: share of a shard's bytes; a packet with more is announced, and readers wait for it.
    """

    threshold: float
    lag: int
    barrier: float = 1.0

    def is_large(self, packet: Tensor | None, values: Tensor) -> bool:
        """Whether a packet is to be announced."""
        return packet is not None and len(packet) > self.barrier * len(values)

    def threshold_of(self, number: int) -> float:
        """Gives the threshold of a round, counted from 1."""
        return self.threshold / sqrt(number)


_PACKET = "packet."


class Post:
    """One server's end.

    Args:
        peers: ranks of the same shard's servers at all other sites that have workers.

    Attributes:
        clock: rounds of this site so far.
    """

    def __init__(self, peers: tuple[int, ...]) -> None:
        self.clock = 0
        self._heard = dict.fromkeys(peers, 0)
        self._acknowledged = dict.fromkeys(peers, 0)
        self._gone: set[int] = set()
        self._asleep: set[int] = set()
        self._sleeps = False
        self._announced: dict[int, int] = {}
        self._kept: dict[int, Tensor] = {}

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks of the other sites' servers."""
        return tuple(self._heard)

    @property
    def slowest(self) -> int:
        """The least clock of the sites that are still training, as far as is known; this site's own if it is alone."""
        away = self._gone | self._asleep
        return min((clock for peer, clock in self._heard.items() if peer not in away), default=self.clock)

    @property
    def asleep(self) -> tuple[int, ...]:
        """Ranks of other sites' servers whose workers are lost, all of them, until they make another round."""
        return tuple(sorted(self._asleep - self._gone))

    def sleep(self) -> list[tuple[int, Message]]:
        """All workers of this site are lost; gives what tells the other sites not to wait for it."""
        if self._sleeps:
            return []
        self._sleeps = True
        return [(peer, Message(Kind.ANNOUNCE, version=self.clock + 1, stop=True)) for peer in self._heard]

    @property
    def awaits(self) -> bool:
        """Whether a packet has been announced that is still on its way."""
        return bool(self._announced)

    @property
    def all_gone(self) -> bool:
        """Whether all other sites have sent their last."""
        return len(self._gone) == len(self._heard)

    def tell(
        self, packet: Tensor | None, *, stop: bool, large: bool = False, last: bool = False
    ) -> list[tuple[int, Message]]:
        """Begins the next round with what is significant of it; gives the messages to all other sites.

        Args:
            packet: what to send, if anything is.
            stop: whether someone wants to stop.
            large: whether the packet is to be announced.
            last: whether this site's workers have left.
        """
        if self._sleeps:  # nobody waits for the rounds that it has not made
            self._sleeps = False
            self.clock = max(self.clock, self.slowest)
        self.clock += 1
        if packet is not None and self._heard:
            self._kept[self.clock] = packet
        kind = Kind.LEAVE if last else Kind.DIFFERENCE
        announcements = [(peer, Message(Kind.ANNOUNCE, version=self.clock)) for peer in self._heard if large]
        return announcements + [
            (peer, Message(kind, packet, version=self.clock, step=heard, stop=stop and not last))
            for peer, heard in self._heard.items()
        ]

    def tell_again(self) -> list[tuple[int, Message]]:
        """Gives what others may not have got before a checkpoint was made."""
        return [
            (peer, Message(Kind.DIFFERENCE, packet, version=number, step=heard))
            for peer, heard in self._heard.items()
            for number, packet in self._kept.items()
        ]

    def expect(self, peer: int, message: Message) -> None:
        """Takes another site's announcement."""
        if message.stop:
            self._asleep.add(peer)
        elif message.version > self._heard[peer]:
            self._announced[peer] = message.version

    def hear(self, peer: int, message: Message) -> Tensor | None:
        """Takes another site's message; gives its packet, if it has one that is new."""
        self._acknowledged[peer] = max(self._acknowledged[peer], message.step)
        known = min(self._acknowledged.values())
        self._kept = {number: packet for number, packet in self._kept.items() if number > known}
        if message.version >= self._announced.get(peer, 0):
            self._announced.pop(peer, None)
        if message.kind is Kind.LEAVE:
            self._gone.add(peer)
        if message.version <= self._heard[peer]:
            return None
        self._heard[peer] = message.version
        self._asleep.discard(peer)
        return message.tensor

    def state(self) -> State:
        """Gives clocks, and what is on its way."""
        facts = {"clock": self.clock, "heard": list(self._heard.values()), "kept": list(self._kept)}
        return {f"{_PACKET}{number}": packet for number, packet in self._kept.items()}, facts

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.clock = facts["clock"]
        self._heard = dict(zip(self._heard, facts["heard"], strict=True))
        self._kept = {number: tensors[f"{_PACKET}{number}"] for number in facts["kept"]}


Reply = tuple[int, Message]


class SiteServer:
    """One server; see `ServerPart`.

    Args:
        members: ranks of the site's workers.
        peers: ranks of the same shard's servers at the other sites that have workers.
        idle: ranks of the same shard's servers at sites without.
        rule: of all sites.

    Attributes:
        done: whether it has been let go.
    """

    def __init__(
        self, members: tuple[int, ...], peers: tuple[int, ...], idle: tuple[int, ...], rule: SiteRule
    ) -> None:
        self.done = False
        self._presence = PusherRegistry(members)
        self._post = Post(peers)
        self._idle = idle
        self._rule = rule
        self._copy = SiteCopy()
        self._gate = SynchronousGate(len(members))
        self._held = HeldGradients(len(members))
        self._lost: set[int] = set()
        self._ending = self._through = False
        self._asker: int | None = None
        """Who has asked for the final parameters, be it there or not."""
        self._waiting: list[int] = []
        self._reading: list[int] = []
        self._stop = False

    @property
    def version(self) -> int:
        """Updates of this copy so far, those from other sites included."""
        return self._copy.version

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were applied at which staleness."""
        return self._copy.staleness

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each worker of the site it holds."""
        return dict(zip(self._presence.pushers, self._held.steps, strict=True))

    def stats(self) -> ServerStats:
        """Return what it has counted."""
        return ServerStats(dict(self.staleness), self.version, self.steps)

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a worker of the site or from another site, and gives the replies.

        Raises:
            RefusedMessage: a message that none of them sends.
        """
        if source not in self._presence.numbers:
            return self._hear_server(source, message)
        if message.kind is Kind.PUSH:
            return self._push(source, message)
        if message.kind is Kind.PULL:
            return self._pull(source, message)
        if message.kind is Kind.LEAVE:
            return self._leave(source)
        if message.kind is Kind.JOIN:
            admit_bare(message._replace(step=0))
            return self._carry_out(self._gate.enter(self._presence.numbers[source], message.step))
        return self._begin(source, message, self._post.peers)

    def on_loss(self, rank: int) -> list[Reply]:
        """Goes on without a worker of the site, until a successor pulls; what it has pushed still counts."""
        if rank not in self._presence.numbers or not self._presence.lose(rank):
            return []
        self._lost.add(rank)
        self._waiting = [other for other in self._waiting if other != rank]
        self._reading = [other for other in self._reading if other != rank]
        return self._go_on_without(rank)

    def state(self) -> State:
        """Gives all that a resumed server needs: parameters, what is unsent, and what is on its way."""
        if not self._copy.ready:
            return {}, {}
        tensors, facts = self._copy.state()
        kept, clocks = self._post.state()
        return tensors | kept, facts | {"steps": list(self._held.steps), "post": clocks}

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; worker 0's initial parameters are then not needed."""
        if not state[1]:
            return
        tensors, facts = state
        self._held.steps = list(facts["steps"])
        self._post.load_state(tensors, facts["post"])
        self._copy.load_state(state)

    def _hear_server(self, source: int, message: Message) -> list[Reply]:
        if message.kind is Kind.LEAVE and message.stop:
            self.done = True
            return []
        if source not in self._post.peers:
            raise RefusedMessage(
                Reason.SENDER, f"a site heard {message.kind.name} from rank {source}, which is no part of it"
            )
        if message.kind is Kind.ANNOUNCE:
            admit_announcement(message)
            self._post.expect(source, message)
            asked = self._presence.final is not None and message.stop
            return self._let_on() + ([(source, Message(Kind.PULL, stop=True))] if asked else [])
        if message.kind is Kind.PULL:
            admit_bare(message)
            self._ending = True
            return self._send_the_last()
        if message.kind not in (Kind.DIFFERENCE, Kind.LEAVE):
            return self._begin(source, message, ())
        packet = self._post.hear(source, message)
        self._stop |= message.stop
        if packet is not None:
            self._copy.take_in(packet)
        return self._let_on() + self._answer_final()

    def _begin(self, source: int, message: Message, tell: tuple[int, ...]) -> list[Reply]:
        """Takes the plan or the parameters, which worker 0's site passes on to the others."""
        if message.kind is Kind.CONFIGURE:
            self._copy.configure(message)
            return [(peer, message) for peer in tell]
        if message.kind is not Kind.PARAMETERS:
            raise RefusedMessage(
                Reason.KIND, f"a site cannot do anything with {message.kind.name} from rank {source}"
            )
        values = payload(message)
        replies = [(peer, message._replace(tensor=values.clone())) for peer in tell]
        if self._copy.initialise(values):
            replies += self._post.tell_again()
        asking, self._presence.asking = self._presence.asking, []
        return replies + [self._answer(rank) for rank in asking]

    def _pull(self, source: int, message: Message) -> list[Reply]:
        if message.stop:  # the final parameters
            self._presence.final, self._asker, self._ending = source, source, True
            asked = [(peer, Message(Kind.PULL, stop=True)) for peer in self._post.asleep]
            return self._send_the_last() + self._answer_final() + asked
        number = self._presence.numbers[source]
        if not self._presence.is_there(source):  # a successor
            if self._ending and source != self._asker:
                return [(source, Message(Kind.LEAVE))]
            self._presence.enter(source)
            self._lost.discard(source)
            self._gate.join(number)
            return [(source, Message(Kind.JOIN, step=self._gate.rounds.invitation(number) or 0))]
        if not self._copy.ready:
            self._presence.asking.append(source)
            return []
        self._reading.append(source)
        return self._let_read()

    def _push(self, source: int, message: Message) -> list[Reply]:
        worker = self._presence.numbers[source]
        due = self._held.steps[worker]
        admit_push(message, self._copy.values, self.version, due)
        self._stop |= message.stop
        if message.step < due:
            if not self._gate.rounds.is_next(worker, message.step):
                return [self._answer(source)]
            message = message._replace(weight=0.0)  # the server of another shard may lack it
        _, gradient, read_version, step, weight, rate, _, _ = message
        assert gradient is not None, "it has been admitted"
        self._held.hold(Contribution(worker, gradient, read_version, step, weight, rate))
        return self._carry_out(self._gate.arrive(worker, message.step))

    def _carry_out(self, decision: Decision) -> list[Reply]:
        """Makes a round's update, if there is one; who is to be answered waits for the other sites."""
        taken = [self._held.take(worker) for worker in decision.apply]
        self._held.count(taken)
        for worker in decision.answer:
            self._held.settle(worker, None)
        sources = [self._presence.pushers[worker] for worker in decision.answer]
        if not self._copy.ready:
            self._presence.asking += sources
            return []
        self._waiting += sources
        return (self._update(taken) if taken else []) + self._let_on()

    def _update(self, pushed: list[Contribution]) -> list[Reply]:
        """Makes a round's update, and tells the other sites what of all updates is significant."""
        self._copy.update(pushed)
        packet = self._copy.significant(self._rule.threshold_of(self._post.clock + 1))
        large = self._rule.is_large(packet, self._copy.values)
        return self._post.tell(packet, stop=self._stop, large=large)

    def _let_on(self) -> list[Reply]:
        """Answers the workers of a round, unless another site is too far behind; and all who may read."""
        if self._stop or self._post.clock - self._post.slowest <= self._rule.lag:
            self._reading += self._waiting
            self._waiting = []
        return self._let_read()

    def _let_read(self) -> list[Reply]:
        """Answers those who want to read, unless a packet has been announced that they must not miss."""
        if self._post.awaits:
            return []
        reading, self._reading = self._reading, []
        return [self._answer(rank) for rank in reading]

    def _leave(self, source: int) -> list[Reply]:
        """A worker leaves; with the last, all that is unsent goes to the others. Worker 0's second leave ends it."""
        if not self._presence.leave(source):
            self.done = True
            return [(rank, Message(Kind.LEAVE, stop=True)) for rank in (*self._post.peers, *self._idle)]
        return self._go_on_without(source)

    def _go_on_without(self, rank: int) -> list[Reply]:
        replies = self._carry_out(self._gate.leave(self._presence.numbers[rank]))
        if self._lost and not (self._presence.there or self._ending):
            return replies + self._post.sleep()
        return replies + self._send_the_last() + self._answer_final()

    def _send_the_last(self) -> list[Reply]:
        """Sends all that is unsent, if no worker of this site will push again."""
        if self._presence.there or self._through:
            return []
        self._through = True
        return self._post.tell(self._copy.untold(), stop=False, last=True)

    def _answer_final(self) -> list[Reply]:
        final = self._presence.ready_to_end
        if final is None or not self._post.all_gone:
            return []
        self._presence.final = None  # once
        return [self._answer(final)]

    def _answer(self, rank: int) -> Reply:
        values = self._copy.shown()
        return rank, Message(
            Kind.PARAMETERS, values, version=self.version, step=self.steps[rank], stop=self._stop
        )


class Significance:
    """One shard's unsent updates.

    Args:
        values: `(n,)`, the shard, for size and dtype.

    Attributes:
        retained: `(n,)`, U.
    """

    def __init__(self, values: Tensor) -> None:
        self.retained = torch.zeros_like(values)

    def add(self, update: Tensor) -> None:
        """Adds an update of the site's own."""
        self.retained.add_(update)

    def take(self, values: Tensor, threshold: float) -> Tensor | None:
        """Takes out what is significant beside the values as they are now; gives a packet, or None if nothing is."""
        chosen = self.retained.abs() > values.abs().mul_(threshold)
        return self._take(chosen)

    def take_all(self) -> Tensor | None:
        """Takes out everything."""
        return self._take(self.retained != 0)

    def _take(self, chosen: Tensor) -> Tensor | None:
        places = chosen.nonzero().flatten()
        if not len(places):
            return None
        sent = self.retained[places]
        self.retained[places] = 0
        short = torch.cat([sent, _as_numbers(places, sent.dtype)])
        if len(short) < len(self.retained):
            return short
        whole = torch.zeros_like(self.retained)
        whole[places] = sent
        return whole


def add_packet(values: Tensor, packet: Tensor) -> None:
    """Adds what another site has sent to the values, `(n,)`, in place."""
    if len(packet) == len(values):
        values.add_(packet)
        return
    count = len(packet) // (1 + _numbers_a_place(packet.dtype))
    places = packet[count:].clone().view(_place_dtype(packet.dtype)).long()
    values.index_add_(0, places, packet[:count])


def _place_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def _numbers_a_place(dtype: torch.dtype) -> int:
    return _place_dtype(dtype).itemsize // dtype.itemsize


def _as_numbers(places: Tensor, dtype: torch.dtype) -> Tensor:
    return places.to(_place_dtype(dtype)).view(dtype)


class SiteCopy:
    """Parameters with an optimiser; `w += u, U += u` for each update u of the site's own, `w += U'` for the others'.

    Attributes:
        version: updates so far, those from other sites included.
        staleness: how many gradients were applied at which staleness.
    """

    def __init__(self) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self._shard = OptimizedShard()
        self._unsent: Significance | None = None
        self._resumed: State | None = None

    @property
    def ready(self) -> bool:
        """Whether there are parameters."""
        return self._unsent is not None

    @property
    def values(self) -> Tensor:
        """The parameters, `(n,)`, changed in place; empty until worker 0 has sent them."""
        return self._shard.values

    def configure(self, message: Message) -> None:
        """Takes the plan of the optimiser; see `OptimizedShard.configure`."""
        self._shard.configure(message)

    def initialise(self, values: Tensor) -> bool:
        """Takes the parameters; see `OptimizedShard.initialise`.

        Returns:
            Whether it goes on with those of a checkpoint instead.
        """
        self._shard.initialise(values)
        self._unsent = Significance(self._shard.values)
        if self._resumed is None:
            return False
        self._unsent.retained = self._resumed[0]["retained"]
        return True

    def update(self, pushed: Sequence[Contribution]) -> None:
        """Takes a step with the mean of gradients; those of weight 0 count nothing."""
        weighty = [entry for entry in pushed if entry.weight > 0]
        if not weighty:
            return
        before = self.values.clone()
        gradient = mean([entry.gradient for entry in weighty], [entry.weight for entry in weighty])
        self._shard.step(gradient, weighty[0].rate)
        self._told_later.add(self.values - before)
        self.staleness.update(self.version - entry.read_version for entry in weighty)
        self.version += 1

    def take_in(self, packet: Tensor) -> None:
        """Adds what another site has sent."""
        self._shard.change(lambda values: add_packet(values, packet))
        self.version += 1

    def significant(self, threshold: float) -> Tensor | None:
        """Takes out what is significant of all that has not been told; gives a packet, or None if nothing is."""
        return self._told_later.take(self.values, threshold)

    def untold(self) -> Tensor | None:
        """Takes out everything that has not been told; gives a packet, or None if there is nothing."""
        return None if self._unsent is None else self._unsent.take_all()

    def shown(self) -> Tensor:
        """Gives a copy of the parameters, one for all who are given this version."""
        return self._shard.shown()

    def state(self) -> State:
        """Gives all that a resumed copy needs."""
        tensors, facts = self._shard.state()
        counted = {str(key): count for key, count in self.staleness.items()}
        return tensors | {"retained": self._told_later.retained}, facts | {
            "version": self.version,
            "staleness": counted,
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave, before `initialise`."""
        facts = state[1]
        self.version = facts["version"]
        self.staleness = Counter({int(key): count for key, count in facts["staleness"].items()})
        self._shard.load_state(state)
        self._resumed = state

    @property
    def _told_later(self) -> Significance:
        assert self._unsent is not None, "nobody pushes before having pulled"
        return self._unsent
