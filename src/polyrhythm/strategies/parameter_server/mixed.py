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

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_tensors
from polyrhythm.errors import PeerLost, RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.averaging.rounds.rounds_worker import KEPT, RoundsWorker
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.parameter_server.composition.served import (
    WithServers,
    check_rules,
    optimizer_divided,
)
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
from polyrhythm.strategies.state import Held, Resharding, State, below, prefixed
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
    WorkerPart,
    WorkerSetting,
    Writes,
)
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.flat_parameters import FlatParameters
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
        when_a_worker_dies=(
            "its group regroups and continues, and a replacement joins it; other groups are not affected"
        ),
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
            # A merge rule that itself lets stale gradients count for less needs no lower rate.
            rate_divisor=1 if self.merge.divides else updates,
            optimizer=optimizer_divided(self.merge, updates, lockstep=lockstep),
            reads_newest=every == 1,
            skips_steps=self.consistency.drops and not lockstep,
            draws=not (lockstep or self.consistency.drops or self.consistency.waits_for_slower()),
            groups=tuple(tuple(range(start, min(start + self.replicas, workers))) for start in starts),
            slices=min(self.replicas, workers),
            exact_sums=inside.exact_sums,
            counts_samples=inside.counts_samples,
            # Where servers own the optimizer: a round's movement is rounded on its way.
            plain_alone=inside.output is GroupOutput.GRADIENTS,
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


class Contribution(NamedTuple):
    """A group's contribution for the servers; the numbers themselves are in every member's flat gradients.

    Attributes:
        step: number of the contribution, its weight, and whether a member wants to stop.
        learning_rate: learning rate to update with.
    """

    step: Step
    learning_rate: float


class Reunion(NamedTuple):
    """View of a member that regroups.

    Attributes:
        group: communicator of the present members; its rank 0 speaks for them.
        members: places in the whole group, in the same order.
        servers: this member's way to the servers, if it speaks.
    """

    group: Communicator
    members: tuple[int, ...]
    servers: PushPull | None

    def pull(self) -> int:
        """Let the speaker overwrite its flat vector; return how many contributions all servers have, else 0."""
        return 0 if self.servers is None else self.servers.pull()

    def share(self, flat: FlatParameters, *numbers: float) -> list[float]:
        """Give all members the speaker's parameters and one or two numbers of its; return these numbers."""
        return shared(flat, self.group, *numbers)


def shared(flat: FlatParameters, group: Communicator, *numbers: float) -> list[float]:
    """Give all members of a group the parameters of its first, and one or two numbers of its; return these numbers."""
    whole = flat.vector_and_tail
    tail = whole[-len(numbers) :]
    tail.copy_(tail.new_tensor(numbers))
    group.broadcast(whole)
    found: list[float] = tail.tolist()
    return found


class InsidePart:
    """One member's side of what happens inside a group, between two meetings of its speaker with the servers.

    All members do the same. What is pushed is the group's gradient, or (`Models`) the way back from its model, so that
    servers treat it as they treat a gradient; a merge rule that takes something off a stale one makes the way shorter.

    Attributes:
        plan: plan of the optimizer that the servers run.
        steps: steps of a contribution.
        apart: whether members have taken steps that are unknown to the servers.
        stopped: whether the servers have demanded a stop while the group regrouped.
        follows: optimizer of a user's own loop that its updates follow.
    """

    plan: OptimizerPlan
    steps = 1
    apart = False
    stopped = False
    follows = Follows.NOTHING

    def start(self, step: int) -> None:
        """Begin at this step, with all members, at the servers' parameters."""
        raise NotImplementedError

    def resume(self, step: int, contributions: int) -> bool:
        """Resume in the middle of a contribution as it was saved, where all members can; return whether they do.

        Args:
            step: step that this member had reached.
            contributions: contributions that the servers hold of the group.
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
        """Give up whatever is in progress on the group's communicator, which has been revoked."""
        raise NotImplementedError

    def lets_in(self, step: int) -> bool:
        """Return whether members may be called together before a step to let another in."""
        return True

    def progress(self) -> tuple[int, int]:
        """Return the steps with this member's part computed, and the contributions that it knows.

        Only where a contribution takes several steps, so that a part of it may be lost.
        """
        return 0, 0

    def regroup(self, found: Reunion) -> int:
        """Continue with the present members; return how many steps this member has done.

        Raises:
            PeerLost: another is lost in the meantime; then it is called again, after `break_off`.
        """
        raise NotImplementedError

    def dismiss(self, contributions: int) -> int:
        """Note that the group's run is over, after `contributions` contributions; return how many steps these are."""
        return contributions

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
    """Every step is a contribution, the mean of the group's gradients, since the servers own the optimizer.

    Args:
        mean_of: factory of the mean of a group's gradients.
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

    def regroup(self, found: Reunion) -> int:
        """Begin at what the servers have of the group: a mean that was in progress is there, or is made again."""
        self._group = found.group
        self._mean = self._mean.over(found.group)
        (contributions,) = found.share(self._flat, found.pull())
        self._mean.prepare()
        return int(contributions)


_PLANNED = 4096
"""Exceeds the number of members; sums of it over members must be exact."""
_PART, _READ, _VECTOR = "part.", "read", "vector"


class Models(InsidePart):
    """Every round is a contribution: the workers follow another strategy, and their movement is for the servers.

        a round    members go from w to one model x, as the inside strategy has it, with the user's optimizer
        servers    w' = w - (w_read - x)        SGD of rate 1; in between, other groups may have moved w

    Checkpoints may be made in the middle of a round; it is resumed if all members have one of the same step,
    and the servers do not know of the round.

    If a member is lost, members may be at different positions, of one round or two. All report theirs:

        models apart, in the round that servers lack       ─▶ w' + (x_i - w): its movement, on top of w'
        the mean, which a server lacks                     ─▶ sent to the speaker, which pushes it; then w'
        the mean, which all servers have, or their answer  ─▶ w'
        not even the mean, though others or servers do     ─▶ w', with the state of a member that has it
        newcomers                                          ─▶ the model and the state of the newest; it counts once

    where w' is the servers' vector then. So a lost member's part of the round is gone, and no other process's
    steps are.
    """

    def __init__(self, setting: WorkerSetting, group: Communicator, inside: Strategy) -> None:
        self.plan = OptimizerPlan("SGD", (Span(0, setting.flat.size, {"lr": 1.0}),), 1.0)
        self.steps = inside.traits(group.size).exchange_every
        self._flat = setting.flat
        self._group = group
        part = inside.worker(replace(setting, workers=group))
        assert isinstance(part, RoundsWorker), "others are refused"
        self._part = part
        self.follows = self._part.follows
        self._worker = setting.workers.rank
        self._read = torch.zeros_like(setting.flat.vector)
        self._done = self._begun = self._rounds = 0
        self._total = setting.steps
        self._is_new = setting.succeeds
        self._held: Contribution | None = None
        """Contribution that is being pushed; the way back itself is in the flat gradients."""
        self._moved: Tensor | None = None
        """What this member has moved by since `_read`, while its group regroups."""
        self._presented = self._presented_to_all = _NEW
        """Steps done at the latest presentation, of this member and of any."""
        self._stop_requested = False
        self._saved: State | None = None

    def start(self, step: int) -> None:
        shown = self._flat.vector.clone()
        self._part.start(step)
        self._flat.vector.copy_(shown)
        self._done = self._begun = step
        self._rounds = step // self.steps
        self.refresh()

    def resume(self, step: int, contributions: int) -> bool:
        saved = self._saved
        # A member that was absent when it was written is given another's.
        mine = saved is not None and saved[1].get("worker", self._worker) == self._worker
        mine = mine and saved is not None and saved[1]["apart"] and step // self.steps == contributions
        if not self._all_are_at(step, mine) or saved is None:
            return False
        self._part.start(step)
        self._flat.vector.copy_(saved[0][_VECTOR])
        self._read.copy_(saved[0][_READ])
        self._done = self._begun = step
        self._rounds, self.apart = contributions, True
        return True

    def begin(self, step: Step) -> None:
        self._begun = step.number + 1

    def bucket_ready(self, bucket: int) -> None:
        """Nothing travels before a round's end."""

    def contribute(self, step: Step, learning_rate: float) -> Contribution | None:
        """Take a step; at the end of a round all members hold the same, and the way back is in their gradients."""
        self._stop_requested |= self._part.gradients_ready(step, learning_rate) or step.stop
        self._done, self.apart = step.number + 1, True
        return None if self._done % self.steps else self._way_back()

    def refresh(self) -> None:
        self._read.copy_(self._flat.vector)
        self._rounds += self._held is not None
        self.apart, self._held = False, None

    def lets_in(self, step: int) -> bool:
        """Return whether a round ends with the step: others hear of a call at the round's end only."""
        return (step + 1) % self.steps == 0

    def progress(self) -> tuple[int, int]:
        return self._begun, self._known

    @property
    def _known(self) -> int:
        return self._rounds + (self._held is not None)

    def break_off(self) -> None:
        """Stop all pending exchanges, and keep this member's progress: servers' parameters overwrite it."""
        self._part.exchanger.break_off()
        if self.apart and self._moved is None:
            flat = self._flat
            self._moved = flat.gradients.neg() if self._held is not None else flat.vector - self._read

    def regroup(self, found: Reunion) -> int:
        group, flat = found.group, self._flat
        reached = found.pull()
        places = self._places_of_all(group, reached)
        known = max(place.known for place in places)
        stops = False
        if places[0].reached < known:
            holder = next(rank for rank, place in enumerate(places) if place.holds and place.known == known)
            stops = self._push_for(holder, known - 1, found)
        contributions, told = found.share(flat, max(known, places[0].reached), float(stops))
        self.stopped |= bool(told)
        self._go_on_at(group, places, int(contributions))
        self._skip_what_some_have_had(group, found.members)
        self._part.exchanger.begin_anew(group, found.members)
        return self._done

    def _places_of_all(self, group: Communicator, reached: int) -> list[_Place]:
        known = _NEW if self._is_new else self._known
        own = _Place(known, self._held is not None, self._begun, reached)
        return [_Place(*row) for row in self._rows(group, own)]

    def _rows(self, group: Communicator, own: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all members, in their order."""
        told = torch.zeros(group.size, len(own), dtype=torch.float64, device=self._flat.vector.device)
        told[group.rank] = told.new_tensor([float(number) for number in own])
        group.all_reduce(told)
        return [[int(number) for number in row] for row in told.tolist()]

    def _skip_what_some_have_had(self, group: Communicator, members: tuple[int, ...]) -> None:
        """Leave out presentations, and means inside, that broke for this member only."""
        part, size = self._part, self._part.group or 1
        rows = self._rows(group, (self._presented, part.group_met))
        near = members[group.rank] // size
        self._presented_to_all = max(presented for presented, _ in rows)
        part.met_by_any = max(
            met for member, (_, met) in zip(members, rows, strict=True) if member // size == near
        )

    def _push_for(self, holder: int, number: int, found: Reunion) -> bool:
        """Push the mean of a round if one of the members has it and a server lacks it; return whether to stop.

        Args:
            holder: rank of its holder in the group.
            number: number of the round.
            found: view of this member.
        """
        group, gradients, stops = found.group, self._flat.gradients, False
        if group.rank == holder:
            assert self._held is not None, "it has reported a mean"
            assert self._moved is not None, "it has broken off"
            torch.neg(self._moved, out=gradients)
            step = self._held.step
            if found.servers is None:
                group.send(0, Message(Kind.VECTOR, gradients, weight=step.weight, stop=step.stop))
        elif found.servers is not None:
            message = group.receive(holder)[1]
            assert message.tensor is not None, "it has the way back"
            gradients.copy_(message.tensor)
            step = Step(number, message.weight, message.stop)
        if found.servers is not None:
            stops = found.servers.push_and_pull(step, step.weight, 1.0)
        return stops

    def _go_on_at(self, group: Communicator, places: list[_Place], contributions: int) -> None:
        """Continue at the servers' parameters, which the flat vector holds, with each member's movement on top.

        The newest member gives its model and state to newcomers, and its state to members that missed a mean
        that it knows.
        """
        old = [rank for rank, place in enumerate(places) if place.known != _NEW]
        if not old:  # a round that was in progress is lost, with all its members
            self._enter(self._part.state(), contributions, self._steps_in(contributions), apart=False)
            return
        known = max(places[rank].known for rank in old)
        newest = max(
            (rank for rank in old if places[rank].known == known), key=lambda rank: places[rank].taken
        )
        behind = [rank for rank, place in enumerate(places) if place.known < known]
        read = self._flat.vector.clone()
        if group.rank in behind:
            message = group.receive(newest)[1]
            assert message.tensor is not None, "it has the state"
            tensors, facts = unpack_tensors(message.tensor)
            state = below(_PART, tensors), facts["part"]
            if self._is_new:
                self._flat.vector.copy_(tensors[_VECTOR])
                self._enter(state, contributions, facts["done"], apart=facts["apart"])
            else:
                self._miss(state, contributions, read)
        elif self._known < contributions:
            self._miss(self._part.state(), contributions, read)
        else:
            if self._held is not None:
                self.apart = False
            elif self._moved is not None:
                self._flat.vector.add_(self._moved)
            self._rounds, self._held, self._moved = contributions, None, None
        self._read.copy_(read)
        if group.rank == newest:
            tensors, facts = self._part.state()
            named = prefixed(_PART, tensors) | {_VECTOR: self._flat.vector}
            told = pack_tensors(named, {"part": facts, "apart": self.apart, "done": self._done})
            for rank in behind:
                group.send(rank, Message(Kind.HANDOVER, told))

    def _enter(self, newest: State, contributions: int, done: int, *, apart: bool) -> None:
        tensors, facts = newest
        own = {name: value for name, value in tensors.items() if not name.startswith(KEPT)}
        self._part.load_state((own, facts))
        self._done = self._begun = self._presented = done  # it is at no presentation
        self._part.group_met = done - 1
        self._rounds, self._is_new, self.apart = contributions, False, apart

    def _miss(self, newest: State, contributions: int, read: Tensor) -> None:
        """Begin another round, after a mean that others, or only servers, have heard of."""
        self._part.begin_round(newest)
        self._done = self._begun
        self._flat.vector.copy_(read)
        self._rounds, self._moved, self.apart = contributions, None, False

    def _steps_in(self, contributions: int) -> int:
        """Return the steps of `contributions` rounds; the run's last may be shorter."""
        whole = contributions * self.steps
        return whole if self._total is None else min(whole, self._total)

    def dismiss(self, contributions: int) -> int:
        if self._is_new:
            self._begun = self._steps_in(contributions)
        self._done, self.apart, self._held, self._moved = self._begun, False, None, None
        return self._done

    def rest(self) -> Contribution | None:
        if not self.apart:
            return None
        self._begun = self._done
        self._part.settle()
        self._part.end()
        return self._way_back()

    def present(self) -> Tensor | None:
        self._presented = self._done
        return self._part.present() if self._done > self._presented_to_all else None

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
        told = self._flat.vector.new_tensor([float(mine), step, step * step], dtype=torch.float64)
        self._group.all_reduce(told)
        count, steps, squares = told.tolist()
        return bool(count == self._group.size and self._group.size * squares == steps * steps)

    def _way_back(self) -> Contribution:
        torch.sub(self._read, self._flat.vector, out=self._flat.gradients)
        number = (self._done - 1) // self.steps
        stop, self._stop_requested = self._stop_requested, False
        self._held = Contribution(Step(number, float(self._group.size), stop), 1.0)
        return self._held


class _Place(NamedTuple):
    """Position of a member when its group regroups.

    Attributes:
        known: contributions with known numbers; `_NEW` for a newcomer.
        holds: whether the latest of them is being pushed.
        taken: steps with its part computed.
        reached: contributions that all servers have, where it speaks.
    """

    known: int
    holds: int
    taken: int
    reached: int


_NEW = -1


class Circle:
    """A member's group: its present members, and its way to the next formation; the first server keeps the `Roster`.

    Args:
        members: indices of its workers, in order.

    Attributes:
        group: communicator of the present members; its rank 0 speaks for them.
        there: indices of the present members among all workers of the run, in the same order.
        generations: number of predecessors of each of them.
        everybody: all members of the group, present or absent.
        steps: contributions of the group that the servers have, where it is over.
        round: round of the present formation.
    """

    def __init__(self, setting: WorkerSetting, number: int, members: range) -> None:
        self.everybody = self.there = tuple(members)
        self.group: Communicator = setting.workers.subgroup(f"replicas {number}", members)
        self.generations: tuple[int, ...] = (0,) * len(members)
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
        """Whether a worker waits for admission; the speaker is notified."""
        while self.speaks and (found := self._network.poll(self._server, WORD_TAG)) is not None:
            if group_word(found[1]) == SomeoneWaits(self.round):
                return True
        return False

    def break_off(self) -> None:
        """End the use of the group's communicator: waiting members are notified, even if others are lost."""
        for other in range(self.group.size):
            if other != self.group.rank:
                with suppress(PeerLost):
                    self.group.start_send(other, Message(Kind.REVOKE))
        self.group.revoke()

    @property
    def places(self) -> tuple[int, ...]:
        """Places of the present members in the whole group."""
        return tuple(worker - self.everybody[0] for worker in self.there)

    def go_on(self, taken: int, known: int) -> bool:
        """Continue with the present members; return whether the group does, else its run is over.

        Args:
            taken: steps with this member's part computed.
            known: contributions that it knows.
        """
        self._network.send(self._server, Broken(self.round, taken, known).message())
        return self._form()

    def enter(self) -> bool:
        """Wait to be let in, as a replacement; return the same as `go_on`."""
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
        self.generations = word.generations
        self.group = self._network.regrouped(f"{self._name}, {word.round}", word.ranks, word.generations)
        return True


class MixedWorker(WorkerPart, OverlapsBackward, SkipsSteps, Presents, CatchesUp, UsesServers, RegroupsApart):
    """Continues with its group; the speaker of the group pushes its contributions, and passes the answer on.

    When a member of the group is lost or joins, the present ones continue from the servers' state: the
    parameters, and the number of the group's contributions in them. So a contribution that was in progress is
    either there, or made again (`InsidePart.regroup`).
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
        self._done = step
        if not self._inside.resume(step, contributions):
            self._done = contributions * self._inside.steps
            self._inside.start(self._done)
        return self._done

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
        return self._inside.lets_in(self._done) and self._circle.due

    def reassemble(self, *, enters: bool) -> Reassembled:
        """Continue with the present members, from the servers' state of the group."""
        circle, inside = self._circle, self._inside
        if not enters:
            circle.break_off()
            inside.break_off()
        goes_on = circle.enter() if enters else circle.go_on(*inside.progress())
        if goes_on:
            self._flat.renew_gradients()  # the library may still write into the old ones
            self._servers = self._link() if circle.speaks else None
            self._done = inside.regroup(Reunion(circle.group, circle.places, self._servers))
            self._regrouped_at = self._done
        else:
            self._done = inside.dismiss(circle.steps)
        absent = tuple(worker for worker in circle.everybody if worker not in circle.there)
        over = inside.stopped or not goes_on
        there = dict(zip(circle.there, circle.generations, strict=True))
        return Reassembled(self._done, over, there, absent, circle.round)

    def end(self) -> None:
        """Push the rest; speakers leave, and rank 0 waits for the final parameters."""
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
        return shared(self._flat, self._circle.group, *numbers)


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
