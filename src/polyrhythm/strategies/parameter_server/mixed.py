"""Mixed mode: synchronous inside a group of replicas, asynchronous between groups.

Campos, Sastre, Yagues, Bellver, Giro-i-Nieto, Torres, "Distributed training strategies for a computer vision
deep learning algorithm on a distributed GPU cluster", ICCS 2017, sections 5 and 6.

    inside a group    g = sum_i b_i g_i / sum_i b_i     over its R replicas
    between groups    w' = w - lr * g(w_old)            at the server, whenever a group's g arrives

R = `replicas`. Only the first replica of a group talks to the servers, and it hands their answer on. Inside a
group, workers may also follow another strategy (`inside`). With local_sgd a group takes a round of steps by
itself, with the user's optimizer, and w' = w + (its model - the model that it had read).

Departures from the paper:

- The paper's group is one node with 4 GPUs. Here it is R neighboring workers, wherever they run.
- Any consistency and merge rule may be chosen between groups. The paper has the asynchronous and the plain
  one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.communication.log import NEWEST, Result
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.averaging.rounds.rounds_worker import RoundsWorker
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.parameter_server.composition.served import (
    WithServers,
    check_rules,
    optimizer_divided,
)
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.groups.group_server import (
    GroupServer,
)
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.strategies.parameter_server.rules.merge_rule import MERGE_RULES, MergeRule
from polyrhythm.strategies.parameter_server.serving.gate import CONSISTENCIES, Consistency
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.parameter_server.serving.resharding import of_servers
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.resharding import Held, Resharding
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import State, below, prefixed
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
from polyrhythm.strategies.worker_part import Logged, OptimizerSource, Step, WorkerPart, WorkerSetting, Writes
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.flat_parameters import TAIL
from polyrhythm.training.optimizer_plan import OptimizerPlan


class Mixed(WithServers, SizesBuckets):
    """Groups of replicas average inside and meet other groups only at the servers.

    Attributes:
        replicas: workers in a group; the last group may have fewer.
        consistency: rule of progress between groups.
        merge: merge rule for a group's stale gradient.
        inside: strategy inside a group; it must be synchronous.
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
    why_not_compressed: ClassVar[str] = (
        "the compression error of a group's mean belongs to none of its workers: use parameter_server, or "
        "synchronous"
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
            gradients=max(1, applied // max(1, every)),  # a round's movement counts as one
            optimizer=optimizer_divided(self.merge, updates, lockstep=lockstep),
            skips_steps=self.consistency.drops and not lockstep,
            draws=not (lockstep or self.consistency.drops or self.consistency.waits_for_slower()),
            groups=tuple(tuple(range(start, min(start + self.replicas, workers))) for start in starts),
            slices=min(self.replicas, workers),
            exact_sums=inside.exact_sums,
            counts_samples=inside.counts_samples,
        )

    def faults(self, workers: int) -> FaultPolicy:
        """Return regrouping inside, where workers of the inside strategy can regroup."""
        common = FaultPolicy(skips_not_finite=not self.consistency.in_step())
        if workers == 1 or not self.inside.faults(2).regroups:
            return common
        groups, lockstep = self.groups(workers), self.traits(workers).lockstep
        return replace(
            common,
            worker=OnLoss.REGROUP_GROUP,
            leader=True,  # servers hold the run's state, also where groups are in lockstep
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
        """Return the number of groups."""
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
        """Return the result of the inside strategy."""
        return self.inside.bucket_bytes_for(workers, like) if isinstance(self.inside, SizesBuckets) else None

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        number = setting.workers.rank // self.replicas
        members = range(number * self.replicas, min((number + 1) * self.replicas, setting.workers.size))
        group = setting.workers.subgroup(f"replicas {number}", members)
        if isinstance(self.inside, AveragesGradients):
            mean = self.inside.gradient_mean(group, flat=setting.flat)
            return Gradients(setting, group, mean)
        return Models(setting, group, self.inside)

    def server(self, setting: ServerSetting) -> ServerPart:
        """Return the part of one server, to which groups talk through one member each."""
        groups, steps = self.members(setting.roles), self._inside(len(setting.roles.workers)).exchange_every
        return GroupServer(groups, self.consistency, Handling(self.merge), setting, round_steps=max(1, steps))

    def _inside(self, workers: int) -> Traits:
        return self.inside.traits(min(self.replicas, workers))

    def members(self, roles: RoleAssignment) -> list[tuple[int, ...]]:
        """Return the ranks of every group's workers."""
        starts = range(0, len(roles.workers), self.replicas)
        return [roles.workers[start : start + self.replicas] for start in starts]


def check_inside(inside: Strategy, members: int, consistency: Consistency, merge: MergeRule) -> None:
    """Raise `RequestError` where a strategy does not work inside groups of `members`, or below these rules."""
    inside.check(members)
    output = inside.traits(members).output
    if output is GroupOutput.NOTHING:
        raise RequestError(
            f"mixed(inside={inside}): {_reason(inside)}: use synchronous, or a strategy with "
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


class ServersOfGroup:
    """A group's link with the servers: its first present member sends for it, and shares the answers.

    Args:
        setting: setting of this member.
        plan: plan of the optimizer that the servers run.
        contributions: contributions of the group in the whole run; 0: not known.

    Attributes:
        group: communicator of the present members; None before the first meeting.
        reached: contributions of the group that all servers had at the latest answer.
    """

    def __init__(self, setting: WorkerSetting, plan: OptimizerPlan, contributions: int) -> None:
        self.group: Communicator | None = None
        self.reached = 0
        self._setting = setting
        self._flat = setting.flat
        self._plan, self._contributions = plan, contributions
        self._link: PushPull | None = None

    def initialize(self) -> None:
        """Give the servers their parameters; worker 0 calls it, before any group pulls."""
        self._made().initialize()

    def meet(self, group: Communicator) -> None:
        """Begin a view of the group: all members receive the servers' parameters."""
        self.group = group
        self._link = self._made() if group.rank == 0 else None
        self.pull()

    def pull(self) -> None:
        """Overwrite all members' flat vectors."""
        if self._link is not None:
            self.reached = self._link.pull()
        high, low = self._share(*divmod(self.reached, _EXACT))
        self.reached = high * _EXACT + low

    def push(self, step: Step, learning_rate: float) -> bool:
        """Push the flat gradients, unless servers have that contribution; overwrite all members' flat vectors.

        Args:
            step: number of the contribution, its weight, and whether a member wants to stop.
            learning_rate: learning rate of the servers' update.

        Returns:
            Whether all must stop.
        """
        stop, following = False, step.number + 1
        if self._link is not None and self.reached <= step.number:
            stop = self._link.push_and_pull(step, step.weight, learning_rate)
            self.reached = self._link.reached
        elif self._link is not None:
            self.reached = self._link.pull()
        stops, left_out = self._share(int(stop), max(0, self.reached - following))
        self.reached = following + left_out
        return stops > 0

    def leave(self) -> None:
        """Notify the servers that no contribution follows."""
        if self._link is not None:
            self._link.leave()

    def pull_final(self) -> None:
        """Wait for the run's final parameters; worker 0 calls it, whether it is the group's sender or not."""
        self._link = self._link or self._made()
        self._link.pull(final=True)

    def _made(self) -> PushPull:
        return PushPull(self._setting, self._plan, self._contributions)

    def _share(self, *numbers: int) -> tuple[int, int]:
        """Give all members the first one's parameters, and two numbers that their dtype holds; return these."""
        assert self.group is not None, "its members have met"
        whole = self._flat.vector_and_tail
        tail = whole[-TAIL:]
        tail.copy_(tail.new_tensor(numbers))
        self.group.broadcast(whole)
        first, second = (int(number) for number in tail.tolist())
        return first, second


_EXACT = 256
"""All smaller whole numbers are exact in bfloat16."""


class MixedWorker(Logged):
    """Continues with its group: the first member pushes contributions, and shares the answers.

    A push is an entry of the group's log. The servers keep what has arrived of a group, so after a failure the next
    view's first member asks for that before it pushes again.

    Args:
        setting: setting of this member.
        exchanger: exchanges of the group's members, pushes included.
        plan: plan of the optimizer that the servers run.
        steps: steps of a contribution.

    Attributes:
        servers: the group's link with the servers.
    """

    writes = Writes.IN_STEP

    def __init__(
        self, setting: WorkerSetting, exchanger: Exchanger[Any], plan: OptimizerPlan, steps: int = 1
    ) -> None:
        super().__init__()
        self.exchanger, self.total = exchanger, setting.steps
        self.servers = ServersOfGroup(setting, plan, -(-(setting.steps or 0) // steps))
        self._flat = setting.flat
        self._leads_run = setting.workers.rank == 0

    def start(self, step: int) -> int:
        """Start from the servers' parameters: worker 0 hands them out, first members pull and share them."""
        if self._leads_run:
            self.servers.initialize()
        self.servers.meet(self.exchanger.workers)
        return self._begin_at_servers(step)

    def _begin_at_servers(self, step: int) -> int:
        """Begin with all members, at the servers' parameters or where they were saved; return the steps done."""
        raise NotImplementedError

    def bucket_ready(self, bucket: int) -> None:
        pass  # simulated passes are cut at buckets, so that their times are rounded alike in every part

    @property
    def _is_behind(self) -> bool:
        """Whether the servers may have newer parameters for members that are between two steps."""
        raise NotImplementedError

    def _refresh(self) -> None:
        """Take note that the flat vector holds the servers' parameters."""

    def catch_up(self) -> None:
        """Take the newest parameters, the whole group together."""
        if not self._is_behind:
            return
        flat, keeps = self._flat, self.exchanger.keeps

        def run(_: Any, entry: int) -> Result:
            self.servers.pull()
            return Result(flat.vector.clone() if keeps else None, 1.0, False)

        newest = self.exchanger.exchange(run, aside=NEWEST).vector
        if newest is not None:
            flat.vector.copy_(newest)
        self._refresh()

    def end(self) -> None:
        """Push the rest; first members leave, and rank 0 waits for the final parameters."""
        if not self.exchanger.ended:
            self._push_rest()
        self.servers.leave()
        if self._leads_run:
            self.servers.pull_final()

    def _push_rest(self) -> None:
        """Push what the servers have not received when training is complete."""

    def release(self) -> None:
        self.servers.leave()


class Gradients(MixedWorker):
    """Every step is a contribution, the mean of the group's gradients, since the servers own the optimizer.

    Each view begins with the servers' parameters, and with the number of the group's contributions in them.

    Args:
        setting: setting of this member.
        group: communicator of the first view.
        mean: mean of the group's gradients.
    """

    follows = OptimizerSource.PLAN

    def __init__(self, setting: WorkerSetting, group: Communicator, mean: GradientMean) -> None:
        super().__init__(setting, Exchanger(group, mean, self._met), setting.plan)
        self._kept = torch.empty(0)
        self._met_at: int | None = None

    def _begin_at_servers(self, step: int) -> int:
        self.exchanger.prepare()
        return self.exchanger.since

    def _met(self, group: Communicator) -> None:
        if group is not self.servers.group:
            self.servers.meet(group)
            self._met_at = self.servers.reached
        self.exchanger.since = self.servers.reached

    def begin(self, step: Step) -> None:
        self.exchanger.sums.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        self.exchanger.sums.start(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        flat, keeps = self._flat, self.exchanger.keeps
        if keeps:
            if self._kept.shape != flat.gradients.shape:
                self._kept = torch.empty_like(flat.gradients)
            self._kept.copy_(flat.gradients)
        first = self.servers.group

        def run(mean: GradientMean, number: int) -> Result:
            if self.servers.group is not first:  # in a later view than that of `begin`
                if self.servers.reached > step.number:
                    return Result(None, 1.0, False)
                flat.gradients.copy_(self._kept)
                mean.begin(step)
            weight, stop = self._mean(mean, step)
            contribution = Step(step.number, weight, stop, plan=step.plan)
            return Result(None, weight, self.servers.push(contribution, learning_rate))

        stop = self.exchanger.exchange(run).stop
        self.exchanger.since = self.next_step(step.number)
        return stop

    def next_step(self, step: int) -> int:
        return max(step + 1, self.servers.reached)

    @property
    def _is_behind(self) -> bool:
        # If sums are in place, members may have begun their view in different exchanges between the same steps.
        return self.exchanger.keeps or self._met_at != self.exchanger.since

    def _mean(self, mean: GradientMean, step: Step) -> tuple[float, bool]:
        """Replace the flat gradients by the group's mean; return its weight, and whether any member has to stop."""
        mean.word = step.stop + _PLANNED * (step.plan is not None)
        try:
            weight, stop = mean.finish(step)
        finally:
            mean.word = None
        group = self.exchanger.workers
        if group.size > 1 and mean.words >= _PLANNED:
            stop = mean.words % _PLANNED > 0
            self._agree_on_missing(group, step)
        return weight, stop

    def _agree_on_missing(self, group: Communicator, step: Step) -> None:
        """Note as without a gradient only the parameters that are so on all members."""
        flat = self._flat
        there = torch.full((len(flat.views),), float(step.weight > 0), device=flat.vector.device)
        there[list(flat.without_gradient)] = 0.0
        group.all_reduce(there)
        flat.without_gradient = tuple((there == 0).nonzero().flatten().tolist())


_PLANNED = 4096
"""Exceeds the number of members; sums of it over members must be exact."""
_PART, _READ, _VECTOR = "part.", "read", "vector"


class Models(MixedWorker):
    """Every round is a contribution: the workers follow another strategy, and their movement is for the servers.

        a round    members go from w to one model x, as the inside strategy has it, with the user's optimizer
        servers    w' = w - (w_read - x)        SGD of rate 1; in between, other groups may have moved w

    Servers treat the way back as they treat a gradient; a merge rule that takes something off a stale one makes the
    way shorter. Checkpoints may be made in the middle of a round; it is resumed if all members have one of the same
    step, and the servers do not know of the round.

    Args:
        setting: setting of this member.
        group: communicator of the first view.
        inside: strategy inside the group.

    Attributes:
        apart: whether members have taken steps that are unknown to the servers.
    """

    def __init__(self, setting: WorkerSetting, group: Communicator, inside: Strategy) -> None:
        part = inside.worker(replace(setting, workers=group))
        assert isinstance(part, RoundsWorker), "others are refused"
        plan = OptimizerPlan("SGD", (Span(0, setting.flat.size, {"lr": 1.0}),), 1.0)
        steps = inside.traits(group.size).exchange_every
        super().__init__(setting, part.exchanger, plan, steps)
        self._part, self._steps = part, steps
        self._met_inside, self.exchanger.met = part.exchanger.met, self._met
        self.group, self.follows = part.group, part.follows
        self._worker = setting.workers.rank
        self._read = torch.zeros_like(setting.flat.vector)
        self._done = 0
        self._has_begun = False
        self._stop_requested = False
        self._saved: State | None = None
        self.apart = False

    def _begin_at_servers(self, step: int) -> int:
        shown, saved = self._flat.vector.clone(), self._saved
        # A member that was absent when it was written is given another's.
        mine = (
            saved is not None and saved[1].get("worker", self._worker) == self._worker and saved[1]["apart"]
        )
        mine = mine and step // self._steps == self.servers.reached
        resumes = self._all_are_at(step, mine) and saved is not None
        self._done = step if resumes else self.servers.reached * self._steps
        self._part.start(self._done)
        self._flat.vector.copy_(shown)
        self._refresh()
        if resumes and saved is not None:
            self._flat.vector.copy_(saved[0][_VECTOR])
            self._read.copy_(saved[0][_READ])
            self.apart = True
        self._has_begun = True
        return self._done

    def _met(self, group: Communicator) -> None:
        self._met_inside(group)
        if group is self.servers.group:
            return
        own = self._flat.vector.clone()
        self.servers.meet(group)
        if self._has_begun:
            self._flat.vector.copy_(own)
        else:  # no member has a state: a round that was in progress is lost, with all its members
            self._done = self.servers.reached * self._steps
            self._done = self._done if self.total is None else min(self._done, self.total)
            self._part.begin_at(self._done)
            self._refresh()
            self._has_begun = True

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Take a step; at the end of a round all members hold the same model, and push the way back from it."""
        if self.exchanger.since <= step.number:  # else this member joined at the push after the round's mean
            self._stop_requested |= self._part.gradients_ready(step, learning_rate)
        self._stop_requested |= step.stop
        self._done, self.apart = step.number + 1, True
        return False if self._done % self._steps else self._push()

    @property
    def _is_behind(self) -> bool:
        return not self.apart

    def _refresh(self) -> None:
        self._read.copy_(self._flat.vector)
        self.apart = False

    def _push_rest(self) -> None:
        if self.apart:
            self._part.settle()
            self._part.end()
            self._push()

    def present(self) -> Tensor | None:
        return self._part.present()

    def _push(self) -> bool:
        flat, number = self._flat, (self._done - 1) // self._steps
        way_back, stops = self._read - flat.vector, self._stop_requested

        def run(_: Any, entry: int) -> Result:
            flat.gradients.copy_(way_back)
            weight = float(self.exchanger.workers.size)
            stop = self.servers.push(Step(number, weight, stops), 1.0)
            return Result(flat.vector.clone(), weight, stop)

        vector, _, stop = self.exchanger.exchange(run)
        assert vector is not None, "servers have answered"
        flat.vector.copy_(vector)
        self._stop_requested = False
        self._refresh()
        return stop

    def to_enter_with(self) -> State:
        tensors, facts = self._part.to_enter_with()
        stop = self._stop_requested
        return tensors | {_READ: self._read}, {"part": facts, "apart": self.apart, "stop": stop}

    def enter(self, state: State, step: int) -> None:
        tensors, facts = dict(state[0]), state[1]
        self._read.copy_(tensors.pop(_READ))
        self._part.enter((tensors, facts["part"]), step)
        self._done, self.apart, self._stop_requested = step, facts["apart"], facts["stop"]
        self._has_begun = True

    def state(self) -> State:
        tensors, facts = self._part.state()
        named = prefixed(_PART, tensors)
        if self.apart:
            named |= {_VECTOR: self._flat.vector, _READ: self._read}
        noted: dict[str, Any] = {"part": facts, "apart": self.apart, "worker": self._worker}
        return named, noted

    def load_state(self, state: State) -> None:
        tensors, facts = state
        self._saved = {name: tensor.clone() for name, tensor in tensors.items()}, facts
        self._part.load_state((below(_PART, tensors), facts["part"]))

    def _all_are_at(self, step: int, mine: bool) -> bool:
        """Return whether all members agree, at the same step; all get the same answer."""
        totals = self._flat.vector.new_tensor([float(mine), step, step * step], dtype=torch.float64)
        group = self.exchanger.workers
        group.all_reduce(totals)
        count, steps, squares = totals.tolist()
        return bool(count == group.size and group.size * squares == steps * steps)


def groups_of_rounds(servers: Resharding, inside: Resharding) -> Resharding:
    """Return how groups in rounds are resharded: all get the servers' parameters, and the mean of the momenta.

        servers     have the completed rounds ─▶ stay, and count all groups' rounds from 0
        members     a round in progress is dropped, and computed again; momenta become the mean of all

    Every member begins as if it had been in the middle of a round without progress in it, since the
    step that all begin with need not be the first of one.

    Args:
        servers: resharding of the servers, which count rounds.
        inside: resharding of the strategy inside.
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
                prefixed(_PART, tensors | {"vector": whole}) | begun,
                {"part": facts | {"apart": False}, "apart": True},
            )
            for worker, (tensors, facts) in inside.worker_states(bare, step).items()
        }

    more = "; momenta inside groups become the mean of all, and rounds in progress are dropped"
    return replace(servers, workers=workers, newcomers="", remark=lambda held: servers.remark(held) + more)
