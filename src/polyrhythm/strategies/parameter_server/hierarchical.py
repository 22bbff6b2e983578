"""Hierarchical parameter servers: leaves with a group of workers each, and roots above them.

Gupta, Zhang, Wang, "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning", ICDM 2016, arXiv
1509.04210; its Rudra-adv has a tree of servers that aggregate.

    leaf      g = sum_i b_i g_i / sum_i b_i                            over its group
    root      w' = w - lr * mean over leaves, weighted with their samples
              synchronous: over all leaves; asynchronous: one g at a time, on arrival

Synchronous at both levels is the mean over all workers; asynchronous above is mixed mode. With k leaves
(`groups`) a root receives M k times a step instead of N times.

Departure from the paper: there are two levels, however many workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.aggregator import mean
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.parameter_server.composition.served import WithServers
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.admission import (
    Configuration,
    admitted_initial,
    payload,
)
from polyrhythm.strategies.parameter_server.serving.gate import CONSISTENCIES, Consistency, Decision, Gate
from polyrhythm.strategies.parameter_server.serving.parts import PartialPush
from polyrhythm.strategies.parameter_server.serving.planned_push import (
    Planned,
    admit_planned_push,
    common_plan,
    packed_push,
    unpacked_push,
)
from polyrhythm.strategies.parameter_server.serving.push_pull import (
    OverlappedPushPull,
    OverlappingWorker,
    ServedWorker,
)
from polyrhythm.strategies.parameter_server.serving.pushers import Pusher
from polyrhythm.strategies.parameter_server.serving.resharding import of_servers
from polyrhythm.strategies.parameter_server.serving.rounds import latest_entrance
from polyrhythm.strategies.parameter_server.serving.rule import (
    Applied,
    Contribution,
    News,
    Presence,
    Reply,
    Rule,
)
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import shard_session
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerPart, ServerSetting, ServerStats
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Facts, Paper, Traits
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count


class Hierarchical(WithServers):
    """Leaf servers average the gradients of a group of workers each, and push one to the root servers.

    Attributes:
        groups: groups of workers, each with a leaf server; they differ by at most one worker.
        servers: root servers, each with an equal shard.
        consistency: rule of progress between groups; inside a group all are synchronous.
        overlap: whether gradients are pushed during the backward pass, and parameters awaited just before
            their layer's use, on both ways; the numbers are the same.
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
        use_it="many workers, with more gradients than one server can process",
    )
    why_not_compressed: ClassVar[str] = (
        "servers of groups would leave out parts of what they pass on: use parameter_server"
    )

    groups: Count = 2
    overlap: bool = True
    consistency: Annotated[Consistency, chosen("consistency", CONSISTENCIES)] = Synchronous()

    def traits(self, workers: int) -> Traits:
        busy = self._busy(workers)
        lockstep, updates = busy == 1 or self.consistency.in_step(), self.consistency.updates_per_step(busy)
        return replace(
            super().traits(workers),
            lockstep=lockstep,
            updates=updates,
            gradients=self.consistency.gathers(busy) if self.consistency.drops else busy,
            skips_steps=self.consistency.drops and not lockstep,
            draws=not (lockstep or self.consistency.drops or self.consistency.waits_for_slower()),
            groups=tuple(tuple(range(cut.start, cut.stop)) for cut in shards(workers, busy)),
            leaves=self.groups,
            servers=self.groups + self.servers,
            slices=self.servers,
            overlaps_passes=self.overlap,
        )

    def faults(self, workers: int) -> FaultPolicy:
        """Return a policy to continue: leaves tolerate lost workers, and roots hold the run's state."""
        busy, lockstep = self._busy(workers), self.traits(workers).lockstep
        # As many workers as cannot be more whole groups than the consistency can do without.
        spares = min(workers - 1, self.consistency.spares(busy) if self.consistency.drops else workers)
        common = FaultPolicy(skips_not_finite=not self.consistency.in_step())
        if spares <= 0:
            return common
        rejoin = Rejoin.BEHIND if lockstep else Rejoin.LEVEL
        return replace(common, worker=OnLoss.GO_ON, leader=True, spares=spares, rejoin=rejoin)

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if 1 < workers < self.groups:  # one worker is a group of its own
            raise RequestError(
                f"hierarchical: {workers} workers cannot make groups={self.groups}: give fewer groups"
            )
        self.consistency.check(self._busy(workers))
        if self.consistency.own_updates:
            raise RequestError(
                f"{self.consistency}: workers of a group share what their leaf reads, and cannot each update a copy of "
                "their own: leave cached_reads out"
            )

    def resharding(self, before: int, after: int) -> Resharding:
        return of_servers(self.consistency, self.traits(before).groups, after, self._busy(after))

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Return the part of one worker; its leaf is its only server."""
        # Limits of the roots are checked here, before a leaf tries.
        for shard in shards(setting.flat.size, self.servers):
            setting.plan.part(shard.start, shard.stop)
        leaf = Levels.of(setting.roles, self.groups).leaf_of(setting.network.rank)
        own = replace(setting, roles=RoleAssignment(setting.roles.workers, (leaf,)))
        if self.overlap and len(setting.flat.buckets) > 1 and setting.workers.size > 1:
            return OverlappingWorker(
                own, OverlappedPushPull(own), own_updates=False, dropped_late=False, scales_parts=False
            )
        return ServedWorker(own)

    def server(self, setting: ServerSetting) -> ServerPart:
        levels = Levels.of(setting.roles, self.groups)
        if setting.index < self.groups:
            return LeafSession(levels, setting.index)
        return shard_session(levels.busy_leaves, self.consistency, session=RootSession)

    def _busy(self, workers: int) -> int:
        return min(self.groups, workers)


@dataclass(frozen=True)
class Levels:
    """The ranks of both levels.

    Attributes:
        leaves: ranks of the leaf servers, one a group.
        roots: ranks of the root servers, in the order of their shards.
        groups: ranks of every group's workers, neighbors; the sizes of groups differ by at most one.
    """

    leaves: tuple[int, ...]
    roots: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, roles: RoleAssignment, groups: int) -> Levels:
        """Share out the workers; the first servers are the leaves."""
        workers = roles.workers
        cuts = shards(len(workers), min(groups, len(workers)))
        members = [workers[cut] for cut in cuts] + [()] * (groups - len(cuts))
        return cls(roles.servers[:groups], roles.servers[groups:], tuple(members))

    @property
    def busy_leaves(self) -> tuple[int, ...]:
        """Ranks of the leaves that have workers."""
        return tuple(leaf for leaf, members in zip(self.leaves, self.groups, strict=True) if members)

    def leaf_of(self, worker: int) -> int:
        """Return the rank of a worker's leaf."""
        return next(leaf for leaf, members in zip(self.leaves, self.groups, strict=True) if worker in members)


class LeafSession(ServerSession):
    """One leaf.

        workers ── PUSH ─▶ held until the group is complete ── PUSH(mean, samples) ─▶ roots, each its shard
                ◀─ PARAMETERS ── put together when all have answered ◀── VECTOR ────

    A pull goes the same way, once all of the group have asked, so that they continue with the same parameters. The leaf
    has at most one question at a time before the roots.

    A lost worker is not waited for; its pushes go into the mean, and its batches until a replacement arrives
    are not seen. The replacement begins at the group's step with the leaf's parameters, or with the next ones
    where the lost worker's gradient of the present step is already held. A leaf without workers leaves the
    roots, and returns with the first replacement, as a replacement would.

    Roots with a request for the final parameters cannot be notified of the loss of rank 0, which asked. It
    had no step left; so its replacement is given the newest parameters and then the final ones, without
    asking the roots.

    With `overlap` a mean is passed on bucket by bucket once the slowest of the group has pushed it, and so
    are the roots' answers on their arrival:

        workers ── PART ─▶ all have it ── PART(mean) ─▶ roots
                ◀─ PART ── as cut by the worker ◀─ PART ─────

    Args:
        levels: workers of each leaf, and the roots.
    """

    def __init__(self, levels: Levels, index: int) -> None:
        members = levels.groups[index]
        gate = LeafGate(len(members))
        rule = LeafRule(gate, levels, index)
        super().__init__(members, rule)
        self._members = members
        self._absent = gate.absent
        self._group, self._passing = gate, rule
        self._owed: dict[int, deque[tuple[int, int]]] = {}
        """Stretches of the answer that each answered worker still gets, in their order."""
        self._kept_back: list[Reply] = []
        """Answers in one piece, until they are complete."""

    def _continue_without(self, row: Pusher) -> list[Reply]:
        self._owed.pop(row.rank, None)
        self._kept_back = [reply for reply in self._kept_back if reply[0] != row.rank]
        self._passing.continue_without()
        return super()._continue_without(row)

    def _completed(self, replies: list[Reply]) -> list[Reply]:
        self._pass_on()
        replies = self._with_peers(replies)
        arriving = self._passing.arriving
        if arriving is None or arriving.values is not self.values:
            return replies if self._parts is None else self._parts.cut(replies)
        found: list[Reply] = []
        for to, reply in replies:
            if reply.kind is not Kind.PARAMETERS or reply.tensor is not arriving.values:
                found.append((to, reply))
            elif self._parts is None or (cuts := self._parts.cuts_of(to)) is None:
                self._kept_back.append((to, reply))
            else:
                found.append((to, reply._replace(tensor=arriving.values[:0])))
                self._owed[to] = deque(pairwise([0, *cuts, len(arriving.values)]))
                found += self._arrived_parts(to, arriving)
        for to in list(self._owed):
            found += self._arrived_parts(to, arriving)
        if arriving.is_whole:
            self._passing.arriving = None
            kept, self._kept_back = self._kept_back, []
            found += kept
        return found

    def _arrived_parts(self, to: int, arriving: Arriving) -> list[Reply]:
        """Return the parts that have arrived and that a worker still has to get."""
        found: list[Reply] = []
        owed = self._owed[to]
        while owed and arriving.has(*owed[0]):
            start, stop = owed.popleft()
            found.append((to, Message(Kind.PART, arriving.values[start:stop], version=start)))
        if not owed:
            del self._owed[to]
        return found

    def _pass_on(self) -> None:
        """Push on what all of the group have pushed, if one of them has not pushed all."""
        group = self._group
        pushers = group.taking_part
        if self._parts is None or group.question is not None or all(map(group.has_pushed, pushers)):
            return
        coming: list[PartialPush] = []
        for pusher in pushers:
            if group.has_pushed(pusher):
                [entry] = self._rows[pusher].held
                if len(entry.gradient) != len(self.values):  # it brings more than a gradient
                    return
                coming.append(PartialPush(entry.gradient, entry.step, 0, entry.weight))
            elif (part := self._parts.coming(self._members[pusher])) is not None:
                coming.append(part)
            else:
                return
        self._passing.pass_on(pushers, coming)

    def stats(self) -> ServerStats:
        """Return its counters; the roots count the staleness and the dropped steps."""
        absent = {self._members[pusher]: stretches for pusher, stretches in self._absent.items()}
        return ServerStats({}, self.version, self.steps, absent=absent)

    def state(self) -> State:
        """Return nothing: between steps nothing is held, and the roots keep the rest."""
        return {}, {}


class Question(Enum):
    """Open question of a leaf to the roots."""

    PUSH = auto()
    PULL = auto()
    FINAL = auto()


class LeafGate(Gate):
    """Holds gradients until all present members of the group have pushed, and answers after the roots.

    Attributes:
        question: question that is open before the roots, which the rule asks; None: none is.
        there: workers that take part in the group's steps.
        ending: whether the roots have been asked for the final parameters.
        stopped: whether a worker was asked to stop.
        absent: stretches of steps without each worker, `[first, last + 1]`, until a replacement arrived.
    """

    takes_turns = True

    def __init__(self, members: int) -> None:
        self.question: Question | None = None
        self.present = set(range(members))
        self.ending = self.stopped = False
        self.absent: dict[int, list[list[int]]] = {}
        self._held: set[int] = set()
        self._asking: list[int] = []
        self._waiting: list[int] = []
        """Workers to be answered when the roots have answered."""
        self._entering: dict[int, int] = {}
        """Replacements that enter then, with the number of steps taken with their predecessors."""
        self._step: int | None = None
        """Step of the group, as the roots last reported it."""
        self._answered = False

    def ask(self, pusher: int, step: int) -> Decision:
        if self.ending:  # worker 0's replacement, which has no step left
            return Decision(answer=(pusher,), step=self._step)
        if pusher not in self.present:
            if self.question is not None or pusher in self._held or not self.present:
                self._entering[pusher] = step
                return Decision()
            if self._step is not None:
                self._admit(pusher, step)
                return Decision(answer=(pusher,), step=self._step)
            self.present.add(pusher)
        self._asking.append(pusher)
        return Decision()

    def check_turn(self, pusher: int) -> None:
        if pusher in self._held or pusher not in self.present:
            raise RefusedMessage(Reason.ORDER, "a worker pushed a second time, or after it had left")

    def arrive(self, pusher: int, step: int) -> Decision:
        self._held.add(pusher)
        return Decision()

    def leave(self, pusher: int) -> Decision:
        self.present.discard(pusher)
        self._entering.pop(pusher, None)
        self._asking = [other for other in self._asking if other != pusher]
        self._waiting = [other for other in self._waiting if other != pusher]
        return Decision()

    @property
    def taking_part(self) -> list[int]:
        """Workers with gradients in the next mean, in order."""
        return sorted(self.present | self._held)

    def has_pushed(self, pusher: int) -> bool:
        """Return whether a gradient of it is held."""
        return pusher in self._held

    def stop(self) -> None:
        self.stopped = True

    def answered(self, step: int) -> None:
        """Note that all roots have answered, and that the group continues with a step."""
        self.question, self._step, self._answered = None, step, True

    def applied(self) -> Decision | None:
        """Answer when the roots have; push a mean when the group is complete and no question is open."""
        if self._answered:
            assert self._step is not None, "the roots have sent it"
            self._answered = False
            answer = (*self._waiting, *self._entering)
            for pusher, step in self._entering.items():
                self._admit(pusher, step)
            self._waiting, self._entering = [], {}
            return Decision(answer=answer, step=self._step)
        if self.question is not None or not self._held or not self.present <= self._held:
            return None
        self.question = Question.PUSH
        apply, self._held = tuple(sorted(self._held)), set()
        self._waiting = [pusher for pusher in apply if pusher in self.present]
        for pusher in self._entering:
            self._entering[pusher] += pusher in apply
        return Decision(apply=apply)

    def begin_pull(self) -> bool:
        """Open the question for parameters, if that is what the group waits for; return whether it is opened."""
        if self.question is not None:
            return False
        all_ask = bool(self._asking) and self.present <= self._held | set(self._asking)
        if not all_ask and (self.present or not self._entering):
            return False
        self.question = Question.PULL
        self._waiting, self._asking = self._asking, []
        return True

    def take_entering(self) -> list[int]:
        """Return the replacements that wait to enter, and will not."""
        entering, self._entering = list(self._entering), {}
        return entering

    def _admit(self, pusher: int, step: int) -> None:
        self.present.add(pusher)
        if self._step is not None and step < self._step:
            self.absent.setdefault(pusher, []).append([step, self._step])


@dataclass
class PassedOn:
    """A mean that has been pushed to the roots in part.

    Attributes:
        step: step of the push.
        pushers: pushers in the mean.
        weights: weights of theirs.
        start: start of the first number that has been pushed; all behind it have.
    """

    step: int
    pushers: list[int]
    weights: list[float]
    start: int

    def left(self, step: int, pushers: list[int], weights: list[float], otherwise: int) -> int:
        """Return how many numbers of a mean are still to be pushed, if it is this one."""
        same = (step, pushers, weights) == (self.step, self.pushers, self.weights)
        return self.start if same else otherwise


class Arriving:
    """Parameters that arrive from the roots in parts.

    Args:
        values: `(n,)`, to be filled.
        shards: shards of the roots.
    """

    def __init__(self, values: Tensor, shards: dict[int, slice]) -> None:
        self.values = values
        self._shards = shards
        self._next = {root: shard.start for root, shard in shards.items()}

    def take(self, root: int, message: Message) -> None:
        """Take a part; raise `RefusedMessage` if it is not the next one of its root."""
        tensor, start = payload(message), self._shards[root].start + message.version
        stop = start + len(tensor)
        if start != self._next[root] or stop > self._shards[root].stop:
            raise RefusedMessage(
                Reason.ORDER, f"root {root} sent numbers {start:,} to {stop:,}, out of their turn"
            )
        self.values[start:stop] = tensor
        self._next[root] = stop

    def has(self, start: int, stop: int) -> bool:
        """Return whether all numbers from `start` to `stop` are there."""
        return all(
            self._next[root] >= min(stop, shard.stop)
            for root, shard in self._shards.items()
            if shard.start < stop and start < shard.stop
        )

    @property
    def is_whole(self) -> bool:
        """Whether all numbers are there."""
        return self.has(0, len(self.values))


class LeafRule(Rule):
    """Pushes the mean of its workers' gradients to the roots, and puts the roots' answers together.

    Args:
        levels: workers of each leaf, and the roots.
    """

    converses = True
    repeats = False
    admit = staticmethod(admit_planned_push)

    def __init__(self, gate: LeafGate, levels: Levels, index: int) -> None:
        super().__init__(gate)
        self.ready = True  # requests wait in the gate
        self.final = False
        self._group = gate
        self._members = levels.groups[index]
        self._roots = levels.roots
        self._others = tuple(leaf for leaf in levels.leaves if leaf != levels.leaves[index])
        self._plan: OptimizerPlan | None = None
        self._begun = self._over = False
        self._counted_by_roots = True
        """Whether this leaf is a pusher of the roots, which then wait for it."""
        self._answers: dict[int, Message] = {}
        self._versions = dict.fromkeys(self._roots, 0)
        self._passed: PassedOn | None = None
        self.arriving: Arriving | None = None
        self._early: list[tuple[int, Message]] = []
        """Parts of some roots' answers that others have not sent."""

    def configure(self, message: Message) -> None:
        if self._plan is not None:
            raise RefusedMessage(Reason.ORDER, "a second plan arrived")
        self._plan = Configuration.of(message).plan

    def begin(self, values: Tensor) -> None:
        """Send every root its shard of the initial parameters, with its part of the optimizer's plan."""
        plan = admitted_initial(self._plan, values, ready=self._begun)
        self._begun = True
        for root, shard in zip(self._roots, shards(len(values), len(self._roots)), strict=True):
            self.outgoing += [
                (root, Configuration(plan.part(shard.start, shard.stop)).message()),
                (root, Message(Kind.PARAMETERS, values[shard])),
            ]

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied:
        """Push the mean; it counts as an update when the roots have answered."""
        weights = [entry.weight for entry in batch]
        weighs = any(weight > 0 for weight in weights)
        pushes = [unpacked_push(entry.gradient, len(self.values)) for entry in batch]
        whole = mean([push.gradient for push in pushes], weights) if weighs else pushes[0].gradient
        plan = common_plan(pushes, weights)
        written = next((push.written for push in pushes if push.written is not None), None)
        passed, self._passed = self._passed, None
        left = len(whole)
        if passed is not None and plan is None and written is None:
            left = passed.left(batch[0].step, [entry.pusher for entry in batch], weights, left)
        self.outgoing += [
            (
                root,
                Message(
                    Kind.PUSH,
                    packed_push(
                        Planned(
                            whole[shard][: max(0, left - shard.start)],
                            None if plan is None else plan.part(shard.start, shard.stop),
                            None if written is None else written[shard],
                        )
                    ),
                    version=self._versions[root],
                    step=batch[0].step,
                    weight=sum(weights),
                    learning_rate=batch[0].rate,
                    stop=self._group.stopped,
                ),
            )
            for root, shard in zip(self._roots, shards(len(whole), len(self._roots)), strict=True)
        ]
        return Applied(batch, 0, {})

    def pass_on(self, pushers: list[int], coming: Sequence[PartialPush]) -> None:
        """Push the mean of all new numbers that every pusher has pushed so far.

        If other workers take part than at the beginning of this push, the whole mean follows in the end.
        """
        weights, start = [each.weight for each in coming], max(each.start for each in coming)
        if self._passed is None:
            self._passed = PassedOn(coming[0].step, pushers, weights, len(self.values))
        step, stop = coming[0].step, self._passed.left(coming[0].step, pushers, weights, 0)
        if start >= stop or sum(weights) <= 0:
            return
        part = mean([each.numbers[start:stop] for each in coming], weights)
        for root, shard in zip(self._roots, shards(len(self.values), len(self._roots)), strict=True):
            first, last = max(start, shard.start), min(stop, shard.stop)
            if first < last:
                numbers = part[first - start : last - start]
                self.outgoing.append(
                    (root, Message(Kind.PART, numbers, version=first - shard.start, step=step))
                )
        self._passed.start = start

    def answer(self, pusher: int, version: int) -> Tensor:
        return self.values

    def on_peer(self, peer: int, message: Message) -> News | None:
        if peer in self._roots:
            return self._handle_root(peer, message)
        if peer not in self._others or message.kind is not Kind.LEAVE:
            raise RefusedMessage(
                Reason.SENDER,
                f"a leaf received {message.kind.name} from rank {peer}, which is not of its group",
            )
        self._over = True
        self._reject()
        return News(done=True)

    def attend(self, presence: Presence) -> None:
        """Ask the roots for the parameters that the group waits for, leave them without workers, or end the run."""
        group = self._group
        if presence.done:
            others = () if self._over else (*self._others, *self._roots)
            self.outgoing += [(rank, Message(Kind.LEAVE)) for rank in others]
            self._over = True
            return
        if group.begin_pull():
            self._counted_by_roots = True
            self._ask_roots(stop=False)
        elif group.question is None and presence.final and not self.final:
            group.question, group.ending = Question.FINAL, True
            self._ask_roots(stop=True)
        if not group.present and self._counted_by_roots and group.question in (None, Question.FINAL):
            self._counted_by_roots = False
            self.outgoing += [(root, Message(Kind.LEAVE)) for root in self._roots]

    def admits(self, pusher: int) -> bool:
        return pusher == 0 or not self._group.ending

    def continue_without(self) -> None:
        """Stop passing on a mean with a worker that may not take part any more: all of it follows in the end."""
        if self._passed is not None:
            self._passed.pushers = []

    def _ask_roots(self, *, stop: bool) -> None:
        self._passed = None  # a pull makes them forget what they have of a push
        self.outgoing += [(root, Message(Kind.PULL, stop=stop)) for root in self._roots]

    def _handle_root(self, root: int, message: Message) -> News | None:
        if message.kind is Kind.PART:
            if root in self._answers:  # others have not answered
                self._early.append((root, message))
            elif self.arriving is None:
                raise RefusedMessage(Reason.ORDER, f"root {root} sent a part of an answer that is whole")
            else:
                self.arriving.take(root, message)
            return None
        self._answers[root] = message
        if len(self._answers) < len(self._roots):
            return None
        answers = [self._answers[root] for root in self._roots]
        self._answers = {}
        if any(answer.kind is Kind.LEAVE for answer in answers):
            self._end(answers)
            return None
        entrance = latest_entrance(answers)
        if entrance is not None:  # the leaf returns to synchronous leaves
            self.outgoing += [(root, entrance) for root in self._roots]
            return None
        asked = self._group.question
        self._take_values(answers)
        self._versions = {root: answer.version for root, answer in zip(self._roots, answers, strict=True)}
        self.final = asked is Question.FINAL
        self._group.answered(min(answer.step for answer in answers))
        return News(asked is Question.PUSH, any(answer.stop for answer in answers))

    def _take_values(self, answers: list[Message]) -> None:
        """Take the roots' values, or make room for what of them follows in parts."""
        parts = [payload(answer) for answer in answers]
        if all(len(part) for part in parts) or not len(self.values):
            self.values, self.arriving = torch.cat(parts), None
            return
        cuts = shards(len(self.values), len(self._roots))
        self.values = torch.empty_like(self.values)
        self.arriving = Arriving(self.values, dict(zip(self._roots, cuts, strict=True)))
        for root, part in zip(self._roots, parts, strict=True):
            if len(part):
                self.arriving.take(root, Message(Kind.PART, part))
        early, self._early = self._early, []
        for root, message in early:
            self.arriving.take(root, message)

    def _end(self, answers: list[Message]) -> None:
        """Notify waiting replacements, and the other roots, that the run is ending, as some roots have answered."""
        self._group.question, self._counted_by_roots = None, False
        self._reject()
        self.outgoing += [
            (root, Message(Kind.LEAVE))
            for root, answer in zip(self._roots, answers, strict=True)
            if answer.kind is not Kind.LEAVE
        ]

    def _reject(self) -> None:
        self.outgoing += [
            (self._members[pusher], Message(Kind.LEAVE)) for pusher in self._group.take_entering()
        ]


class RootSession(ServerSession):
    """A session that sends answers to a push as `VECTOR`, which leaves distinguish from answers to workers."""

    def on_message(self, source: int, message: Message) -> list[Reply]:
        replies = super().on_message(source, message)
        if message.kind is not Kind.PUSH:
            return replies
        return [
            (to, reply if reply.kind is Kind.PART else reply._replace(kind=Kind.VECTOR))
            for to, reply in replies
        ]
