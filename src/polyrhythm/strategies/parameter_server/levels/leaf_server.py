"""A leaf server: averages the gradients of its workers, pushes the mean to the roots, and returns answers.

    workers ── PUSH ─▶ held until the group is complete ── PUSH(mean, samples) ─▶ roots, each its shard
            ◀─ PARAMETERS ── put together when all have answered ◀── VECTOR ────

A pull goes the same way, once all of the group have asked, so that they continue with the same parameters.
The leaf has at most one question at a time before the roots.

A lost worker is not waited for; what it had pushed goes into the mean, and its batches until a successor
comes are not seen. The successor begins at the group's step with the leaf's parameters, or with the next ones
where the lost worker's gradient of the present step is already held. A leaf without workers leaves the roots,
and returns with the first successor, as a successor would.

Roots that have been asked for the final parameters cannot be told that worker 0, which asked, is lost. It had
no step left; so its successor is given the newest parameters and then the final ones, without asking the
roots.

`Levels` says which workers belong to which leaf; `LeafGroup` tracks the workers of one leaf: who is there,
what they have pushed, and which steps were taken without whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json
from polyrhythm.strategies.parameter_server.rules.aggregator import mean
from polyrhythm.strategies.parameter_server.serving.admission import (
    admit_bare,
    admit_push,
    admitted_initial,
    admitted_plan,
    payload,
)
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerStats
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan


@dataclass(frozen=True)
class Levels:
    """The ranks of both levels.

    Attributes:
        leaves: ranks of the leaf servers, one a group.
        roots: ranks of the root servers, in the order of their shards.
        groups: ranks of every group's workers, neighbours whose numbers differ by at most one group to group.
    """

    leaves: tuple[int, ...]
    roots: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cast: RoleAssignment, groups: int) -> Levels:
        """Shares out the workers; the first servers are the leaves."""
        workers = cast.workers
        cuts = shards(len(workers), min(groups, len(workers)))
        members = [workers[cut] for cut in cuts] + [()] * (groups - len(cuts))
        return cls(cast.servers[:groups], cast.servers[groups:], tuple(members))

    @property
    def busy_leaves(self) -> tuple[int, ...]:
        """Ranks of the leaves that have workers."""
        return tuple(leaf for leaf, members in zip(self.leaves, self.groups, strict=True) if members)

    def leaf_of(self, worker: int) -> int:
        """Gives the rank of a worker's leaf."""
        return next(leaf for leaf, members in zip(self.leaves, self.groups, strict=True) if worker in members)


class LeafGroup:
    """The workers of one leaf, and their gradients until the group is complete.

    Args:
        members: ranks of its workers.

    Attributes:
        members: ranks of its workers.
        there: those that are there.
        asking: who asks for parameters, in the order of their coming.
        entering: successors that wait to be let in.
        steps: with which step each was last let go on; of a lost one, how many are taken.
        absent: for each rank, the stretches of steps, `[first, one past the last]`, taken without it until a successor
            came.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.there = set(members)
        self.asking: list[int] = []
        self.entering: list[int] = []
        self.steps = dict.fromkeys(members, 0)
        self.absent: dict[int, list[list[int]]] = {}
        self._held: dict[int, Message] = {}
        self._lost: set[int] = set()

    def has_pushed(self, rank: int) -> bool:
        """Whether a gradient is held of a rank, be it there or not."""
        return rank in self._held

    @property
    def all_have_pushed(self) -> bool:
        """Whether there are gradients, one of everybody who is there among them."""
        return bool(self._held) and self.there <= self._held.keys()

    @property
    def all_have_come(self) -> bool:
        """Whether somebody asks, and whoever is there asks or has pushed already."""
        return bool(self.asking) and self.there <= self._held.keys() | set(self.asking)

    def check_turn(self, rank: int) -> None:
        """Makes sure that a rank may push now.

        Raises:
            RefusedMessage: it has, or is not there.
        """
        if rank in self._held or rank not in self.there:
            raise RefusedMessage(Reason.ORDER, f"rank {rank} pushed a second time, or after it had left")

    def hold(self, rank: int, message: Message) -> None:
        """Holds a gradient until all are there."""
        self._held[rank] = message

    def take_held(self) -> tuple[list[Message], list[int]]:
        """Gives all gradients that are held, in the members' order, and who is there to be answered."""
        pushed = [rank for rank in self.members if rank in self._held]
        held, self._held = [self._held[rank] for rank in pushed], {}
        for rank in pushed:
            if rank not in self.there:
                self.steps[rank] += 1
        return held, [rank for rank in pushed if rank in self.there]

    def take_asking(self) -> list[int]:
        """Gives who asks."""
        asking, self.asking = self.asking, []
        return asking

    def take_entering(self) -> list[int]:
        """Gives who waits to be let in."""
        entering, self.entering = self.entering, []
        return entering

    def lose(self, rank: int, *, pushed_on: bool) -> bool:
        """Strikes a rank off; gives whether it was there.

        Args:
            rank: the lost one.
            pushed_on: whether its gradient is on its way to the roots, so that its step is taken.
        """
        if rank in self.entering:
            self.entering.remove(rank)
        if rank not in self.there:
            return False
        self.there.remove(rank)
        self._lost.add(rank)
        self.steps[rank] += pushed_on
        self.asking = [asking for asking in self.asking if asking != rank]
        return True

    def let_in(self, ranks: Collection[int], step: int) -> None:
        """Successors begin at a step; what was taken since the lost ones' last is taken without them."""
        for rank in ranks:
            self.there.add(rank)
            if rank in self._lost and self.steps[rank] < step:
                self.absent.setdefault(rank, []).append([self.steps[rank], step])
            self._lost.discard(rank)
            self.steps[rank] = step


Reply = tuple[int, Message]


class _Question(Enum):
    """What the leaf has asked the roots, and they have not all answered."""

    PUSH = auto()
    PULL = auto()
    FINAL = auto()


class LeafServer:
    """One leaf; see `ServerPart`.

    Args:
        levels: which workers belong to which leaf, and the roots.
        index: of this leaf.

    Attributes:
        version: how many pushed means the roots have answered.
        staleness: empty, since the roots count it.
        done: whether worker 0 has let the servers go.
    """

    def __init__(self, levels: Levels, index: int) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self.done = False
        self._group = LeafGroup(levels.groups[index])
        self._roots = levels.roots
        self._others = tuple(leaf for leaf in levels.leaves if leaf != levels.leaves[index])
        self._leader = levels.groups[0][0]
        self._plan: OptimizerPlan | None = None
        self._has_parameters = False
        self._like = torch.empty(0, device="meta")
        self._question: _Question | None = None
        self._waiting: list[int] = []
        """Ranks to be answered when the roots have answered, beside successors that enter then."""
        self._final_wanted = False
        """Whether worker 0 has asked for the final parameters."""
        self._final: Message | None = None
        self._leader_returned = False
        """Whether a successor of worker 0 has come after worker 0 asked for the final parameters, and not left."""
        self._counted_by_roots = True
        """Whether this leaf is a pusher of the roots, which then wait for it."""
        self._last: Message | None = None
        self._answers: dict[int, Message] = {}
        self._versions = dict.fromkeys(self._roots, 0)

    @property
    def steps(self) -> dict[int, int]:
        """By worker, the step with which it was last answered; of a lost one, how many steps it has taken."""
        return self._group.steps

    def stats(self) -> ServerStats:
        """Return what it has counted."""
        return ServerStats({}, self.version, self.steps, absent=self._group.absent)

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a worker, a root or another leaf, and gives the replies.

        Raises:
            RefusedMessage: a message that none of them sends in this state.
        """
        if source not in self._group.members:
            return self._on_server_message(source, message)
        if message.kind is Kind.PUSH:
            self._group.check_turn(source)
            admit_push(message, self._like, self.version, self._group.steps[source])
            self._group.hold(source, message)
            return self._ask_if_complete()
        if message.kind in (Kind.PULL, Kind.LEAVE):
            admit_bare(message)
            return self._pull(source, message) if message.kind is Kind.PULL else self._leave(source)
        if message.kind is Kind.CONFIGURE:
            if self._plan is not None:
                raise RefusedMessage(Reason.ORDER, "a second plan came")
            self._plan = admitted_plan(message)
            return []
        if message.kind is Kind.PARAMETERS:
            self._plan = admitted_initial(self._plan, payload(message), ready=self._has_parameters)
            self._has_parameters = True
            return self._initialise(self._plan, payload(message))
        raise RefusedMessage(
            Reason.KIND, f"a leaf cannot do anything with {message.kind.name} from rank {source}"
        )

    def on_loss(self, rank: int) -> list[Reply]:
        """Stops waiting for a lost worker; what it had pushed goes into the mean."""
        if rank == self._leader:
            self._leader_returned = False
            self._final_wanted &= self._question is _Question.FINAL or self._final is not None
        pushed_on = self._question is _Question.PUSH and rank in self._waiting
        self._waiting = [waiting for waiting in self._waiting if waiting != rank]
        return self._ask_if_complete() if self._group.lose(rank, pushed_on=pushed_on) else []

    def state(self) -> State:
        """Gives nothing: between steps nothing is held, and the roots keep the rest."""
        return {}, {}

    def load_state(self, state: State) -> None:
        """Takes nothing."""

    def _initialise(self, plan: OptimizerPlan, values: Tensor) -> list[Reply]:
        """Sends every root its shard of the initial parameters, with its part of the optimiser's plan."""
        replies = []
        for root, shard in zip(self._roots, shards(len(values), len(self._roots)), strict=True):
            text = pack_json(plan.part(shard.start, shard.stop).to_json())
            replies += [
                (root, Message(Kind.CONFIGURE, text)),
                (root, Message(Kind.PARAMETERS, values[shard])),
            ]
        return replies

    def _pull(self, source: int, message: Message) -> list[Reply]:
        if message.stop:
            if source != self._leader:
                raise RefusedMessage(Reason.SENDER, f"rank {source} asked for the final parameters")
            return self._ask_for_the_end()
        if source not in self._group.there:
            return self._enter(source)
        self._group.asking.append(source)
        return self._ask_if_complete()

    def _ask_for_the_end(self) -> list[Reply]:
        """Notes that worker 0 asks for the final parameters, perhaps again as a successor."""
        self._final_wanted = True
        if self._final is not None:
            return [(self._leader, self._final)]
        if self._question is _Question.FINAL:
            self._waiting = [self._leader]
        return self._ask_if_complete()

    def _enter(self, source: int) -> list[Reply]:
        """Lets a successor in, with the group's parameters, or with the next ones if a question is open."""
        group = self._group
        if self._final_wanted and source == self._leader and self._last is not None:
            self._leader_returned = True
            return [(source, self._last)]
        if self._final_wanted:
            return [(source, Message(Kind.LEAVE))]
        if self._question is not None or group.has_pushed(source) or not group.there:
            group.entering.append(source)
            return self._ask_if_complete()
        group.let_in([source], group.steps[source] if self._last is None else self._last.step)
        if self._last is not None:
            return [(source, self._last)]
        group.asking.append(source)
        return self._ask_if_complete()

    def _ask_if_complete(self) -> list[Reply]:
        """Asks the roots the group's next question, if all of the group are ready for it and none is open."""
        group = self._group
        if self._question is None:
            if group.all_have_pushed:
                return self._push_mean()
            if group.all_have_come:
                return self._ask(_Question.PULL, group.take_asking())
            if group.entering and not group.there:
                self._counted_by_roots = True
                return self._ask(_Question.PULL, [])
            if self._final_wanted and self._final is None:
                return self._ask(_Question.FINAL, [self._leader]) + self._leave_roots()
        return self._leave_roots() if self._question in (None, _Question.FINAL) else []

    def _leave_roots(self) -> list[Reply]:
        if self._group.there or not self._counted_by_roots:
            return []
        self._counted_by_roots = False
        return [(root, Message(Kind.LEAVE)) for root in self._roots]

    def _ask(self, question: _Question, waiting: list[int]) -> list[Reply]:
        self._question, self._waiting = question, waiting
        return [(root, Message(Kind.PULL, stop=question is _Question.FINAL)) for root in self._roots]

    def _push_mean(self) -> list[Reply]:
        self._question = _Question.PUSH
        held, self._waiting = self._group.take_held()
        weights = [entry.weight for entry in held]
        weighty = [entry for entry in held if entry.weight > 0]
        whole = mean([payload(entry) for entry in held], weights) if weighty else payload(held[0])
        return [
            (
                root,
                Message(
                    Kind.PUSH,
                    whole[shard],
                    version=self._versions[root],
                    step=held[0].step,
                    weight=sum(weights),
                    learning_rate=held[0].learning_rate,
                    stop=any(entry.stop for entry in held),
                ),
            )
            for root, shard in zip(self._roots, shards(len(whole), len(self._roots)), strict=True)
        ]

    def _on_server_message(self, source: int, message: Message) -> list[Reply]:
        if source in self._roots:
            return self._on_root_answer(source, message)
        if source not in self._others or message.kind is not Kind.LEAVE:
            raise RefusedMessage(
                Reason.SENDER,
                f"a leaf heard {message.kind.name} from rank {source}, which is not of its group",
            )
        self.done = True
        return [(source, Message(Kind.LEAVE)) for source in self._group.take_entering()]

    def _on_root_answer(self, root: int, message: Message) -> list[Reply]:
        """Takes a root's answer; acts once all roots have answered."""
        self._answers[root] = message
        if len(self._answers) < len(self._roots):
            return []
        answers = [self._answers[root] for root in self._roots]
        self._answers = {}
        if any(answer.kind is Kind.LEAVE for answer in answers):
            return self._end_run(answers)
        if all(answer.kind is Kind.JOIN for answer in answers):  # the leaf returns to leaves that go in step
            join = Message(Kind.JOIN, step=max(answer.step for answer in answers))
            return [(root, join) for root in self._roots]
        return self._answer_group(answers)

    def _end_run(self, answers: list[Message]) -> list[Reply]:
        """Tells waiting successors, and the other roots, that the run is ending, as some roots have answered."""
        self._question, self._counted_by_roots = None, False
        turned = self._group.take_entering()
        roots = [
            root for root, answer in zip(self._roots, answers, strict=True) if answer.kind is not Kind.LEAVE
        ]
        return [(rank, Message(Kind.LEAVE)) for rank in (*turned, *roots)]

    def _answer_group(self, answers: list[Message]) -> list[Reply]:
        asked, self._question = self._question, None
        self.version += asked is _Question.PUSH
        self._versions = {root: answer.version for root, answer in zip(self._roots, answers, strict=True)}
        values = torch.cat([payload(answer) for answer in answers])
        self._like = values.to("meta")
        step = min(answer.step for answer in answers)
        stop = any(answer.stop for answer in answers)
        self._group.steps.update(dict.fromkeys(self._waiting, step))
        entering = self._group.take_entering()
        self._group.let_in(entering, step)
        self._last = Message(Kind.PARAMETERS, values, version=self.version, step=step, stop=stop)
        self._final = self._last if asked is _Question.FINAL else None
        answered, self._waiting = [*self._waiting, *entering], []
        return [(rank, self._last) for rank in answered] + self._ask_if_complete()

    def _leave(self, source: int) -> list[Reply]:
        """Takes a worker's leave; with the last, the leaf leaves the roots. Worker 0's second lets all servers go."""
        if source == self._leader and self._leader_returned:
            self._leader_returned = False
            return []
        if source in self._group.there:
            self._group.there.remove(source)
            return self._ask_if_complete()
        if source != self._leader:
            raise RefusedMessage(Reason.ORDER, f"rank {source} left a second time")
        self.done = True
        return [(rank, Message(Kind.LEAVE)) for rank in (*self._others, *self._roots)]
