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

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost, RequestError, RunError
from polyrhythm.specs import chosen
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.parameter_server.composition.served import WithServers, check_rules
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.groups.group_server import (
    WORD_TAG,
    Broken,
    Dismissal,
    GroupServer,
    Returning,
    SomeoneWaits,
    group_word,
)
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.strategies.parameter_server.rules.aggregator import MERGE_RULES, MergeRule
from polyrhythm.strategies.parameter_server.serving.gate import CONSISTENCIES, Consistency
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.parameter_server.serving.resharding import of_servers
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import Held, Resharding, State, below
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
from polyrhythm.strategies.worker_part import (
    CatchesUp,
    Follows,
    OverlapsBackward,
    Presents,
    Reassembled,
    RegroupsApart,
    SkipsSteps,
    Step,
    UsesServers,
    WorkerCalls,
    WorkerPart,
    WorkerSetting,
    Writes,
)
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan


class Mixed(WithServers, SizesBuckets):
    """Groups of replicas average inside and meet other groups only at the servers.

    Attributes:
        replicas: workers in a group; the last group may have fewer.
        consistency: who may proceed when, between groups.
        merge: what becomes of a group's gradient that was computed from older parameters.
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
            draws=not (lockstep or self.consistency.drops or self.consistency.waits_for_slower()),
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
        super().check(workers, plan)
        if 1 < workers < self.replicas:  # one worker is a group of its own
            raise RequestError(
                f"mixed: a group of replicas={self.replicas} is larger than all {workers} workers: give fewer replicas"
            )
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
        """Return what the inside strategy returns."""
        return self.inside.bucket_bytes_for(workers, like) if isinstance(self.inside, SizesBuckets) else None

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        number = setting.workers.rank // self.replicas
        members = range(number * self.replicas, min((number + 1) * self.replicas, setting.workers.size))
        circle = Circle(setting, number, members)
        if isinstance(self.inside, AveragesGradients):
            mean_of = partial(self.inside.gradient_mean, flat=setting.flat)
            return MixedWorker(setting, circle, Gradients(mean_of, circle.group, setting))
        return MixedWorker(setting, circle, Models(setting, circle.group, self.inside))

    def server(self, setting: ServerSetting) -> ServerPart:
        """Return the part of one server, to which groups talk through one member each."""
        groups = self.members(setting.roles)
        return GroupServer(groups, self.consistency, Handling(self.merge), setting)

    def _inside(self, workers: int) -> Traits:
        return self.inside.traits(min(self.replicas, workers))

    def members(self, roles: RoleAssignment) -> list[tuple[int, ...]]:
        """Return the ranks of every group's workers."""
        starts = range(0, len(roles.workers), self.replicas)
        return [roles.workers[start : start + self.replicas] for start in starts]


def check_inside(inside: Strategy, members: int, consistency: Consistency, merge: MergeRule) -> None:
    """Raise `RequestError` where a strategy does not go inside groups of so many, or not below these rules."""
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


class Contribution(NamedTuple):
    """What a group has for the servers; the numbers themselves are in every member's flat gradients.

    Attributes:
        step: the number of the contribution, what it weighs, and whether a member wants to stop.
        learning_rate: to update with.
    """

    step: Step
    learning_rate: float


class InsidePart:
    """One member's side of what happens inside a group, between two meetings of its speaker with the servers.

    All members do the same. What is pushed is the group's gradient, or (`Models`) the way back from its model, so that
    servers treat it as they treat a gradient; a merge rule that takes something off a stale one makes the way shorter.

    Attributes:
        plan: of the optimiser that the servers run.
        steps: of a contribution.
        apart: whether members have taken steps that the servers have not heard of.
        follows: what of a user's own loop its updates follow.
    """

    plan: OptimizerPlan
    steps = 1
    apart = False
    follows = Follows.NOTHING

    def start(self, step: int) -> None:
        """Begin at this step, with all members, at the servers' parameters."""
        raise NotImplementedError

    def resume(self, step: int, contributions: int) -> bool:
        """Go on in the middle of a contribution as it was saved, where all members can; return whether they do.

        Args:
            step: that this member had come to.
            contributions: that the servers hold of the group.
        """
        return False

    def begin(self, step: Step) -> None:
        """Begin a step."""
        raise NotImplementedError

    def bucket_ready(self, bucket: int) -> None:
        """Take note that the gradients of this bucket are final."""
        raise NotImplementedError

    def contribute(self, step: Step, learning_rate: float) -> Contribution | None:
        """Return what the group has for the servers, if it is time for that; all gradients are final."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Take note that the flat vector holds the servers' parameters."""

    def break_off(self) -> None:
        """Give up whatever is under way on the group's communicator, which has been revoked."""
        raise NotImplementedError

    def regroup(self, group: Communicator) -> None:
        """Go on with those who are there; `start` follows, with the servers' parameters."""
        raise NotImplementedError

    def rest(self) -> Contribution | None:
        """Return what the servers have not heard of when the run is over, if there is anything."""
        return None

    def present(self) -> Tensor | None:
        """Return the group's model, `(size,)`, where it is not the flat vector."""
        return None

    def state(self) -> State:
        """Return what a resumed member needs."""
        return {}, {}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; called before `start`."""


class Gradients(InsidePart):
    """Every step is a contribution, the mean of the group's gradients, since the servers own the optimiser.

    Args:
        mean_of: makes the mean of a group's gradients.
    """

    follows = Follows.PLAN

    def __init__(
        self, mean_of: Callable[[Communicator], GradientMean], group: Communicator, setting: WorkerSetting
    ) -> None:
        self.plan = setting.plan
        self._flat = setting.flat
        self._group = group
        self._mean = mean_of(group)

    def start(self, step: int) -> None:
        self._mean.prepare()

    def begin(self, step: Step) -> None:
        self._mean.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        self._mean.start(bucket)

    def contribute(self, step: Step, learning_rate: float) -> Contribution:
        self._mean.word = step.stop + _PLANNED * (step.plan is not None)
        try:
            weight, stop = self._mean.finish(step)
        finally:
            self._mean.word = None
        if self._group.size > 1 and self._mean.words >= _PLANNED:
            stop = self._mean.words % _PLANNED > 0
            self._agree_on_missing(step)
        return Contribution(Step(step.number, weight, stop, plan=step.plan), learning_rate)

    def _agree_on_missing(self, step: Step) -> None:
        """Note as without a gradient only the parameters that are so on all members."""
        flat = self._flat
        there = torch.full((len(flat.views),), float(step.weight > 0), device=flat.vector.device)
        there[list(flat.without_gradient)] = 0.0
        self._group.all_reduce(there)
        flat.without_gradient = tuple((there == 0).nonzero().flatten().tolist())

    def break_off(self) -> None:
        self._mean.break_off()

    def regroup(self, group: Communicator) -> None:
        self._group = group
        self._mean = self._mean.over(group)


_PLANNED = 4096
"""More than there are members, whose sums of it must be exact."""
_PART, _READ, _VECTOR = "part.", "read", "vector"


class Models(InsidePart):
    """Every round is a contribution: the workers follow another strategy, and their movement is for the servers.

        a round    members go from w to one model x, as the inside strategy has it, with the user's optimiser
        servers    w' = w - (w_read - x)        SGD of rate 1; in between, other groups may have moved w

    Checkpoints may be made in the middle of a round; it is gone on with if all members have one of the same step, and
    the servers have not heard of the round.
    """

    def __init__(self, setting: WorkerSetting, group: Communicator, inside: Strategy) -> None:
        self.plan = OptimizerPlan("SGD", (Span(0, setting.flat.size, {"lr": 1.0}),), 1.0)
        self.steps = inside.traits(group.size).exchange_every
        self._flat = setting.flat
        self._group = group
        self._part = WorkerCalls(inside.worker(replace(setting, workers=group)))
        self.follows = self._part.follows
        self._read = torch.zeros_like(setting.flat.vector)
        self._done = 0
        self._stop_requested = False
        self._saved: State | None = None

    def start(self, step: int) -> None:
        shown = self._flat.vector.clone()
        self._part.start(step)
        self._flat.vector.copy_(shown)
        self._done = step
        self.refresh()

    def resume(self, step: int, contributions: int) -> bool:
        saved = self._saved
        mine = saved is not None and saved[1]["apart"] and step // self.steps == contributions
        if not self._all_are_at(step, mine) or saved is None:
            return False
        self._part.start(step)
        self._flat.vector.copy_(saved[0][_VECTOR])
        self._read.copy_(saved[0][_READ])
        self._done, self.apart = step, True
        return True

    def begin(self, step: Step) -> None:
        self._part.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        self._part.bucket_ready(bucket)

    def contribute(self, step: Step, learning_rate: float) -> Contribution | None:
        """Take a step; at the end of a round all members hold the same, and the way back is in their gradients."""
        self._stop_requested |= self._part.gradients_ready(step, learning_rate) or step.stop
        self._done, self.apart = step.number + 1, True
        return None if self._done % self.steps else self._way_back()

    def refresh(self) -> None:
        self._read.copy_(self._flat.vector)
        self.apart = False

    def break_off(self) -> None:
        self._part.break_off()

    def regroup(self, group: Communicator) -> None:
        """Raise `RunError`: inside a round, members hold models that no server knows; see `Mixed.faults`."""
        raise RunError("groups that push rounds do not regroup")

    def rest(self) -> Contribution | None:
        if not self.apart:
            return None
        self._part.settle()
        self._part.end()
        return self._way_back()

    def present(self) -> Tensor | None:
        return self._part.present()

    def state(self) -> State:
        tensors, facts = self._part.state()
        named = {_PART + name: tensor for name, tensor in tensors.items()}
        if self.apart:
            named |= {_VECTOR: self._flat.vector, _READ: self._read}
        noted: dict[str, Any] = {"part": facts, "apart": self.apart}
        return named, noted

    def load_state(self, state: State) -> None:
        tensors, facts = state
        self._saved = {name: tensor.clone() for name, tensor in tensors.items()}, facts
        self._part.load_state((below(_PART, tensors), facts["part"]))

    def _all_are_at(self, step: int, mine: bool) -> bool:
        """Return whether all members say yes, at the same step; all get the same answer."""
        told = self._flat.vector.new_tensor([float(mine), step, step * step], dtype=torch.float64)
        self._group.all_reduce(told)
        count, steps, squares = told.tolist()
        return bool(count == self._group.size and self._group.size * squares == steps * steps)

    def _way_back(self) -> Contribution:
        torch.sub(self._read, self._flat.vector, out=self._flat.gradients)
        number = (self._done - 1) // self.steps
        stop, self._stop_requested = self._stop_requested, False
        return Contribution(Step(number, float(self._group.size), stop), 1.0)


class Circle:
    """A member's group: who is in it now, and its way to the next formation; the first server keeps the `Roster`.

    Args:
        members: indices of its workers, in order.

    Attributes:
        group: the communicator of those who are there; its rank 0 speaks for them.
        there: their indices among all workers of the run, in the same order.
        everybody: of the group, be they there or not.
        steps: contributions of the group that the servers have, where it is over.
        round: of the present formation.
    """

    def __init__(self, setting: WorkerSetting, number: int, members: range) -> None:
        self.everybody = self.there = tuple(members)
        self.group: Communicator = setting.workers.subgroup(f"replicas {number}", members)
        self.steps = 0
        self.round = 0
        self._name = f"replicas {number}"
        self._network = setting.network
        self._workers = setting.roles.workers
        self._server = setting.roles.servers[0]
        self._generation = setting.generation

    @property
    def speaks(self) -> bool:
        """Whether this member speaks for the group."""
        return self.group.rank == 0

    @property
    def due(self) -> bool:
        """Whether somebody waits to be let in; the speaker is told."""
        while self.speaks and (found := self._network.poll(self._server, WORD_TAG)) is not None:
            if group_word(found[1]) == SomeoneWaits(self.round):
                return True
        return False

    def break_off(self) -> None:
        """End the use of the group's communicator: whoever waits on it hears so, whoever else is lost."""
        for other in range(self.group.size):
            if other != self.group.rank:
                with suppress(PeerLost):
                    self.group.start_send(other, Message(Kind.REVOKE))
        self.group.revoke()

    def go_on(self) -> bool:
        """Go on with those who are there; return whether the group does, else its run is over."""
        self._network.send(self._server, Broken(self.round).message())
        return self._form()

    def enter(self) -> bool:
        """Wait to be let in, as a successor; return the same as `go_on`."""
        self._network.send(self._server, Returning(self._generation).message())
        return self._form()

    def _form(self) -> bool:
        word = group_word(self._network.receive(self._server, WORD_TAG)[1])
        while isinstance(word, SomeoneWaits):
            word = group_word(self._network.receive(self._server, WORD_TAG)[1])
        if isinstance(word, Dismissal):
            self.steps = word.steps
            return False
        self.round = word.round
        self.there = tuple(self._workers.index(rank) for rank in word.ranks)
        self.group = self._network.regrouped(f"{self._name}, {word.round}", word.ranks, word.generations)
        return True


class MixedWorker(WorkerPart, OverlapsBackward, SkipsSteps, Presents, CatchesUp, UsesServers, RegroupsApart):
    """Goes on with its group; whoever speaks for the group pushes what comes of it, and hands the answer on.

    When somebody of the group is lost, or comes, those who are there begin anew at what the servers have: the
    parameters, and how many of the group's contributions are in them. So a contribution that was under way is either
    there, or made again.
    """

    def __init__(self, setting: WorkerSetting, circle: Circle, inside: InsidePart) -> None:
        super().__init__()
        self._setting = setting
        self._circle = circle
        self._flat = setting.flat
        self._inside = inside
        self.follows = inside.follows
        self.writes = Writes.IN_STEP
        self._leads_run = setting.workers.rank == 0
        self._servers = self._link() if circle.speaks and not setting.succeeds else None
        self._left_out = 0
        self._done = 0
        self._regrouped_at: int | None = None

    def start(self, step: int) -> int:
        """Start from the servers' parameters: worker 0 hands them out, speakers pull, groups share what theirs got."""
        if self._leads_run and self._servers is not None:
            self._servers.initialise()
        reached = self._servers.pull() if self._servers is not None else 0
        contributions = int(self._share(reached)[0])
        if self._inside.resume(step, contributions):
            self._done = step
            return step
        return self._begin_at(contributions)

    def begin(self, step: Step) -> None:
        self._inside.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        self._inside.bucket_ready(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        self._left_out = 0
        contribution = self._inside.contribute(step, learning_rate)
        stop = contribution is not None and self._exchange(contribution)
        self._done = self.next_step(step.number)
        return stop

    def next_step(self, step: int) -> int:
        return step + 1 + self._left_out

    def settle(self) -> None:
        pass

    def present(self) -> Tensor | None:
        return self._inside.present()

    def catch_up(self) -> None:
        """Take the newest parameters, the whole group together, unless its members are apart or have them already."""
        if self._inside.apart or self._regrouped_at == self._done:
            return
        if self._servers is not None:
            self._servers.pull()
        self._share(0.0)
        self._inside.refresh()

    @property
    def due(self) -> bool:
        return self._circle.due

    def reassemble(self, *, enters: bool) -> Reassembled:
        """Go on with those who are there, at what the servers have of the group."""
        circle = self._circle
        if not enters:
            circle.break_off()
            self._inside.break_off()
        goes_on = circle.enter() if enters else circle.go_on()
        if goes_on:
            self._flat.renew_gradients()  # the library may still write into the old ones
            self._inside.regroup(circle.group)
            self._servers = self._link() if circle.speaks else None
            reached = self._servers.pull() if self._servers is not None else 0
            self._regrouped_at = self._begin_at(int(self._share(reached)[0]))
        else:
            self._done = circle.steps * self._inside.steps
        absent = tuple(worker for worker in circle.everybody if worker not in circle.there)
        return Reassembled(self._done, not goes_on, circle.there, absent, circle.round)

    def end(self) -> None:
        """Push what is left; speakers leave, and worker 0 waits for the final parameters."""
        left = self._inside.rest()
        if left is not None:
            self._exchange(left)
        if self._servers is not None:
            self._servers.leave()
        if self._leads_run:
            self._servers = self._servers or self._link()
            self._servers.pull(final=True)

    def let_go(self) -> None:
        assert self._servers is not None, "worker 0 has asked them for the final parameters"
        self._servers.leave()

    def state(self) -> State:
        return self._inside.state()

    def load_state(self, state: State) -> None:
        self._inside.load_state(state)

    def _link(self) -> PushPull:
        steps = self._setting.steps or 0
        return PushPull(self._setting, self._inside.plan, -(-steps // self._inside.steps))

    def _begin_at(self, contributions: int) -> int:
        self._inside.start(contributions * self._inside.steps)
        self._done = contributions * self._inside.steps
        return self._done

    def _exchange(self, contribution: Contribution) -> bool:
        """Push what the group has, and share the answer; return whether all must stop."""
        step, stop = contribution.step, False
        if self._servers is not None:
            stop = self._servers.push_and_pull(step, step.weight, contribution.learning_rate)
            self._left_out = max(0, self._servers.reached - step.number - 1)
        shared_stop, left_out = self._share(float(stop), self._left_out)
        self._left_out = int(left_out)
        self._inside.refresh()
        return bool(shared_stop)

    def _share(self, *numbers: float) -> list[float]:
        """Give all members the speaker's parameters and one or two numbers of its; return these numbers."""
        shared = self._flat.vector_and_tail
        tail = shared[-len(numbers) :]
        tail.copy_(tail.new_tensor(numbers))
        self._circle.group.broadcast(shared)
        found: list[float] = tail.tolist()
        return found


def groups_of_rounds(servers: Resharding, inside: Resharding) -> Resharding:
    """Return how groups in rounds are resharded: all get the servers' parameters, and the mean of the momenta.

        servers     have the rounds that are over ─▶ stay, and count everybody's rounds anew
        members     a round under way is left out, and computed again; momenta become the mean of all

    Every member begins as if it had been in the middle of a round and had come no further than it had begun, since the
    step that all begin with need not be the first of one.

    Args:
        servers: how servers are, which count rounds.
        inside: how the strategy inside is.
    """

    def workers(held: Held, step: int) -> dict[int, State]:
        whole = torch.cat([tensors["values"] for tensors, _ in held.servers])
        bare = replace(
            held,
            workers={
                index: (below(_PART, tensors), facts["part"])
                for index, (tensors, facts) in held.workers.items()
            },
        )
        begun = {"vector": whole, "read": whole}
        return {
            worker: (
                {_PART + name: value for name, value in (tensors | {"vector": whole}).items()} | begun,
                {"part": facts | {"apart": False}, "apart": True},
            )
            for worker, (tensors, facts) in inside.worker_states(bare, step).items()
        }

    more = "; momenta inside groups become the mean of all, and rounds under way are left out"
    return replace(servers, workers=workers, newcomers="", remark=lambda held: servers.remark(held) + more)
