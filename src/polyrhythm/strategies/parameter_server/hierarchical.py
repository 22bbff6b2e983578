"""Hierarchical parameter servers: leaves with a group of workers each, and roots above them.

Gupta, Zhang, Wang, "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning", ICDM 2016, arXiv
1509.04210, whose Rudra-adv has a tree of servers that aggregate.

    leaf      g = sum_i b_i g_i / sum_i b_i                            over its group
    root      w' = w - lr * mean over leaves, weighted with their samples
              synchronous: of all leaves; asynchronous: of each g as it arrives

Synchronous at both levels is the mean over all workers; asynchronous above is mixed mode. With k leaves
(`groups`) a root receives M k times a step instead of N times.

Departure from the paper: there are two levels, however many workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.parameter_server.composition.served import WithServers
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.levels.leaf_server import LeafServer, Levels
from polyrhythm.strategies.parameter_server.serving.gate import CONSISTENCIES, Consistency
from polyrhythm.strategies.parameter_server.serving.push_pull import ServedWorker
from polyrhythm.strategies.parameter_server.serving.resharding import of_servers
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import shard_session
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import Resharding
from polyrhythm.strategies.strategy import Facts, Paper, Traits
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count


class Hierarchical(WithServers):
    """Leaf servers average the gradients of a group of workers each, and push one to the root servers.

    Attributes:
        groups: of workers, each with a leaf server; they differ by at most one worker.
        servers: root servers, each with an equal shard.
        consistency: who may proceed when, between groups; inside a group all go together.
        placement: where all servers run.
    """

    paper: ClassVar[Paper] = Paper(
        "Gupta, Zhang, Wang",
        "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning: A Systematic Study",
        "ICDM",
        2016,
        "1509.04210",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M + 2MG/N, G groups",
        staleness="0 (G-1 if asynchronous)",
        use_it="many workers, whose gradients one server could not take in",
        when_a_worker_dies="its leaf goes on without it, and a successor begins where its group is",
    )

    groups: Count = 2
    consistency: Annotated[Consistency, chosen("consistency", CONSISTENCIES)] = Synchronous()

    def traits(self, workers: int) -> Traits:
        """Return those of the consistency between groups."""
        busy = self._busy(workers)
        lockstep, updates = busy == 1 or self.consistency.in_step(), self.consistency.updates_per_step(busy)
        return replace(
            super().traits(workers),
            lockstep=lockstep,
            updates=updates,
            gradients=self.consistency.gathers(busy) if self.consistency.drops else busy,
            rate_divisor=updates,
            skips_steps=self.consistency.drops and not lockstep,
            groups=tuple(tuple(range(cut.start, cut.stop)) for cut in shards(workers, busy)),
            leaves=self.groups,
            servers=self.groups + self.servers,
            slices=self.servers,
        )

    def faults(self, workers: int) -> FaultPolicy:
        """Return going on, where there are others: leaves bear the loss of a worker, and roots hold the run's state."""
        busy, lockstep = self._busy(workers), self.traits(workers).lockstep
        # As many workers as cannot be more whole groups than the consistency can do without.
        spares = min(workers - 1, self.consistency.spares(busy) if self.consistency.drops else workers)
        common = FaultPolicy(skips_not_finite=not self.consistency.in_step())
        if spares <= 0:
            return common
        rejoin = Rejoin.BEHIND if lockstep else Rejoin.LEVEL
        return replace(common, worker=OnLoss.GO_ON, leader=True, spares=spares, rejoin=rejoin)

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        """Refuses what the consistency cannot do with so many groups."""
        super().check(workers, plan)
        self.consistency.check(self._busy(workers))
        if self.consistency.own_updates:
            raise RequestError(
                f"{self.consistency}: workers of a group share what their leaf reads, and cannot each update a copy of "
                "their own: leave cached_reads out"
            )

    def resharding(self, before: int, after: int) -> Resharding:
        """The roots count other leaves."""
        return of_servers(self.consistency, self.traits(before).groups, after, self._busy(after))

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker, to whom its leaf is the only server."""
        # What roots cannot do is refused here, before a leaf tries.
        for shard in shards(setting.flat.size, self.servers):
            setting.plan.part(shard.start, shard.stop)
        leaf = Levels.of(setting.cast, self.groups).leaf_of(setting.network.rank)
        return ServedWorker(replace(setting, cast=RoleAssignment(setting.cast.workers, (leaf,))))

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one leaf or root."""
        levels = Levels.of(setting.cast, self.groups)
        if setting.index < self.groups:
            return LeafServer(levels, setting.index)
        return shard_session(levels.busy_leaves, self.consistency, session=RootSession)

    def _busy(self, workers: int) -> int:
        return min(self.groups, workers)


class RootSession(ServerSession):
    """A session whose answers to a push go out as `VECTOR`, which leaves tell from answers to workers."""

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Take a message from a leaf; return the replies.

        Raises:
            RefusedMessage: a message that no leaf sends.
        """
        replies = super().on_message(source, message)
        if message.kind is not Kind.PUSH:
            return replies
        return [(to, reply._replace(kind=Kind.VECTOR)) for to, reply in replies]
