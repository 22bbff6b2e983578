"""Mixed mode: synchronous inside a group of replicas, asynchronous between groups.

Campos, Sastre, Yagues, Bellver, Giro-i-Nieto, Torres, "Distributed training strategies for a computer vision
deep learning algorithm on a distributed GPU cluster", ICCS 2017, sections 5 and 6.

    inside a group    g = sum_i b_i g_i / sum_i b_i     over its R replicas
    between groups    w' = w - lr * g(w_old)            at the server, whenever a group's g arrives

R = `replicas`. Only the first replica of a group talks to the servers, and it hands their answer on. Inside a
group, workers may also follow another strategy (`inside`). With local_sgd a group takes a round of steps by
itself, with the user's optimiser, and w' = w + (its model - the model that it had read).

Departures from the paper:

- The paper's group is one node with 4 GPUs. Here it is R neighbouring workers, wherever they run.
- Any consistency and merge rule may be chosen between groups. The paper has the asynchronous and the plain
  one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.parameter_server.composition.served import WithServers, check_rules
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.groups.group_server import GroupServer
from polyrhythm.strategies.parameter_server.groups.mixed_worker import (
    Circle,
    Gradients,
    MixedWorker,
    Models,
    groups_of_rounds,
)
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.strategies.parameter_server.rules.merge_rule import MERGE_RULES, MergeRule
from polyrhythm.strategies.parameter_server.serving.gate import CONSISTENCIES, Consistency
from polyrhythm.strategies.parameter_server.serving.resharding import of_servers
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import Resharding
from polyrhythm.strategies.strategy import (
    AveragesGradients,
    Facts,
    GroupOutput,
    Paper,
    SizesBuckets,
    Strategy,
    Traits,
    needs_as_many,
)
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan


class Mixed(WithServers, SizesBuckets):
    """Groups of replicas average inside and meet other groups only at the servers.

    Attributes:
        replicas: workers in a group; the last group may have fewer.
        servers: how many, each with an equal shard.
        consistency: who may proceed when, between groups.
        merge: what becomes of a group's gradient that was computed from older parameters.
        placement: where servers run.
        inside: how a group goes on inside; a strategy whose workers go in step.
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
        when_a_worker_dies=(
            "its group regroups and pushes on, and a successor joins it; other groups take no notice (where groups "
            "average gradients inside)"
        ),
    )

    replicas: int = Field(default=2, ge=1)
    consistency: Annotated[Consistency, chosen("consistency", CONSISTENCIES)] = Asynchronous()
    merge: Annotated[MergeRule, chosen("merge rule", MERGE_RULES)] = Plain()
    inside: Annotated[Strategy, chosen("inside strategy", *FAMILIES)] = Synchronous()

    def traits(self, workers: int) -> Traits:
        """Return those of the consistency between groups, and of what goes on inside."""
        groups, inside = self.groups(workers), self._inside(workers)
        lockstep = groups == 1 or self.consistency.in_step()
        updates, every = self.consistency.updates_per_step(groups), inside.exchange_every
        applied = self.consistency.gathers(groups) if self.consistency.drops else groups
        starts = range(0, workers, self.replicas)
        return replace(
            super().traits(workers),
            lockstep=lockstep,
            local_models=every != 1,
            exchange_every=every,
            updates=updates,
            gradients=max(1, applied // max(1, every)),  # what a round moves by counts as one
            # A merge rule that itself lets stale gradients count for less needs no lower rate.
            rate_divisor=1 if self.merge.divides else updates,
            reads_newest=every == 1,
            skips_steps=self.consistency.drops and not lockstep,
            groups=tuple(tuple(range(start, min(start + self.replicas, workers))) for start in starts),
            slices=min(self.replicas, workers),
            exact_sums=inside.exact_sums,
            # Where servers own the optimiser: what a round moves by is rounded on its way.
            plain_alone=inside.output is GroupOutput.GRADIENTS,
        )

    def faults(self, workers: int) -> FaultPolicy:
        """Return regrouping inside, where groups average gradients as workers can that regroup."""
        common = FaultPolicy(skips_not_finite=not self.consistency.in_step())
        gradients = self._inside(2).output is GroupOutput.GRADIENTS
        if workers == 1 or not (gradients and self.inside.faults(2).regroups):
            return common
        groups, lockstep = self.groups(workers), self.traits(workers).lockstep
        return replace(
            common,
            worker=OnLoss.REGROUP_GROUP,
            leader=True,  # servers hold what a run has come to, also where groups go in lockstep
            # As many workers as cannot be more whole groups than the consistency can do without.
            spares=min(workers - 1, self.consistency.spares(groups) if self.consistency.drops else workers),
            rejoin=Rejoin.BEHIND if lockstep else Rejoin.LEVEL,
        )

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        """Refuses what the servers' parts cannot do with so many groups."""
        super().check(workers, plan)
        check_rules(self.consistency, Handling(self.merge), self.groups(workers), self.servers)
        if self.consistency.own_updates:
            raise RequestError(
                f"{self.consistency}: replicas of a group share what their leader reads, and cannot each update a "
                "copy of their own: leave cached_reads out"
            )
        check_inside(self.inside, min(self.replicas, workers), self.consistency, self.merge)

    def groups(self, workers: int) -> int:
        """How many groups there are."""
        return -(-workers // self.replicas)

    def resharding(self, before: int, after: int) -> Resharding:
        """The servers count other groups, whose gradients they get or whose rounds."""
        old, new = self.traits(before), self.traits(after)
        servers = of_servers(
            self.consistency, old.groups, after, self.groups(after), round_steps=new.exchange_every
        )
        if self._inside(after).output is GroupOutput.GRADIENTS:
            return servers
        if old.exchange_every != new.exchange_every:
            raise needs_as_many(self, before)
        return groups_of_rounds(servers, self.inside.resharding(before, after))

    def bucket_bytes_for(self, workers: Communicator | None, like: Tensor) -> int | None:
        """As the inside strategy has it."""
        return self.inside.bucket_bytes_for(workers, like) if isinstance(self.inside, SizesBuckets) else None

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Return the part of one worker."""
        number = setting.workers.rank // self.replicas
        members = range(number * self.replicas, min((number + 1) * self.replicas, setting.workers.size))
        circle = Circle(setting, number, members)
        if isinstance(self.inside, AveragesGradients):
            mean_of = partial(self.inside.gradient_mean, flat=setting.flat)
            return MixedWorker(setting, circle, Gradients(mean_of, circle.group, setting.plan))
        return MixedWorker(setting, circle, Models(setting, circle.group, self.inside))

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server, to which groups talk through one member each."""
        groups = self.members(setting.cast)
        return GroupServer(groups, self.consistency, Handling(self.merge), setting)

    def _inside(self, workers: int) -> Traits:
        """Return the traits of a whole group."""
        return self.inside.traits(min(self.replicas, workers))

    def members(self, cast: RoleAssignment) -> list[tuple[int, ...]]:
        """Return the ranks of every group's workers."""
        starts = range(0, len(cast.workers), self.replicas)
        return [cast.workers[start : start + self.replicas] for start in starts]


def check_inside(inside: Strategy, members: int, consistency: Consistency, merge: MergeRule) -> None:
    """Refuses what cannot be.

    Args:
        inside: how a group goes on.
        members: of a group.
        consistency: between groups.
        merge: what servers make of what comes late.

    Raises:
        RequestError: with the reason and what would work.
    """
    inside.check(members)
    output = inside.traits(members).output
    if output is GroupOutput.NOTHING:
        raise RequestError(
            f"mixed(inside={inside}): {_reason(inside)}: use synchronous, or a strategy whose workers meet in "
            "rounds, such as local_sgd"
        )
    if output is GroupOutput.GRADIENTS:
        return
    if consistency.drops:
        raise RequestError(
            f"mixed(inside={inside}): with {consistency} a late group would lose a whole round: use another "
            "consistency, or inside=synchronous"
        )
    if merge.remembers:
        raise RequestError(
            f"mixed(inside={inside}): {merge} corrects a gradient with its own square, and a round of several "
            "steps is none: use merge=staleness_aware, or inside=synchronous"
        )


def _reason(inside: Strategy) -> str:
    """Says why a strategy has nothing for servers above it."""
    traits = inside.traits(2)
    if traits.servers:
        return "it has servers of its own, and those of mixed are for all groups"
    if not traits.lockstep or (traits.exchange_every == 1 and not traits.identical):
        return "its workers never hold the same model"
    if traits.exchange_every == 0:
        return "its workers meet in the end only"
    if traits.exchange_every == 1:
        return "its gradients travel while the next forward pass runs, which begins with what servers answer"
    return (
        "its rounds begin at points, or at times, of their own, and servers would put the workers elsewhere"
    )
