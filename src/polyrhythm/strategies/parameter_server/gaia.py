"""Gaia: sites that tell each other only what is significant (approximate synchronous parallel, ASP).

Hsieh, Harlap, Vijaykumar, Konomis, Ganger, Gibbons, Mutlu, "Gaia: Geo-Distributed Machine Learning
Approaching LAN Speeds", NSDI 2017.

    inside a site    w' = w + u,  U' = U + u      u: an optimiser's step with the mean of the site's gradients
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
- A site whose workers are lost counts on from the slowest.

With another number of workers in each site, what a site holds and has not sent yet stays with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.parameter_server.composition.served import WithServers
from polyrhythm.strategies.parameter_server.serving.push_pull import ServedWorker
from polyrhythm.strategies.parameter_server.sites.site_server import SiteMap, SiteRule, SiteServer
from polyrhythm.strategies.role_assignment import RoleAssignment, cast_in_order
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import STEPS, Held, Resharding, StateField
from polyrhythm.strategies.strategy import Facts, Paper, Traits, needs_as_many
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.quantities import Count, Fraction, NonNegative


class Gaia(WithServers):
    """Sites with a copy of the parameters each go in step inside, and tell each other only significant changes.

    Attributes:
        sites: how many; they differ by at most one worker.
        threshold: share of a number's value above which its change is significant in the first round.
        lag: rounds by which the slowest site may be behind.
        barrier: share of a shard's bytes; a packet with more is announced, and readers wait for it. 1: none is.
        servers: of each site, each with an equal shard.
        placement: where all servers run.
    """

    paper: ClassVar[Paper] = Paper(
        "Hsieh, Harlap, Vijaykumar, Konomis, Ganger, Gibbons, Mutlu",
        "Gaia: Geo-Distributed Machine Learning Approaching LAN Speeds",
        "NSDI",
        2017,
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M + at most MG(G-1)/N, G sites",
        staleness="what other sites send meanwhile: at most G-1 updates a round",
        use_it="several sites with a slow network between them",
        when_a_worker_dies="its site and the others go on, and a successor takes over the steps that are left",
    )

    sites: Count = 2
    threshold: NonNegative = 0.01
    lag: int = Field(default=4, ge=0)
    barrier: Fraction = 0.5

    def traits(self, workers: int) -> Traits:
        """Return those of sites, which keep some of their changes to themselves."""
        busy = self._busy(workers)
        return replace(
            super().traits(workers),
            lockstep=busy == 1,
            updates=busy,
            gradients=workers,
            rate_divisor=busy,
            reads_newest=busy == 1,
            servers=self.sites * self.servers,
            sends_by_value=True,
        )

    def faults(self, workers: int) -> FaultPolicy:
        """Return going on: sites hold what the run has come to, and none waits for one without workers."""
        # A site waits for the rounds of others, and for all of its own workers.
        return FaultPolicy(worker=OnLoss.GO_ON, leader=True, spares=workers - 1, rejoin=Rejoin.BEHIND)

    def resharding(self, before: int, after: int) -> Resharding:
        """Where as many sites have workers as had."""
        if self._busy(before) != self._busy(after):
            raise needs_as_many(self, before)
        old, new = (
            SiteMap.of(cast_in_order(workers, self.sites * self.servers), self.sites).members
            for workers in (before, after)
        )
        return Resharding(
            after=after,
            text="the sites go on with their parameters, optimisers, and what they owe each other",
            servers=(STEPS, StateField("*", "keep", "server")),
            count=lambda held: self._taken(old, held),
            pushers=lambda server: len(new[server // self.servers]),
        )

    def _taken(self, sites: Sequence[tuple[int, ...]], held: Held) -> list[int]:
        """Return how many gradients of each worker its site has."""
        found = list(held.steps)
        for site, members in enumerate(sites):
            states = held.servers[site * self.servers : (site + 1) * self.servers]
            for number, worker in enumerate(members):
                found[worker] = max(facts["steps"][number] for _, facts in states)
        return found

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker, to whom the servers of its site are all there are."""
        sites = SiteMap.of(setting.cast, self.sites)
        servers = sites.servers[sites.site_of(setting.network.rank)]
        return ServedWorker(replace(setting, cast=RoleAssignment(setting.cast.workers, servers)))

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server."""
        sites = SiteMap.of(setting.cast, self.sites)
        own, shard = divmod(setting.index, self.servers)
        same = {site: servers[shard] for site, servers in enumerate(sites.servers) if site != own}
        peers = tuple(rank for site, rank in same.items() if site in sites.busy)
        idle = tuple(rank for site, rank in same.items() if site not in sites.busy)
        rule = SiteRule(threshold=self.threshold, lag=self.lag, barrier=self.barrier)
        return SiteServer(sites.members[own], peers, idle, rule)

    def _busy(self, workers: int) -> int:
        return min(self.sites, workers)
