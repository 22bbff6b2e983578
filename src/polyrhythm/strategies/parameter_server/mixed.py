"""Mixed mode: synchronous inside a group of replicas, asynchronous between groups.

Campos, Sastre, Yagues, Bellver, Giro-i-Nieto, Torres, "Distributed training strategies for a computer vision deep
learning algorithm on a distributed GPU cluster", ICCS 2017, sections 5 and 6.

    inside a group    g = sum_i b_i g_i / sum_i b_i     over its R replicas
    between groups    w' = w - lr * g(w_old)            at the server, whenever a group's g arrives

R = replicas. Only the first replica of a group talks to the servers and hands their answer on. Departures: the
paper's group is one node with 4 GPUs; here it is R neighbouring workers, wherever they run. And any consistency and
merge rule may be chosen between groups, of which the paper has the asynchronous and the plain one.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.cast import Cast
from polyrhythm.strategies.facts import Facts
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.replicas import Replicas
from polyrhythm.strategies.paper import Paper
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.invariants import adds_up, serving_invariants
from polyrhythm.strategies.parameter_server.serving.merge_rule import MergeRule
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.parameter_server.serving.served import (
    CONSISTENCIES,
    MERGE_RULES,
    PLACEMENTS,
    check_rules,
)
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.parameter_server.serving.shard_server import ShardServer
from polyrhythm.strategies.placement import Placement
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting


class Mixed(Strategy):
    """Groups of replicas average inside and meet other groups only at the servers.

    Attributes:
        replicas: workers in a group; the last group may have fewer.
        servers: how many, each with an equal shard.
        consistency: who may proceed when, between groups.
        merge: what becomes of a group's gradient that was computed from older parameters.
        placement: where servers run.
        collective: how gradients are added up inside a group.
    """

    paper: ClassVar[Paper] = Paper(
        "Campos, Sastre, Yagües, Bellver, Giró-i-Nieto, Torres",
        "Distributed training strategies for a computer vision deep learning algorithm on a distributed GPU cluster",
        "ICCS",
        2017,
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="3M(R-1)/R + 2M/R",
        staleness="N/R-1",
        use_it="hosts with several workers each and a slower network between hosts",
    )

    replicas: int = Field(default=2, ge=1)
    servers: int = Field(default=1, ge=1)
    consistency: Annotated[Consistency, chosen("consistency", CONSISTENCIES)] = Asynchronous()
    merge: Annotated[MergeRule, chosen("merge rule", MERGE_RULES)] = Plain()
    placement: Annotated[Placement, chosen("placement", PLACEMENTS)] = Shared()
    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()

    @property
    def server_count(self) -> int:
        """As asked."""
        return self.servers

    @property
    def server_placement(self) -> Placement:
        """As asked."""
        return self.placement

    def check(self, workers: int) -> None:
        """Refuses what the servers' parts cannot do with so many groups."""
        super().check(workers)
        check_rules(self.consistency, Handling(self.merge), self.groups(workers), self.servers)
        if self.consistency.own_updates:
            raise RequestError(
                f"{self.consistency}: replicas of a group share what their leader reads, and cannot each update a "
                "copy of their own: leave cached_reads out"
            )

    def groups(self, workers: int) -> int:
        """How many groups there are."""
        return -(-workers // self.replicas)

    def in_step(self, workers: int) -> bool:
        """As the consistency has it, and always if there is but one group."""
        return self.groups(workers) == 1 or self.consistency.in_step()

    def updates_per_step(self, workers: int) -> int:
        """As the consistency has it, of groups."""
        return self.consistency.updates_per_step(self.groups(workers))

    def shares_rate(self, workers: int) -> int:
        """Among its updates, unless the merge rule itself lets stale gradients count for less."""
        return 1 if self.merge.divides else self.updates_per_step(workers)

    def gradients_per_step(self, workers: int) -> int:
        """One a group, or as many of them as the consistency does not drop."""
        groups = self.groups(workers)
        return self.consistency.gathers(groups) if self.consistency.drops else groups

    def contributors(self, cast: Cast) -> dict[int, tuple[int, ...]]:
        """The first of each group pushes its mean."""
        indices = tuple(range(len(cast.workers)))
        starts = indices[:: self.replicas]
        return {cast.workers[start]: indices[start : start + self.replicas] for start in starts}

    def slices(self, workers: int) -> int:
        """One a replica of a group."""
        return min(self.replicas, workers)

    def leaves_steps_out(self, workers: int) -> bool:
        """Where late gradients are dropped."""
        return self.consistency.drops and not self.in_step(workers)

    def invariants(self, conditions: Conditions) -> list[Invariant]:
        """Those of servers, a group's leader pushing its mean; and equal replicas inside each group."""
        workers = conditions.cast.workers
        starts = range(0, len(workers), self.replicas)
        groups = [workers[start : start + self.replicas] for start in starts]
        pushers = self.contributors(conditions.cast)
        in_step, handling = self.in_step(len(workers)), Handling(self.merge)
        serving = serving_invariants(conditions, pushers, self.consistency, handling, in_step=in_step)
        return [
            *super().invariants(conditions),
            *serving,
            Replicas(conditions, groups, alone=len(groups) == 1 and adds_up(handling)),
        ]

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        return MixedWorker(setting, self.replicas, self.collective)

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server, to which only the groups' leaders talk."""
        leaders = setting.cast.workers[:: self.replicas]
        return ShardServer(
            leaders, self.consistency, Handling(self.merge), setting.cast.servers, setting.index
        )


class MixedWorker(WorkerPart):
    """Averages inside its group; the group's leader pushes the mean and hands the answer on."""

    hears_buckets: ClassVar[bool] = True

    def __init__(self, setting: WorkerSetting, replicas: int, collective: Collective) -> None:
        super().__init__()
        number = setting.workers.rank // replicas
        members = range(number * replicas, min((number + 1) * replicas, setting.workers.size))
        self._group = setting.workers.subgroup(f"replicas {number}", members)
        self._flat = setting.flat
        self._mean = GradientMean(self._group, setting.flat, collective)
        self._servers = PushPull(setting) if self._group.rank == 0 else None
        self._leads_run = setting.workers.rank == 0
        self._left_out = 0

    def start(self, step: int) -> int:
        """Worker 0 hands out the shards; leaders pull; groups share what their leader got."""
        if self._leads_run and self._servers is not None:
            self._servers.initialise()
        if self._servers is not None:
            step = self._servers.pull()
        step = int(self._share(step)[0])
        self._mean.prepare()
        return step

    def begin(self, step: Step) -> None:
        """Readies the mean."""
        self._mean.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        """Starts to average a bucket inside the group."""
        self._mean.start(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Averages, exchanges through the leader, and shares the answer."""
        weight, wish = self._mean.finish(step)
        stop = False
        if self._servers is not None:
            pushed = Step(step.number, weight, wish)
            stop = self._servers.push_and_pull(pushed, weight, learning_rate)
            self._left_out = max(0, self._servers.reached - step.number - 1)
        shared_stop, left_out = self._share(float(stop), self._left_out)
        self._left_out = int(left_out)
        return bool(shared_stop)

    def next_step(self, step: int) -> int:
        """Where the servers are, if they did not wait for this group."""
        return step + 1 + self._left_out

    def catch_up(self) -> None:
        """Takes the newest parameters, the whole group together."""
        if self._servers is not None:
            self._servers.pull()
        self._share(0.0)

    def end(self) -> None:
        """Leaders leave; worker 0 waits for the final parameters."""
        if self._servers is not None:
            self._servers.leave()
            if self._leads_run:
                self._servers.pull(final=True)

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        assert self._servers is not None, "worker 0 leads its group"
        self._servers.leave()

    def _share(self, *numbers: float) -> list[float]:
        """Gives all replicas the leader's parameters and one or two numbers of its."""
        shared = self._flat.vector_and_tail
        tail = shared[-len(numbers) :]
        tail.copy_(tail.new_tensor(numbers))
        self._group.broadcast(shared)
        found: list[float] = tail.tolist()
        return found
