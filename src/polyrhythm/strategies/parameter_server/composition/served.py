"""Base classes of strategies with parameters on servers.

`WithServers` is the part that all of them share: number and placement of the servers. `Served` is for
strategies with workers that push every gradient to servers with the optimizer. Consistency (order of
progress), merge rule (treatment of stale gradients) and aggregator (combination of several) are chosen
separately; such a strategy is a composition of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from polyrhythm.compression.compressor import Compressor
from polyrhythm.compression.payoff import Exchange
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.compressing import Compressible
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.parameter_server.replication.replicated_link import (
    OverlappedReplicatedPushPull,
    ReplicatedFreeLink,
    ReplicatedPushPull,
)
from polyrhythm.strategies.parameter_server.replication.replicated_server import ReplicatedServer
from polyrhythm.strategies.parameter_server.rules.merge_rule import MergeRule
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.own_model import FreeLink
from polyrhythm.strategies.parameter_server.serving.push_pull import (
    OverlappedPushPull,
    OverlappingWorker,
    PushPull,
    ServedWorker,
)
from polyrhythm.strategies.parameter_server.serving.resharding import of_servers, recut
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import Handling, shard_session
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.role_assignment import PLACEMENTS, Placement
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import RecutsServers, Strategy, Traits
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters, shards
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count


class WithServers(Strategy):
    """A strategy with servers.

    Attributes:
        servers: number of servers, each with an equal shard.
        placement: placement where servers run.
    """

    servers: Count = 1
    placement: Annotated[Placement, chosen("placement", PLACEMENTS)] = Shared()

    def traits(self, workers: int) -> Traits:
        return Traits(servers=self.servers, shards=self.servers, placement=self.placement)

    def faults(self, workers: int) -> FaultPolicy:
        """Return a policy to continue: servers hold the run's state."""
        rejoin = Rejoin.BEHIND if self.traits(workers).lockstep else Rejoin.LEVEL
        return FaultPolicy.independent(workers, rejoin)


class ReplicableServers(WithServers, Compressible):
    """A strategy with shards that may be on two servers, and with pushes and answers that may be compressed.

    Attributes:
        replicas: servers that hold each shard; of two, one may be lost.
    """

    replicas: int = Field(default=1, ge=1, le=2)

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if self.replicas > 1 and self.servers < 2:
            raise RequestError(
                "replicas=2 puts every shard on two servers: ask for servers=2, or for replicas=1"
            )
        if self.compress is not None and self.compress.votes:
            raise RequestError(
                f"{self.compress.name} is a vote, which an optimizer on servers does not hold: use --strategy "
                "synchronous, or one_bit"
            )

    def check_model(self, flat: FlatParameters) -> None:
        """Refuse a compressor that has nothing left to do where servers cut the layers."""
        super().check_model(flat)
        if self.compress is None:
            return
        from polyrhythm.compression.layout import Layout  # no other run pays for it

        whole = Layout.of_model(flat, self.compress)
        cut = [whole.part(self.compress, each.start, each.stop) for each in shards(flat.size, self.servers)]
        if not any(part.compresses for part in cut):
            raise RequestError(
                f"{self.servers} servers cut the layers that {self.compress} would compress, so all would travel as it "
                "is: use servers=1, or another compressor, such as top_k"
            )

    def exchange(self, workers: int, whole_bytes: float, payload_bytes: float) -> Exchange:
        """Return the bytes through the busiest port: a server's if there are more workers than servers."""
        share = max(1.0, workers / self.servers)
        return Exchange(
            whole_bytes=2 * share * whole_bytes,
            sent_bytes=2 * share * payload_bytes,
            encodings=1 + 1 / self.servers,
            decodings=1 + share,
        )

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Servers that hold each shard, for the `FaultPolicy`."""
        shards = range(self.servers) if self.replicas > 1 else ()
        return tuple((shard, (shard + 1) % self.servers) for shard in shards)

    def faults(self, workers: int) -> FaultPolicy:
        return replace(super().faults(workers), holders=self.holders)

    def server_of(self, setting: ServerSetting, make: Callable[[int], ServerSession]) -> ServerPart:
        """Return a server, given the constructor of the session of a shard."""
        return (
            make(setting.index)
            if self.replicas == 1
            else ReplicatedServer(setting, setting.roles.workers, make)
        )

    def free_link(self, setting: WorkerSetting, plan: OptimizerPlan, pushes: int) -> FreeLink:
        """Return a worker's link of pushes that are not answered; `pushes` as in `ServerLink`."""
        if self.compress is None:
            return (ReplicatedFreeLink if self.replicas > 1 else FreeLink)(setting, plan, pushes)
        from polyrhythm.strategies.parameter_server.replication.compressed import CompressedReplicatedFreeLink
        from polyrhythm.strategies.parameter_server.serving.compressed import CompressedFreeLink

        link = CompressedReplicatedFreeLink if self.replicas > 1 else CompressedFreeLink
        return link(setting, plan, pushes, compressor=self.compress)

    def session(self) -> Callable[..., ServerSession]:
        """Return the constructor of a server's session."""
        if self.compress is None:
            return ServerSession
        from polyrhythm.strategies.parameter_server.serving.compressed import compressed_session

        return compressed_session(self.compress)


def optimizer_divided(merge: MergeRule, updates: int, *, lockstep: bool) -> str:
    """Return the spec of the default optimizer of asynchronous servers with a rule that divides the learning rate.

    Stale gradients need a low learning rate and no momentum (`benchmarks/asynchrony`): with N workers, the rule makes
    0.2 about 0.2 / (N - 1). Empty: the default of the other strategies.
    """
    return "sgd(lr=0.2, momentum=0)" if merge.divides and updates > 1 and not lockstep else ""


class Served(ReplicableServers, RecutsServers):
    """A strategy of pushes and pulls.

    Attributes:
        eject_after: gradients of a worker in a row that are not finite, after which servers that do not wait for all
            let it go.
        compress: compressor of gradients on the way up, and of parameter changes on the way down; None: none.
        overlap: whether gradients are pushed during the backward pass, and parameters awaited just before
            their layer's use; the numbers are the same.
    """

    eject_after: Count = 5
    overlap: bool = True

    def rules(self) -> tuple[Consistency, Handling]:
        """Return the consistency model, merge rule and aggregator that it is composed of."""
        raise NotImplementedError

    @property
    def overlaps(self) -> bool:
        """Whether pushes and pulls travel in parts, where there is more than one bucket.

        Compressed ones of replicated shards do not: a second server could not repeat a part of a difference.
        """
        return self.overlap and (
            self.compress is None or (self.compress.works_in_parts and self.replicas == 1)
        )

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        check_rules(*self.rules(), workers, self.servers)
        if self.replicas > 1:
            check_replicas(self.rules()[1])
        if self.compress is not None:
            check_compressed(self.compress, *self.rules())

    def continues_from(self, before: Strategy) -> bool:
        """Return whether only servers differ: their number, their replicas, and where they run."""
        others = {
            "servers": self.servers,
            "replicas": self.replicas,
            "placement": self.placement,
            "overlap": self.overlap,
        }
        return isinstance(before, type(self)) and before.model_copy(update=others) == self

    def recut(self, states: Sequence[State], plan: OptimizerPlan) -> list[State]:
        return list(states) if len(states) == self.servers else recut(states, plan, self.servers)

    def resharding(self, before: int, after: int) -> Resharding:
        consistency = self.rules()[0]
        plain = of_servers(consistency, [(worker,) for worker in range(before)], after, after)
        if self.compress is None:
            return plain
        from polyrhythm.strategies.parameter_server.serving.compressed import shared_out

        together = consistency.in_step()
        return replace(plain, workers=lambda held, step: shared_out(held, after, together=together))

    def traits(self, workers: int) -> Traits:
        consistency, handling = self.rules()
        lockstep, updates = consistency.in_step(), consistency.updates_per_step(workers)
        return replace(
            super().traits(workers),
            lockstep=lockstep,
            waits_for_slower=consistency.waits_for_slower(),
            updates=updates,
            gradients=consistency.gathers(workers) if consistency.drops else workers,
            # A merge rule that itself lets stale gradients count for less needs no lower rate.
            optimizer=optimizer_divided(handling.merge, updates, lockstep=lockstep),
            skips_steps=consistency.drops and not lockstep,
            draws=not (lockstep or consistency.drops or consistency.waits_for_slower()),
            scales_parts=_scales_parts(consistency),
            steps_ahead=consistency.steps_ahead(),
            measures_staleness=_reports_staleness(consistency, handling, workers),
            exact_sums=self.compress is None,
            sends_by_value=self.compress is not None and self.compress.by_value,
            overlaps_passes=self.overlaps,
        )

    def faults(self, workers: int) -> FaultPolicy:
        """Return a policy to continue, where the consistency can spare a worker: servers hold the run's state."""
        return _faults(self, workers)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        consistency = self.rules()[0]
        in_parts = self.overlaps and len(setting.flat.buckets) > 1 and setting.workers.size > 1
        link = self._link(setting, in_parts=in_parts)
        options = {
            "own_updates": consistency.own_updates,
            "dropped_late": consistency.drops,
            "scales_parts": _scales_parts(consistency),
            "lends_gradients": self._sends_as_it_lies
            and not consistency.own_updates
            and setting.plan.own is None,
        }
        if isinstance(link, OverlappedPushPull):
            return OverlappingWorker(setting, link, **options)
        return ServedWorker(setting, link, **options)

    @property
    def _sends_as_it_lies(self) -> bool:
        """Whether gradients and parameters themselves are sent, once, and held by no other process."""
        return self.compress is None and self.replicas == 1

    def _link(self, setting: WorkerSetting, *, in_parts: bool) -> PushPull:
        """Return a worker's way to the servers."""
        if self.compress is not None:
            from polyrhythm.strategies.parameter_server.replication.compressed import (
                CompressedReplicatedPushPull,
            )
            from polyrhythm.strategies.parameter_server.serving import compressed  # no other run pays for it

            if self.replicas > 1:
                return CompressedReplicatedPushPull(setting, compressor=self.compress)
            if in_parts:
                return compressed.OverlappedCompressedPushPull(setting, self.compress)
            return compressed.CompressedPushPull(setting, compressor=self.compress)
        if self.replicas > 1:
            return (OverlappedReplicatedPushPull if in_parts else ReplicatedPushPull)(setting)
        return (OverlappedPushPull if in_parts else PushPull)(setting)

    def server(self, setting: ServerSetting) -> ServerPart:
        roles = setting.roles
        consistency, handling = self.rules()
        handling = replace(handling, eject_after=self.eject_after, finite=setting.finite)

        session = self.session()
        memory = setting.memory if self._sends_as_it_lies else None

        def make(shard: int) -> ServerSession:
            return shard_session(roles.workers, consistency, handling, roles.servers, shard, session, memory)

        return self.server_of(setting, make)


def _scales_parts(consistency: Consistency) -> bool:
    return consistency.waits_for_slower() and not (consistency.in_step() or consistency.drops)


def _reports_staleness(consistency: Consistency, handling: Handling, workers: int) -> bool:
    as_they_are = handling.merge.keeps_gradients and not handling.aggregator.robust
    alone = consistency.gathers(workers) == 1 and not consistency.own_updates
    return as_they_are and alone and not consistency.in_step()


@lru_cache(maxsize=64)
def _faults(strategy: Served, workers: int) -> FaultPolicy:
    """Return the policy of a strategy for which thousands of simulated workers ask."""
    consistency, handling = strategy.rules()
    lockstep, spares = consistency.in_step(), consistency.spares(workers)
    if lockstep:  # the aggregator needs some of the remaining workers
        spares = min(spares, handling.aggregator.spares(workers))
    common = FaultPolicy(
        holders=strategy.holders,
        skips_not_finite=not (lockstep or handling.aggregator.robust),
    )
    if spares <= 0:
        return common
    rejoin = Rejoin.BEHIND if lockstep else Rejoin.LEVEL
    return replace(common, worker=OnLoss.GO_ON, leader=True, spares=spares, rejoin=rejoin)


def check_compressed(compressor: Compressor, consistency: Consistency, handling: Handling) -> None:
    """Raise `RequestError` where servers cannot work with what is compressed."""
    name = compressor.name
    if handling.aggregator.robust:
        raise RequestError(
            f"{handling.aggregator} compares gradients, which are others after {name}: use aggregator=weighted_mean, "
            "or leave compress out"
        )
    if handling.merge.remembers:
        raise RequestError(
            f"{handling.merge} compares what the server answered with what it has, and workers hold another vector "
            f"with {name}: use merge=plain, or leave compress out"
        )
    if consistency.own_updates:
        raise RequestError(
            f"with {consistency} workers continue with local updates, which a server that sends differences "
            "knows nothing: use parameter_server(consistency=bounded_staleness), without cached_reads, or leave "
            "compress out"
        )
    if consistency.drops and compressor.feedback:
        raise RequestError(
            f"{consistency} drops late gradients, and with them what {name} had kept back for them: use an unbiased "
            "compressor, such as qsgd, or another consistency"
        )


def check_replicas(handling: Handling) -> None:
    """Raise `RequestError` where shards cannot be on two servers."""
    if handling.aggregator.whole:
        raise RequestError(
            f"{handling.aggregator} compares whole gradients, for which servers wait for each other: use replicas=1"
        )


def check_rules(consistency: Consistency, handling: Handling, pushers: int, servers: int) -> None:
    """Raise `RequestError` where the parts of a composition do not go together."""
    consistency.check(pushers)
    aggregator = handling.aggregator
    gathered = consistency.gathers(pushers)
    if gathered == 1 < aggregator.least and pushers > 1:
        raise RequestError(
            f"{aggregator} chooses among several gradients, and {consistency} makes an update of every single one: use "
            "consistency=synchronous"
        )
    aggregator.check(gathered)
    if handling.merge.remembers and consistency.own_updates:
        raise RequestError(
            f"{handling.merge} compares with what servers have answered, and with {consistency} workers continue with "
            "updates of their own: leave cached_reads out"
        )
    if aggregator.whole and servers > 1 and not consistency.in_step():
        raise RequestError(
            f"{aggregator} compares whole gradients, and with {consistency} several servers need not hold those of "
            "the same workers: use servers=1, or consistency=synchronous"
        )
