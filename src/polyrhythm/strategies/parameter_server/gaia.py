"""Gaia: sites that send each other only significant changes (approximate synchronous parallel, ASP).

Hsieh, Harlap, Vijaykumar, Konomis, Ganger, Gibbons, Mutlu, "Gaia: Geo-Distributed Machine Learning
Approaching LAN Speeds", NSDI 2017.

    inside a site    w' = w + u,  U' = U + u      u: an optimizer's step with the mean of the site's gradients
    between sites    |U_j| > t_0 / sqrt(t) |w_j|  then U_j is sent, added to w_j elsewhere, and becomes 0

t counts the rounds of a site; t_0 = `threshold`. A site waits where the slowest site is more than `lag`
rounds behind (the paper's mirror clock). A packet of more than `barrier` of a shard's bytes is announced by a
message that arrives long before it, and readers of that shard wait for the packet (the selective barrier). At
w_j = 0 every change is significant.

Departures from the paper:

- Readers read whole shards, so an announcement names the shard and not its numbers.
- The paper announces a packet where the network cannot keep up. Here its size decides.
- What a site has not sent when its workers leave is sent then. So the final model, that of worker 0's site,
  holds all updates.
- A site with all workers lost continues its count from the slowest.
- The default learning rate is divided by the number of sites that have workers. All of them apply the updates
  of all,
  which add up, so a rate for one site is too long a step for several. A rate that is given is taken as it is, which is
  the paper's way.

With another number of workers in each site, what a site holds and has not sent yet stays with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.errors import RequestError
from polyrhythm.strategies.aggregator import mean
from polyrhythm.strategies.fault_policy import FaultPolicy, Rejoin
from polyrhythm.strategies.parameter_server.composition.served import WithServers
from polyrhythm.strategies.parameter_server.consistency.synchronous import SynchronousGate
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare, payload
from polyrhythm.strategies.parameter_server.serving.gate import Decision
from polyrhythm.strategies.parameter_server.serving.push_pull import ServedWorker
from polyrhythm.strategies.parameter_server.serving.rule import (
    Applied,
    Contribution,
    News,
    Presence,
    Reply,
)
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import OptimizedRule
from polyrhythm.strategies.resharding import EVERYTHING_OF_SERVER, STEPS, Held, Resharding
from polyrhythm.strategies.role_assignment import RoleAssignment, roles_in_order
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Facts, Paper, Traits, needs_as_many
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count, Fraction, NonNegative


class Gaia(WithServers):
    """Sites with a copy of the parameters each are synchronous inside, and send each other only significant changes.

    Attributes:
        sites: number of sites; they differ by at most one worker.
        threshold: share of a number's value above which its change is significant in the first round.
        lag: rounds by which the slowest site may be behind.
        barrier: share of a shard's bytes; a packet with more is announced, and readers wait for it. 1: none is.
        servers: servers of each site, each with an equal shard.
    """

    paper: ClassVar[Paper] = Paper(
        "Hsieh, Harlap, Vijaykumar, Konomis, Ganger, Gibbons, Mutlu",
        "Gaia: Geo-Distributed Machine Learning Approaching LAN Speeds",
        "NSDI",
        2017,
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M + at most MG(G-1)/N, G sites",
        staleness="updates of other sites: at most G-1 per round",
        use_it="several sites with a slow network between them",
    )
    why_not_compressed: ClassVar[str] = (
        "sites send no more than what has changed much, which is a compression of its own: leave compress out"
    )

    sites: Count = 2
    threshold: NonNegative = 0.01
    lag: int = Field(default=4, ge=0)
    barrier: Fraction = 0.5

    def traits(self, workers: int) -> Traits:
        busy = self._busy(workers)
        return replace(
            super().traits(workers),
            lockstep=busy == 1,
            updates=busy,
            gradients=workers,
            # Momentum stays inside a site, where gradients are not late.
            optimizer="" if busy == 1 else f"sgd(lr={0.05 / busy:.3g})",
            servers=self.sites * self.servers,
            sends_by_value=True,
        )

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        """Refuse more sites than workers; one worker is a site of its own."""
        super().check(workers, plan)
        if 1 < workers < self.sites:
            raise RequestError(f"gaia: {workers} workers cannot be at sites={self.sites}: give fewer sites")

    def faults(self, workers: int) -> FaultPolicy:
        """Return a policy to continue: sites hold the run's state, and none waits for one without workers."""
        # A site waits for the rounds of others, and for all of its own workers.
        return FaultPolicy.independent(workers, Rejoin.BEHIND)

    def resharding(self, before: int, after: int) -> Resharding:
        """Return how a checkpoint is converted, where as many sites have workers as had."""
        if self._busy(before) != self._busy(after):
            raise needs_as_many(self, before)
        old, new = (
            SiteMap.of(roles_in_order(workers, self.sites * self.servers), self.sites).members
            for workers in (before, after)
        )
        return Resharding(
            after=after,
            text="the sites continue with their parameters, optimizers, and unsent updates",
            servers=(STEPS, EVERYTHING_OF_SERVER),
            count=lambda held: self._taken(old, held),
            pushers=lambda server: len(new[server // self.servers]),
        )

    def _taken(self, sites: Sequence[tuple[int, ...]], held: Held) -> list[int]:
        found = list(held.steps)
        for site, members in enumerate(sites):
            states = held.servers[site * self.servers : (site + 1) * self.servers]
            for number, worker in enumerate(members):
                found[worker] = max(facts["steps"][number] for _, facts in states)
        return found

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Return the part of one worker; for it, the servers of its site are all servers."""
        sites = SiteMap.of(setting.roles, self.sites)
        servers = sites.servers[sites.site_of(setting.network.rank)]
        roles = RoleAssignment(setting.roles.workers, servers)
        return ServedWorker(replace(setting, roles=roles), takes_plans=False)

    def server(self, setting: ServerSetting) -> ServerPart:
        sites = SiteMap.of(setting.roles, self.sites)
        own, shard = divmod(setting.index, self.servers)
        same = {site: servers[shard] for site, servers in enumerate(sites.servers) if site != own}
        peers = tuple(rank for site, rank in same.items() if site in sites.busy)
        idle = tuple(rank for site, rank in same.items() if site not in sites.busy)
        return site_session(self, sites.members[own], peers, idle)

    def threshold_of(self, number: int) -> float:
        """Return the threshold of a site's round, counted from 1."""
        return self.threshold / sqrt(number)

    def _busy(self, workers: int) -> int:
        return min(self.sites, workers)


@dataclass(frozen=True)
class SiteMap:
    """The ranks of all sites.

    Attributes:
        members: ranks of every site's workers, neighbors; a site may have none.
        servers: ranks of every site's servers, in the order of their shards.
    """

    members: tuple[tuple[int, ...], ...]
    servers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, roles: RoleAssignment, sites: int) -> SiteMap:
        """Share out the workers and the servers."""
        cuts = shards(len(roles.workers), min(sites, len(roles.workers)))
        members = [roles.workers[cut] for cut in cuts] + [()] * (sites - len(cuts))
        each = len(roles.servers) // sites
        servers = tuple(roles.servers[site * each : (site + 1) * each] for site in range(sites))
        return cls(tuple(members), servers)

    @property
    def busy(self) -> tuple[int, ...]:
        """Numbers of the sites that have workers."""
        return tuple(site for site, members in enumerate(self.members) if members)

    def site_of(self, worker: int) -> int:
        """Return the number of a worker's site."""
        return next(site for site, members in enumerate(self.members) if worker in members)


def site_session(
    terms: Gaia, members: tuple[int, ...], peers: tuple[int, ...], idle: tuple[int, ...]
) -> ServerSession:
    """Make one server of a site.

    Args:
        terms: threshold, lag and barrier of all sites.
        members: ranks of the site's workers.
        peers: ranks of the same shard's servers at the other sites that have workers.
        idle: ranks of the same shard's servers at sites without.
    """
    post = Post(peers)
    return ServerSession(members, SiteRule(SiteGate(len(members), post, terms.lag), post, idle, terms))


class SiteGate(SynchronousGate):
    """Waits for all workers of the site, and withholds its answers until other sites are near enough.

    Args:
        lag: rounds by which the slowest site may be behind.
    """

    def __init__(self, members: int, post: Post, lag: int) -> None:
        super().__init__(members)
        self._post = post
        self._lag = lag
        self._waiting: list[int] = []
        """Workers that have finished their round and wait for slower sites."""
        self._reading: list[int] = []
        """Workers that wait only for announced packets."""

    def ask(self, pusher: int, step: int) -> Decision:
        self._reading.append(pusher)
        return Decision()

    def arrive(self, pusher: int, step: int) -> Decision:
        return self._withheld(super().arrive(pusher, step))

    def leave(self, pusher: int) -> Decision:
        self._waiting = [other for other in self._waiting if other != pusher]
        self._reading = [other for other in self._reading if other != pusher]
        return self._withheld(super().leave(pusher))

    def enter(self, pusher: int, number: int) -> Decision:
        return self._withheld(super().enter(pusher, number))

    def stop(self) -> None:
        self._post.stop = True

    def applied(self) -> Decision | None:
        """Answer the workers of a round, unless another site is too far behind, and all that may read."""
        post = self._post
        if post.stop or post.clock - post.slowest <= self._lag:
            self._reading += self._waiting
            self._waiting = []
        if post.awaits or not self._reading:
            return None
        reading, self._reading = self._reading, []
        return Decision(answer=tuple(reading))

    def _withheld(self, decision: Decision) -> Decision:
        self._waiting += decision.answer
        return decision._replace(answer=())


class SiteRule(OptimizedRule):
    """A site's copy of a shard, and the changes that it sends to other sites.

        workers of the site ── PUSH ─▶ held until all have arrived ─▶ optimizer step: w += u, U += u
        other sites         ◀─ significant part of U ─────┘      ─▶ w += what they send
        workers of the site ◀─ PARAMETERS ── unless another site is too many rounds behind,
                                             or has announced a large packet

    Without a lost worker its site continues, as synchronous servers do. A site with all workers lost is not
    waited for; when one of them has a replacement, its rounds continue from the slowest site's. At the end
    such a site is asked for its last packet, after which it admits no worker. The worker that asked for that
    may be lost, and has a replacement: one that asks again, and has no step left to take.

    Args:
        post: clock of this site, and those of the other sites.
        idle: ranks of the same shard's servers at sites without workers.
    """

    converses = True

    def __init__(self, gate: SiteGate, post: Post, idle: tuple[int, ...], terms: Gaia) -> None:
        super().__init__(gate)
        self.final = post.all_left
        self._post = post
        self._idle = idle
        self._terms = terms
        self._final_asked = self._ending = self._through = self._over = False
        """Whether rank 0 has ever asked here for the final parameters; whether admission has ended; whether
        all unsent changes are sent; whether the run is over.
        """
        self._asked: set[int] = set()
        """Other sites without workers that were asked for their last packet."""

    def configure(self, message: Message) -> None:
        """Take the plan of the optimizer, and pass it on to the other sites."""
        super().configure(message)
        self.outgoing += [(peer, message) for peer in self._post.peers]

    def begin(self, values: Tensor) -> None:
        """Begin, and pass the parameters on to the other sites."""
        copies = [(peer, Message(Kind.PARAMETERS, values.clone())) for peer in self._post.peers]
        self._begin_here(values)
        self.outgoing = copies + self.outgoing

    def _begin_here(self, values: Tensor) -> None:
        resumed = self._resumed
        super().begin(values)
        self._unsent = Significance(self.values)
        if resumed is not None:
            self._unsent.retained = resumed[0]["retained"]
            self.outgoing += self._post.resend_round()

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied:
        """Make a round's update, and send the other sites the significant part of all updates."""
        weighty = [entry for entry in batch if entry.weight > 0]
        if weighty:
            before = self.values.clone()
            gradient = mean([entry.gradient for entry in weighty], [entry.weight for entry in weighty])
            self.step(gradient, weighty[0].rate)
            self._unsent.add(self.values - before)
        post, terms = self._post, self._terms
        packet = self._unsent.take(self.values, terms.threshold_of(post.clock + 1))
        large = packet is not None and len(packet) > terms.barrier * len(self.values)
        self.outgoing += post.next_round(packet, large=large)
        staleness = Counter(version - entry.read_version for entry in weighty)
        return Applied(batch, int(bool(weighty)), staleness)

    def on_peer(self, peer: int, message: Message) -> News | None:
        post, kind = self._post, message.kind
        if kind is Kind.OVER:
            self._over = True
            return News(done=True)
        if peer not in post.peers:
            raise RefusedMessage(
                Reason.SENDER, f"a site received {kind.name} from rank {peer}, which is no part of it"
            )
        if kind is Kind.CONFIGURE:
            super().configure(message)
        elif kind is Kind.PARAMETERS:
            self._begin_here(payload(message))
        elif kind is Kind.ANNOUNCE:
            post.expect(peer, Announcement.of(message))
        elif kind is Kind.PULL:
            admit_bare(message)
            self._ending = True
        elif kind in (Kind.DIFFERENCE, Kind.LEAVE):
            packet = post.receive(peer, SiteRound.of(message))
            post.stop |= message.stop
            self.final = post.all_left
            if packet is None:
                return News(stop=message.stop)
            self.change(lambda values: add_packet(values, packet))
            return News(updates=1, stop=message.stop)
        else:
            raise RefusedMessage(Reason.KIND, f"a site cannot do anything with {kind.name} from rank {peer}")
        return None

    def attend(self, presence: Presence) -> None:
        """Notify the other sites of an empty site: not to wait, all that is unsent, or that the run is over."""
        there, lost, final, done = presence
        post = self._post
        if done:
            if not self._over:
                others = (*post.peers, *self._idle)
                self.outgoing += [(rank, Message(Kind.OVER)) for rank in others]
            self._over = True
            return
        self._final_asked |= final
        self._ending |= final
        if not there and lost and not self._ending:
            self.outgoing += post.sleep()
        elif not there and not self._through:
            self._through = True
            self.outgoing += post.next_round(self._unsent.take_all() if self.ready else None, last=True)
        asleep = post.asleep if final else ()
        self.outgoing += [(peer, Message(Kind.PULL, stop=True)) for peer in asleep if peer not in self._asked]
        self._asked = set(asleep)

    def admits(self, pusher: int) -> bool:
        return not self._ending or (pusher == 0 and self._final_asked)

    def state(self) -> State:
        tensors, facts = super().state()
        kept, clocks = self._post.state()
        return tensors | {"retained": self._unsent.retained} | kept, facts | {"post": clocks}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._post.load_state((state[0], state[1]["post"]))


class SiteRound(NamedTuple):
    """A round of a site, as sent to the same shard's server at another site.

    Attributes:
        number: number of the round, from 1.
        packet: `(m,)`, what of the site's updates is significant, if anything is; see `Significance`.
        latest: number of the receiver's newest round that the site has received.
        stop: whether someone wants to stop.
        last: whether the site's workers have left.
    """

    number: int
    packet: Tensor | None
    latest: int
    stop: bool = False
    last: bool = False

    def message(self) -> Message:
        """Pack it to be sent."""
        kind = Kind.LEAVE if self.last else Kind.DIFFERENCE
        return Message(kind, self.packet, version=self.number, step=self.latest, stop=self.stop)

    @classmethod
    def of(cls, message: Message) -> SiteRound:
        """Unpack the result of `message`."""
        last = message.kind is Kind.LEAVE
        return cls(message.version, message.tensor, message.step, message.stop, last)


@dataclass(frozen=True)
class Announcement:
    """Notice ahead of a round: its packet is large, or it is suspended while the site sleeps.

    Attributes:
        number: number of the round, from 1.
        sleeps: whether all workers of the site are lost.
    """

    number: int
    sleeps: bool = False

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(Kind.ANNOUNCE, version=self.number, stop=self.sleeps)

    @classmethod
    def of(cls, message: Message) -> Announcement:
        """Unpack the result of `message`; raise `RefusedMessage` if it has a tensor or an impossible number."""
        if message.tensor is not None:
            raise RefusedMessage(Reason.PAYLOAD, "an ANNOUNCE arrived with a tensor")
        if message.version < 1:
            raise RefusedMessage(Reason.NUMBERS, f"an ANNOUNCE arrived of round {message.version}")
        return cls(message.version, message.stop)


_PACKET = "packet."


class Post:
    """One server's end of the messages with the same shard's servers at other sites.

        site ── ANNOUNCE(round) ─▶                                  all other sites, before a large packet
             ── DIFFERENCE(packet or nothing, round, the newest round of yours that I have) ─▶       every round
             ── LEAVE(packet, round, …) ─▶                                                    after its last
             ── ANNOUNCE(round, stop) ─▶          that round is suspended: all workers are lost
             ── PULL(stop) ─▶                     a site with all workers lost: send your last packet
             ── OVER ─▶

    A packet is kept until all others have acknowledged it, so that a checkpoint holds packets in transit.
    Rounds that a resumed site repeats are ignored by sites that have them.

    Args:
        peers: ranks of the same shard's servers at all other sites that have workers.

    Attributes:
        clock: rounds of this site so far.
        stop: whether someone, here or elsewhere, wants to stop.
    """

    def __init__(self, peers: tuple[int, ...]) -> None:
        self.clock = 0
        self.stop = False
        self._latest = dict.fromkeys(peers, 0)
        self._acknowledged = dict.fromkeys(peers, 0)
        self._gone: set[int] = set()
        self._asleep: set[int] = set()
        self._sleeps = False
        self._announced: dict[int, int] = {}
        self._kept: dict[int, Tensor] = {}

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks of the other sites' servers."""
        return tuple(self._latest)

    @property
    def slowest(self) -> int:
        """The least clock of the sites that are still training, as far as is known; this site's own if it is alone."""
        away = self._gone | self._asleep
        return min((clock for peer, clock in self._latest.items() if peer not in away), default=self.clock)

    @property
    def asleep(self) -> tuple[int, ...]:
        """Ranks of other sites' servers with all workers lost, until they make another round."""
        return tuple(sorted(self._asleep - self._gone))

    def sleep(self) -> list[Reply]:
        """Return messages that exempt the other sites from waiting for this one, since all its workers have failed."""
        if self._sleeps:
            return []
        self._sleeps = True
        announcement = Announcement(self.clock + 1, sleeps=True).message()
        return [(peer, announcement) for peer in self._latest]

    @property
    def awaits(self) -> bool:
        """Whether a packet has been announced that is still on its way."""
        return bool(self._announced)

    @property
    def all_left(self) -> bool:
        """Whether all other sites have sent their last."""
        return len(self._gone) == len(self._latest)

    def next_round(self, packet: Tensor | None, *, large: bool = False, last: bool = False) -> list[Reply]:
        """Begin the next round with its significant changes; return the messages to all other sites.

        Args:
            packet: packet to send, if any.
            large: whether the packet is to be announced.
            last: whether this site's workers have left.
        """
        if self._sleeps:  # its missing rounds are not waited for
            self._sleeps = False
            self.clock = max(self.clock, self.slowest)
        self.clock += 1
        if packet is not None and self._latest:
            self._kept[self.clock] = packet
        announcement = Announcement(self.clock).message()
        stop = self.stop and not last
        return [(peer, announcement) for peer in self._latest if large] + [
            (peer, SiteRound(self.clock, packet, latest, stop, last).message())
            for peer, latest in self._latest.items()
        ]

    def resend_round(self) -> list[Reply]:
        """Return the messages that others may not have received before a checkpoint was made."""
        return [
            (peer, SiteRound(number, packet, latest).message())
            for peer, latest in self._latest.items()
            for number, packet in self._kept.items()
        ]

    def expect(self, peer: int, announcement: Announcement) -> None:
        """Take another site's announcement."""
        if announcement.sleeps:
            self._asleep.add(peer)
        elif announcement.number > self._latest[peer]:
            self._announced[peer] = announcement.number

    def receive(self, peer: int, site_round: SiteRound) -> Tensor | None:
        """Take another site's round; return its packet, if it has one that is new."""
        self._acknowledged[peer] = max(self._acknowledged[peer], site_round.latest)
        known = min(self._acknowledged.values())
        self._kept = {number: packet for number, packet in self._kept.items() if number > known}
        if site_round.number >= self._announced.get(peer, 0):
            self._announced.pop(peer, None)
        if site_round.last:
            self._gone.add(peer)
        if site_round.number <= self._latest[peer]:
            return None
        self._latest[peer] = site_round.number
        self._asleep.discard(peer)
        return site_round.packet

    def state(self) -> State:
        """Return clocks, and what is on its way."""
        facts = {"clock": self.clock, "heard": list(self._latest.values()), "kept": list(self._kept)}
        return {f"{_PACKET}{number}": packet for number, packet in self._kept.items()}, facts

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        tensors, facts = state
        self.clock = facts["clock"]
        self._latest = dict(zip(self._latest, facts["heard"], strict=True))
        self._kept = {number: tensors[f"{_PACKET}{number}"] for number in facts["kept"]}


class Significance:
    """One shard's unsent updates.

    A packet is U with zeros for what is kept or, where that is shorter, only the numbers that are sent and their
    indices: as integers of 4 bytes (8 next to float64), in the bits of the parameters' dtype.

    Args:
        values: `(n,)`, the shard, for size and dtype.

    Attributes:
        retained: `(n,)`, U.
    """

    def __init__(self, values: Tensor) -> None:
        self.retained = torch.zeros_like(values)

    def add(self, update: Tensor) -> None:
        """Add an update of the site's own."""
        self.retained.add_(update)

    def take(self, values: Tensor, threshold: float) -> Tensor | None:
        """Take out what is significant next to the values as they are now; return a packet, or None if nothing is."""
        chosen = self.retained.abs() > values.abs().mul_(threshold)
        return self._take(chosen)

    def take_all(self) -> Tensor | None:
        """Take out everything."""
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
    """Add the changes from another site to the values, `(n,)`, in place."""
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
