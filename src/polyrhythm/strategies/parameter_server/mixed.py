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

from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.allreduce.synchronous import Synchronous
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
from polyrhythm.strategies.role_assignment import RoleAssignment, cast_in_order
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import Resharding
from polyrhythm.strategies.strategy import Facts, GroupOutput, Paper, Strategy
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting


class Mixed(WithServers):
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

    @property
    def plain_alone(self) -> bool:  # type: ignore[override]  # of some compositions only
        """Where servers own the optimiser: what a round moves by is rounded on its way."""
        return self.inside.offers is GroupOutput.GRADIENTS

    def check(self, workers: int) -> None:
        """Refuses what the servers' parts cannot do with so many groups."""
        super().check(workers)
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

    def in_step(self, workers: int) -> bool:
        """As the consistency has it, and always if there is but one group."""
        return self.groups(workers) == 1 or self.consistency.in_step()

    def resharding(self, before: int, after: int) -> Resharding:
        """The servers count other groups, whose gradients they get or whose rounds."""
        groups = [*self.contributors(cast_in_order(before, self.servers)).values()]
        servers = of_servers(
            self.consistency, groups, after, self.groups(after), round_steps=self.round_steps(after)
        )
        if self.inside.offers is GroupOutput.GRADIENTS:
            return servers
        if self.round_steps(before) != self.round_steps(after):
            raise self.needs_as_many(before)
        return groups_of_rounds(servers, self.inside.resharding(before, after))

    def updates_per_step(self, workers: int) -> int:
        """As the consistency has it, of groups."""
        return self.consistency.updates_per_step(self.groups(workers))

    def shares_rate(self, workers: int) -> int:
        """Among its updates, unless the merge rule itself lets stale gradients count for less."""
        return 1 if self.merge.divides else self.updates_per_step(workers)

    def gradients_per_step(self, workers: int) -> int:
        """One a group, or as many of them as the consistency does not drop; what a round moves by counts as one."""
        groups = self.groups(workers)
        applied = self.consistency.gathers(groups) if self.consistency.drops else groups
        return max(1, applied // self.round_steps(workers))

    def round_steps(self, workers: int) -> int:
        """Those of a group."""
        return self.inside.round_steps(min(self.replicas, workers))

    def agrees(self, workers: int) -> bool:
        """Where all go in step, and meet at every one."""
        return self.in_step(workers) and self.round_steps(workers) == 1

    def reads_every_step(self, workers: int) -> bool:
        """If groups meet the servers at every step."""
        return self.round_steps(workers) == 1

    def bucket_bytes_for(self, workers: Communicator | None, like: Tensor) -> int | None:
        """As the inside strategy has it."""
        return self.inside.bucket_bytes_for(workers, like)

    def contributors(self, cast: RoleAssignment) -> dict[int, tuple[int, ...]]:
        """The first of each group pushes its mean."""
        indices = tuple(range(len(cast.workers)))
        starts = indices[:: self.replicas]
        return {cast.workers[start]: indices[start : start + self.replicas] for start in starts}

    def slices(self, workers: int) -> int:
        """One a replica of a group."""
        return min(self.replicas, workers)

    def leaves_out_not_finite(self, workers: int) -> bool:
        """Where servers do not wait for all."""
        return not self.consistency.in_step()

    def leaves_steps_out(self, workers: int) -> bool:
        """Where late gradients are dropped."""
        return self.consistency.drops and not self.in_step(workers)

    def goes_on(self, workers: int) -> bool:
        """By regrouping inside."""
        return self.regroups_apart(workers)

    def regroups_apart(self, workers: int) -> bool:
        """Where groups average gradients inside as workers can that regroup."""
        gradients = self.inside.offers is GroupOutput.GRADIENTS and self.inside.regroups(2)
        return gradients and workers > 1

    def spares_leader(self, workers: int) -> bool:
        """Wherever they go on: servers hold what a run has come to, also where groups go in step."""
        return self.goes_on(workers)

    def spares(self, workers: int) -> int:
        """Almost all, or so many as cannot be more whole groups than the consistency can do without."""
        if not self.goes_on(workers):
            return 0
        groups = self.groups(workers)
        return min(workers - 1, self.consistency.spares(groups) if self.consistency.drops else workers)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        number = setting.workers.rank // self.replicas
        members = range(number * self.replicas, min((number + 1) * self.replicas, setting.workers.size))
        circle = Circle(setting, number, members)
        if self.inside.offers is GroupOutput.GRADIENTS:
            mean_of = partial(self.inside.gradient_mean, flat=setting.flat)
            return MixedWorker(setting, circle, Gradients(mean_of, circle.group, setting.plan))
        return MixedWorker(setting, circle, Models(setting, circle.group, self.inside))

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server, to which groups talk through one member each."""
        groups = self.members(setting.cast)
        return GroupServer(groups, self.consistency, Handling(self.merge), setting)

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
    if inside.offers is GroupOutput.NOTHING:
        raise RequestError(
            f"mixed(inside={inside}): {_reason(inside)}: use synchronous, or a strategy whose workers meet in "
            "rounds, such as local_sgd"
        )
    if inside.offers is GroupOutput.GRADIENTS:
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
    if inside.server_count:
        return "it has servers of its own, and those of mixed are for all groups"
    if not inside.in_step(2) or (inside.round_steps(2) == 1 and not inside.agrees(2)):
        return "its workers never hold the same model"
    if inside.round_steps(2) == 0:
        return "its workers meet in the end only"
    if inside.round_steps(2) == 1:
        return "its gradients travel while the next forward pass runs, which begins with what servers answer"
    return (
        "its rounds begin at points, or at times, of their own, and servers would put the workers elsewhere"
    )
