"""The worker of mixed mode: a member of a group, one of which talks to the servers for all.

What happens inside a group, between two meetings of its speaker with the servers, is an `InsidePart`. All
members do the same. It is one of two:

- `Gradients`: every step is a contribution, the mean of the group's gradients, since the servers own the
  optimiser.
- `Models`: the workers follow another strategy, and their movement is for the servers:

    a round    members go from w to one model x, as the inside strategy has it, with the user's optimiser
    servers    w' = w - (w_read - x)        SGD of rate 1; in between, other groups may have moved w

What is pushed is the way back, so that servers treat it as they treat a gradient; a merge rule that takes
something off a stale one makes the way shorter.

`Circle` is a member's group: who is in it now, and its way to the next formation (see `group_server`).

With another number of workers, all begin with what the servers have, in a round of theirs:

    servers     have the rounds that are over ─▶ stay, and count everybody's rounds anew
    members     a round under way is left out, and computed again; momenta become the mean of all

Every member begins as if it had been in the middle of a round and had come no further than it had begun,
since the step that all begin with need not be the first of one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.parameter_server.groups.group_server import WORD_TAG, Formation
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.state import Held, Resharding, State
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import (
    CatchesUp,
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
)
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan


class Contribution(NamedTuple):
    """What a group has for the servers; the numbers themselves are in every member's flat gradients.

    Attributes:
        step: the number of the contribution, what it weighs, and whether a member wants to stop.
        learning_rate: to update with.
    """

    step: Step
    learning_rate: float


class InsidePart(Protocol):
    """One member's side; all members do the same.

    Attributes:
        plan: of the optimiser that the servers run.
        steps: of a contribution.
    """

    plan: OptimizerPlan
    steps: int

    def start(self, step: int) -> None:
        """All members begin at this step, with the servers' parameters."""

    def resume(self, step: int, contributions: int) -> bool:
        """Goes on in the middle of a contribution as it was saved, where all members can; gives whether they do.

        Args:
            step: that this member had come to.
            contributions: that the servers hold of the group.
        """

    def begin(self, step: Step) -> None:
        """A step begins."""

    def bucket_ready(self, bucket: int) -> None:
        """The gradients of this bucket are final."""

    def contribute(self, step: Step, learning_rate: float) -> Contribution | None:
        """All gradients are final; gives what the group has for the servers, if it is time for that."""

    def refresh(self) -> None:
        """The flat vector holds the servers' parameters."""

    def break_off(self) -> None:
        """The group's communicator has been revoked: gives up whatever is under way on it."""

    def regroup(self, group: Communicator) -> None:
        """Goes on with those who are there; `start` follows, with the servers' parameters."""

    @property
    def apart(self) -> bool:
        """Whether members have taken steps that the servers have not heard of."""

    def rest(self) -> Contribution | None:
        """The run is over: gives what the servers have not heard of, if there is anything."""

    def present(self) -> Tensor | None:
        """Gives the group's model, `(size,)`, where it is not the flat vector."""

    def state(self) -> State:
        """Gives what a resumed member needs."""

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; called before `start`."""


class Gradients:
    """One member's side; see `InsidePart`. Every step is a contribution.

    Args:
        mean_of: makes the mean of a group's gradients.
        group: whose member it is.
        plan: the user's optimiser.
    """

    def __init__(
        self, mean_of: Callable[[Communicator], GradientMean], group: Communicator, plan: OptimizerPlan
    ) -> None:
        self.plan = plan
        self.steps = 1
        self.apart = False
        self._mean = mean_of(group)

    def start(self, step: int) -> None:
        """Readies the mean."""
        self._mean.prepare()

    def resume(self, step: int, contributions: int) -> bool:
        """Never: the servers hold all that there is."""
        return False

    def begin(self, step: Step) -> None:
        """Readies the mean for the next step."""
        self._mean.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        """Start to average a bucket."""
        self._mean.start(bucket)

    def contribute(self, step: Step, learning_rate: float) -> Contribution:
        """Averages what is left."""
        weight, stop = self._mean.finish(step)
        return Contribution(Step(step.number, weight, stop), learning_rate)

    def refresh(self) -> None:
        """Nothing to do."""

    def break_off(self) -> None:
        """Abandon the sums under way."""
        self._mean.break_off()

    def regroup(self, group: Communicator) -> None:
        """Averages over others from now on."""
        self._mean = self._mean.over(group)

    def rest(self) -> None:
        """Nothing is left."""

    def present(self) -> Tensor | None:
        """The flat vector is the model."""
        return None

    def state(self) -> State:
        """Nothing."""
        return {}, {}

    def load_state(self, state: State) -> None:
        """Takes nothing."""


_PART, _READ, _VECTOR = "part.", "read", "vector"


class Models:
    """One member's side; see `InsidePart`. Every round is a contribution.

    Checkpoints may be made in the middle of a round; it is gone on with if all members have one of the same step, and
    the servers have not heard of the round.

    Args:
        setting: this worker's.
        group: whose member it is.
        inside: how the group goes on.
    """

    def __init__(self, setting: WorkerSetting, group: Communicator, inside: Strategy) -> None:
        self.plan = OptimizerPlan("SGD", (Span(0, setting.flat.size, {"lr": 1.0}),), 1.0)
        self.steps = inside.traits(group.size).exchange_every
        self.apart = False
        self._flat = setting.flat
        self._group = group
        self._part = WorkerCalls(inside.worker(replace(setting, workers=group)))
        self._read = torch.zeros_like(setting.flat.vector)
        self._done = 0
        self._stop_requested = False
        self._saved: State | None = None

    def start(self, step: int) -> None:
        """Lets the members start from the servers' parameters, with the optimiser that a checkpoint held."""
        shown = self._flat.vector.clone()
        self._part.start(step)
        self._flat.vector.copy_(shown)
        self._done = step
        self.refresh()

    def resume(self, step: int, contributions: int) -> bool:
        """Goes on where it was, if all members were at the same step of the round that the servers wait for."""
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
        """A step begins."""
        self._part.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        """The gradients of this bucket are final."""
        self._part.bucket_ready(bucket)

    def contribute(self, step: Step, learning_rate: float) -> Contribution | None:
        """Takes a step; at the end of a round all members hold the same, and the way back is in their gradients."""
        self._stop_requested |= self._part.gradients_ready(step, learning_rate) or step.stop
        self._done, self.apart = step.number + 1, True
        return None if self._done % self.steps else self._way_back()

    def refresh(self) -> None:
        """Keeps what has been read."""
        self._read.copy_(self._flat.vector)
        self.apart = False

    def break_off(self) -> None:
        """Gives up what its part has under way."""
        self._part.break_off()

    def regroup(self, group: Communicator) -> None:
        """Refuses: in the middle of a round members hold different models, of which the servers know none.

        Raises:
            RunError: always; a strategy with such groups does not regroup (`Mixed.faults`).
        """
        raise RunError("groups that push rounds do not regroup")

    def rest(self) -> Contribution | None:
        """Ends the round under way."""
        if not self.apart:
            return None
        self._part.settle()
        self._part.end()
        return self._way_back()

    def present(self) -> Tensor | None:
        """Gives the mean of the members' models in the middle of a round."""
        return self._part.present()

    def state(self) -> State:
        """Gives the state of the inside strategy's part, and what was read last."""
        tensors, facts = self._part.state()
        named = {_PART + name: tensor for name, tensor in tensors.items()}
        if self.apart:
            named |= {_VECTOR: self._flat.vector, _READ: self._read}
        noted: dict[str, Any] = {"part": facts, "apart": self.apart}
        return named, noted

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        tensors, facts = state
        self._saved = {name: tensor.clone() for name, tensor in tensors.items()}, facts
        inner = {name.removeprefix(_PART): value for name, value in tensors.items() if name.startswith(_PART)}
        self._part.load_state((inner, facts["part"]))

    def _all_are_at(self, step: int, mine: bool) -> bool:
        """Whether all members say yes, at the same step; all get the same answer."""
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
    """One member's side; the first server keeps the list (`roster`).

    Args:
        setting: this worker's.
        number: of the group.
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
        self._workers = setting.cast.workers
        self._server = setting.cast.servers[0]
        self._incarnation = setting.incarnation

    @property
    def speaks(self) -> bool:
        """Whether this member speaks for the group."""
        return self.group.rank == 0

    @property
    def due(self) -> bool:
        """Whether somebody waits to be let in; the speaker is told."""
        while self.speaks and (found := self._network.poll(self._server, WORD_TAG)) is not None:
            if found[1].kind is Kind.JOIN and found[1].version == self.round:
                return True
        return False

    def break_off(self) -> None:
        """Ends the use of the group's communicator: whoever waits on it hears so, whoever else is lost."""
        for other in range(self.group.size):
            if other != self.group.rank:
                with suppress(PeerLost):
                    self.group.start_send(other, Message(Kind.REVOKE))
        self.group.revoke()

    def go_on(self) -> bool:
        """Goes on with those who are there; gives whether the group does, else its run is over.

        Raises:
            PeerLost: the server is gone.
        """
        self._network.send(self._server, Message(Kind.BROKEN, version=self.round))
        return self._form()

    def enter(self) -> bool:
        """Waits to be let in, as a successor; gives the same as `go_on`.

        Raises:
            PeerLost: the server is gone.
        """
        self._network.send(self._server, Message(Kind.JOIN, version=self._incarnation))
        return self._form()

    def _form(self) -> bool:
        while True:
            word = self._network.receive(self._server, WORD_TAG)[1]
            if word.kind is Kind.LEAVE:
                self.steps = word.step
                return False
            if word.kind is Kind.REGROUP:
                break
        formation = Formation.of(word)
        self.round = formation.round
        self.there = tuple(self._workers.index(rank) for rank in formation.ranks)
        self.group = self._network.regrouped(
            f"{self._name}, {formation.round}", formation.ranks, formation.incarnations
        )
        return True


class MixedWorker(WorkerPart, OverlapsBackward, SkipsSteps, Presents, CatchesUp, UsesServers, RegroupsApart):
    """Goes on with its group; whoever speaks for the group pushes what comes of it, and hands the answer on.

    When somebody of the group is lost, or comes, those who are there begin anew at what the servers have: the
    parameters, and how many of the group's contributions are in them. So a contribution that was under way is either
    there, or made again.

    Args:
        setting: this worker's.
        circle: its group.
        inside: what goes on there.
    """

    def __init__(self, setting: WorkerSetting, circle: Circle, inside: InsidePart) -> None:
        super().__init__()
        self._setting = setting
        self._circle = circle
        self._flat = setting.flat
        self._inside = inside
        self._leads_run = setting.workers.rank == 0
        self._servers = self._link() if circle.speaks and not setting.succeeds else None
        self._left_out = 0
        self._done = 0
        self._regrouped_at: int | None = None

    def start(self, step: int) -> int:
        """Worker 0 hands out the shards; speakers pull; groups share what theirs got."""
        if self._leads_run and self._servers is not None:
            self._servers.initialise()
        reached = self._servers.pull() if self._servers is not None else 0
        contributions = int(self._share(reached)[0])
        if self._inside.resume(step, contributions):
            self._done = step
            return step
        return self._begin_at(contributions)

    def begin(self, step: Step) -> None:
        """A step begins inside."""
        self._inside.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        """The gradients of this bucket are final."""
        self._inside.bucket_ready(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Goes on inside, and exchanges what comes of it through the speaker, if it is time to."""
        self._left_out = 0
        contribution = self._inside.contribute(step, learning_rate)
        stop = contribution is not None and self._exchange(contribution)
        self._done = self.next_step(step.number)
        return stop

    def next_step(self, step: int) -> int:
        """Where the servers are, if they did not wait for this group."""
        return step + 1 + self._left_out

    def settle(self) -> None:
        """Nothing is under way between two steps."""

    def present(self) -> Tensor | None:
        """The group's model, where its members have models of their own."""
        return self._inside.present()

    def catch_up(self) -> None:
        """Takes the newest parameters, the whole group together, unless its members are apart or have them already."""
        if self._inside.apart or self._regrouped_at == self._done:
            return
        if self._servers is not None:
            self._servers.pull()
        self._share(0.0)
        self._inside.refresh()

    @property
    def due(self) -> bool:
        """Whether somebody waits to be let in."""
        return self._circle.due

    def reassemble(self, *, enters: bool) -> Reassembled:
        """Goes on with those who are there, at what the servers have of the group."""
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
        """Pushes what is left; speakers leave, and worker 0 waits for the final parameters."""
        left = self._inside.rest()
        if left is not None:
            self._exchange(left)
        if self._servers is not None:
            self._servers.leave()
        if self._leads_run:
            self._servers = self._servers or self._link()
            self._servers.pull(final=True)

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        assert self._servers is not None, "worker 0 has asked them for the final parameters"
        self._servers.leave()

    def state(self) -> State:
        """Gives what goes on inside."""
        return self._inside.state()

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        self._inside.load_state(state)

    def _link(self) -> PushPull:
        steps = self._setting.steps or 0
        return PushPull(self._setting, self._inside.plan, -(-steps // self._inside.steps))

    def _begin_at(self, contributions: int) -> int:
        self._inside.start(contributions * self._inside.steps)
        self._done = contributions * self._inside.steps
        return self._done

    def _exchange(self, contribution: Contribution) -> bool:
        """Pushes what the group has, and shares the answer; gives whether all must stop."""
        step, stop = contribution.step, False
        if self._servers is not None:
            stop = self._servers.push_and_pull(step, step.weight, contribution.learning_rate)
            self._left_out = max(0, self._servers.reached - step.number - 1)
        shared_stop, left_out = self._share(float(stop), self._left_out)
        self._left_out = int(left_out)
        self._inside.refresh()
        return bool(shared_stop)

    def _share(self, *numbers: float) -> list[float]:
        """Gives all members the speaker's parameters and one or two numbers of its."""
        shared = self._flat.vector_and_tail
        tail = shared[-len(numbers) :]
        tail.copy_(tail.new_tensor(numbers))
        self._circle.group.broadcast(shared)
        found: list[float] = tail.tolist()
        return found


def groups_of_rounds(servers: Resharding, inside: Resharding) -> Resharding:
    """Return how groups in rounds are resharded: all get the servers' parameters, and the mean of the momenta.

    Args:
        servers: how servers are, which count rounds.
        inside: how the strategy inside is.
    """

    def workers(held: Held, step: int) -> dict[int, State]:
        whole = torch.cat([tensors["values"] for tensors, _ in held.servers])
        bare = replace(held, workers={index: _inner(state) for index, state in held.workers.items()})
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


def _inner(state: State) -> State:
    tensors, facts = state
    named = {name.removeprefix(_PART): value for name, value in tensors.items() if name.startswith(_PART)}
    return named, facts["part"]
