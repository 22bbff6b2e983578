"""The worker's end of push and pull, over all shards at once.

`ServerLink` is the part that all of them share. `PushPull` exchanges a worker's flat vectors with the
servers. `ServedWorker` is the worker of all strategies with a push of every gradient; it continues with the
servers' answers.

`OverlappedPushPull` and `OverlappingWorker` do the same while the worker computes:

    at once      | forward |  backward  |··push··|update|··pull··| forward | …
    overlapped   | forward |  backward  |·|update|·| forward      | …
                              push of the last layers, …            pull of the first layers, …

A bucket is pushed as soon as the backward pass has it, and its parameters are awaited just before the forward pass
uses them, the first layers' first: wait-free backpropagation (Zhang et al., "Poseidon", USENIX ATC 2017, arXiv
1706.03292), in the order of priority-based propagation (Jayarajan et al., MLSys 2019, arXiv 1905.03960). Servers see
whole gradients (see `parts`), so every consistency, merge rule and aggregator works as ever, with the same bits.
Departure from the papers: an update is of a whole shard, not of a layer. Of several servers, each answers for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle, LentMemory
from polyrhythm.communication.message import Kind, Message, message_of
from polyrhythm.errors import Dismissed, PeerLost, RequestError
from polyrhythm.strategies.parameter_server.serving.admission import Configuration, payload
from polyrhythm.strategies.parameter_server.serving.planned_push import Planned, packed_push
from polyrhythm.strategies.parameter_server.serving.rounds import latest_entrance
from polyrhythm.strategies.state import OWN, Part, StateField, Stateful
from polyrhythm.strategies.worker_part import OptimizerSource, Step, WorkerPart, WorkerSetting, Writes
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.flat_parameters import is_finite, shards
from polyrhythm.training.optimizer_plan import OptimizerPlan, update_as

_PUSH, _LEAVE, _DISMISSED, _PART = Kind.PUSH, Kind.LEAVE, Kind.DISMISSED, Kind.PART
_LET_GO = (_LEAVE, _DISMISSED)
_LEAST_LENT_BYTES = 1 << 18
"""Least size of gradients lent to servers: copying these takes 9 us, and checking whether they are returned 4."""


class ServerLink:
    """A worker's link with the servers; each holds a shard of the flat vector.

    Args:
        plan: plan of the servers' optimizer; None: they have none.
        pushes: pushes that every pusher makes in the whole run, where servers must know it; 0: not known.

    Attributes:
        known: number of this worker's steps that each server knew when `pull_whole` was called last.
    """

    # Among thousands of simulated workers each line of memory that a step touches is out of the cache.
    __slots__ = (
        "_network",
        "_overwrite",
        "_plan",
        "_pushes",
        "_servers",
        "_shards",
        "_vector",
        "_versions",
        "known",
    )

    def __init__(self, setting: WorkerSetting, plan: OptimizerPlan | None = None, pushes: int = 0) -> None:
        self._network = setting.network
        self._servers = setting.roles.servers
        self._shards = shards(setting.flat.size, len(self._servers))
        self._versions = [0] * len(self._servers)
        self._plan = plan
        self._pushes = pushes
        self._vector = setting.flat.vector
        self._overwrite: Callable[[Tensor, Tensor], None] | None = None
        self.known: tuple[int, ...] = ()

    def initialize(self) -> None:
        """Give every server its shard and how to optimize it; one worker calls this, before anyone pushes."""
        for position, server in enumerate(self._servers):
            for message in self._beginning(position):
                self._network.send(server, message)

    def pull_whole(self, final: bool = False) -> tuple[Tensor, int]:
        """Return all servers' values, `(size,)`, and how many of this worker's steps all of them know.

        Raise `PeerLost` if this is a replacement, and the run that it would join is ending.
        """
        answers = self._pulled(final)
        for server, answer in zip(self._servers, answers, strict=True):
            if answer.kind in _LET_GO:
                raise _let_go(server, answer.kind)
        self._versions = [answer.version for answer in answers]
        self.known = tuple(answer.step for answer in answers)
        return torch.cat([payload(answer) for answer in answers]), min(self.known)

    def leave(self) -> None:
        """Notify all servers that no push follows; after the final pull, that they may exit."""
        for server in self._servers:
            self._network.send(server, Message(Kind.LEAVE))

    def check_losses(self) -> None:
        """Take note of servers that were lost while nothing was asked of them, where others have their shards."""

    def _pulled(self, final: bool) -> list[Message]:
        answers = self._answers(Message(Kind.PULL, stop=final))
        entrance = latest_entrance(answers)
        return answers if entrance is None else self._answers(entrance)

    def _answers(self, question: Message) -> list[Message]:
        for position in range(len(self._servers)):
            self._ask(position, question).wait()
        return [self._answer(position) for position in range(len(self._servers))]

    def _beginning(self, position: int) -> list[Message]:
        shard = self._shards[position]
        values = Message(Kind.PARAMETERS, self._vector[shard])
        if self._plan is None:
            return [values]
        plan = self._plan.part(shard.start, shard.stop)
        return [Configuration(plan, self._pushes).message(), values]

    def _ask(self, position: int, message: Message) -> Handle:
        return self._network.start_send(self._servers[position], message)

    def _answer(self, position: int) -> Message:
        server = self._servers[position]
        if self._overwrite is None or (target := self._target(position)) is None:
            return self._network.receive(server)[1]
        return self._network.receive_into(target, server)

    def _target(self, position: int) -> Tensor | None:
        """Return where an answer of the size of a shard is written in the end, if nothing reads it before."""
        return None


def _let_go(server: int, kind: Kind) -> PeerLost:
    """Return the error of a worker that an answer lets go.

    `LEAVE`: it joins a run that is ending; others may have admitted it before they were notified of the end.
    """
    if kind is _DISMISSED:
        return Dismissed(server, "too many of its gradients in a row were not finite")
    return PeerLost(server, "joining a run that is ending")


class PushPull(ServerLink, Stateful):
    """Exchanges a worker's flat vectors with the servers.

    Args:
        plan: plan of the servers' optimizer; default: the user's.
        pushes: pushes that every pusher makes in the whole run, where servers must know it; 0: not known.

    Attributes:
        reached: next step of this worker according to the servers' last answer.
        stops: whether a pull was answered when someone had wanted to stop.
    """

    __slots__ = (
        "_flat",
        "_gradients",
        "_memory",
        "_parameters",
        "_sliced",
        "_under_way",
        "reached",
        "stops",
    )

    def __init__(self, setting: WorkerSetting, plan: OptimizerPlan | None = None, pushes: int = 0) -> None:
        super().__init__(setting, setting.plan if plan is None else plan, pushes)
        self.reached = 0
        self.stops = False
        self._memory: LentMemory | None = None
        self._under_way: list[Handle] = []
        self._parameters = [setting.flat.vector[shard] for shard in self._shards]
        self._flat = setting.flat
        self._overwrite = None if setting.flat.still else setting.flat.overwrite
        self._sliced = setting.flat.gradients
        self._gradients = setting.flat.gradients_of(self._shards)

    def lend_gradients(self) -> None:
        """Move the gradients, which are zero, to where servers of this host read them without a copy, if that pays.

        They then lie elsewhere after each push that a server still holds once it has answered.
        """
        flat, memory = self._flat, self._network.lent_memory()
        if (
            memory is None
            or flat.still
            or flat.gradients.is_cuda
            or flat.gradients.nbytes < _LEAST_LENT_BYTES
        ):
            return
        self._memory = memory
        self._move_gradients()

    def _move_gradients(self) -> None:
        assert self._memory is not None, "there is somewhere to move them to"
        self._flat.renew_gradients(self._memory.vector(self._flat.gradients_and_tail).zero_())

    def pull(self, final: bool = False) -> int:
        """Overwrite the flat vector; return how many of this pusher's gradients every server has applied.

        Args:
            final: wait until all pushers have left.

        Raises:
            PeerLost: this is a replacement, and the run that it would join is ending.
            LetGo: the servers do without this worker.
        """
        self.stops = self._take_answers(self._pulled(final))
        return self.reached

    def push_and_pull(self, step: Step, weight: float, learning_rate: float) -> bool:
        """Push the flat gradients, overwrite the flat vector with the answers, and return whether to stop."""
        self.push(step, weight, learning_rate)
        return self.take()

    def push(self, step: Step, weight: float, learning_rate: float) -> None:
        """Start to push the flat gradients, which must not change before the answers have been taken.

        `weight` is the number of samples behind them, in units of a full batch.
        """
        number, stop, versions, under_way = step.number, step.stop, self._versions, []
        gradients_now = self._flat.gradients
        if gradients_now is not self._sliced:  # they have moved to other memory
            self._sliced, self._gradients = gradients_now, self._flat.gradients_of(self._shards)
        pushed = self._gradients if step.plan is None and self._flat.change is None else self._planned(step)
        for position, gradients in enumerate(pushed):
            message = (_PUSH, gradients, versions[position], number, weight, learning_rate, stop, 0)
            under_way.append(self._ask(position, message_of(message)))
        self._under_way = under_way

    def _planned(self, step: Step) -> list[Tensor]:
        """Return the push of every shard, with plan or changes in addition to the gradient."""
        plan, flat = step.plan, self._flat
        if plan is not None:
            missing = [flat.views[position] for position in flat.without_gradient]
            plan = plan.without([(view.start, view.stop) for view in missing])
        return [
            packed_push(
                Planned(
                    gradients,
                    None if plan is None else plan.part(shard.start, shard.stop),
                    None if flat.change is None else flat.vector[shard],
                )
            )
            for gradients, shard in zip(self._gradients, self._shards, strict=True)
        ]

    def take(self) -> bool:
        """Overwrite the flat vector with the answers to a push that are not empty; return whether to stop."""
        stop = self._take_answers()
        for push in self._under_way:
            push.wait()
        if self._memory is not None and self._memory.lends(self._flat.gradients):
            self._move_gradients()
        return stop

    def _target(self, position: int) -> Tensor | None:
        return self._parameters[position]

    def _take_answers(self, answers: Sequence[Message] = ()) -> bool:
        """Receive the servers' answers; wait for them if necessary."""
        reached, anyone_stops, overwrite = None, False, self._overwrite
        for position, server in enumerate(self._servers):
            answer = answers[position] if answers else self._answer(position)
            kind, tensor, version, step, _, _, stop, _ = answer
            if kind is _LEAVE or kind is _DISMISSED:
                raise _let_go(server, kind)
            if tensor is not None and overwrite is not None:
                overwrite(self._parameters[position], tensor)
            self._versions[position] = version
            reached = step if reached is None or step < reached else reached
            anyone_stops |= stop
        assert reached is not None, "there are servers"
        self.reached = reached
        return anyone_stops


_PUSHED = -1


class OverlappedPushPull(PushPull):
    """Pushes buckets before their step is over, and takes what servers answer to such a push in parts.

    What was pushed in one piece is answered in one piece, as are pulls.
    """

    def __init__(self, setting: WorkerSetting, **more: Any) -> None:
        super().__init__(setting, **more)
        self._sizes = [len(gradients) for gradients in self._gradients]
        self._unpushed = list(self._sizes)
        """Numbers of each shard that are still to be pushed in this step."""
        self._cuts: list[list[int]] = [[] for _ in self._shards]
        self._leaving: list[Handle] = []
        self._in_one_piece: set[int] = set()
        """Shards that are not pushed in parts in this step."""
        self._awaited: list[deque[tuple[int, int]]] = [deque() for _ in self._shards]
        """Missing stretches of an answer of each shard, in their order."""

    def push_bucket(self, start: int, stop: int, step: Step) -> None:
        """Start to push numbers of the flat gradients, just before those that were pushed last.

        They must not change before `take` has returned. A shard that is whole is pushed at once, if the
        learning rate is known, so that its server can answer during the backward pass.
        """
        for position, shard in enumerate(self._shards):
            first, last = max(start, shard.start) - shard.start, min(stop, shard.stop) - shard.start
            if first >= last:
                continue
            if position not in self._in_one_piece:
                gradients = self._flat.gradients[shard][first:last]
                part = Message(_PART, gradients, version=first, step=step.number, weight=step.weight)
                self._unpushed[position] = first
                self._cuts[position].append(first)
                self._leaving.append(self._ask(position, part))
            if first == 0 and step.learning_rate is not None:
                self._push_rest(position, step, step.weight, step.learning_rate)

    def push(self, step: Step, weight: float, learning_rate: float) -> None:
        if not self._leaving:
            super().push(step, weight, learning_rate)
            return
        for position, unpushed in enumerate(self._unpushed):
            if unpushed >= 0:
                self._push_rest(position, step, weight, learning_rate)
        self._under_way, self._leaving, self._unpushed = self._leaving, [], list(self._sizes)
        self._in_one_piece.clear()

    def _push_rest(self, position: int, step: Step, weight: float, learning_rate: float) -> None:
        rest = self._flat.gradients[self._shards[position]][: self._unpushed[position]]
        version = self._versions[position]
        message = (_PUSH, rest, version, step.number, weight, learning_rate, step.stop, 0)
        self._leaving.append(self._ask(position, message_of(message)))
        self._unpushed[position] = _PUSHED

    def await_numbers(self, start: int, stop: int) -> None:
        """Wait until the flat vector holds the latest answers' numbers from `start` to `stop`."""
        for position, shard in enumerate(self._shards):
            awaited = self._awaited[position]
            while awaited and shard.start + awaited[0][0] < stop and start < shard.stop:
                self._take_part(position)

    def awaits(self, start: int, stop: int) -> bool:
        """Return whether some of these numbers of the flat vector have not arrived yet."""
        return any(
            shard.start + first < stop and start < shard.start + last
            for shard, awaited in zip(self._shards, self._awaited, strict=True)
            for first, last in awaited
        )

    def settle(self) -> None:
        """Wait for the missing parts of the latest answers."""
        self.await_numbers(0, self._flat.size)

    def pull(self, final: bool = False) -> int:
        self.settle()
        self._cuts = [[] for _ in self._shards]
        return super().pull(final)

    def _answer(self, position: int) -> Message:
        """Return an answer; what follows of it in parts is awaited from now on, and not here."""
        answer = super()._answer(position)
        while answer.kind is _PART:  # a copy of one that was taken
            answer = super()._answer(position)
        cuts, self._cuts[position] = self._cuts[position], []
        if cuts and answer.tensor is not None and not answer.tensor.numel():
            places = sorted({0, *cuts, self._sizes[position]})
            self._awaited[position].extend(pairwise(places))
            return answer._replace(tensor=None)
        return answer

    def _target(self, position: int) -> Tensor | None:
        in_parts = self._cuts[position] or self._awaited[position]
        return None if in_parts else super()._target(position)

    def _take_part(self, position: int) -> None:
        start, stop = self._awaited[position][0]
        part = super()._answer(position)
        if part.kind in _LET_GO:
            raise _let_go(self._servers[position], part.kind)
        if part.kind is Kind.PARAMETERS:
            self._take_all_parts(position, part)
            return
        if part.kind is not _PART or part.version != start:
            return
        if self._overwrite is not None:
            self._overwrite(self._parameters[position][start:stop], payload(part))
        self._awaited[position].popleft()

    def _take_all_parts(self, position: int, answer: Message) -> None:
        """Take the missing parts from an answer in one piece, from the replacement of a lost server.

        The parameters that the forward pass has used stay: its backward pass needs them as they were.
        """
        values, awaited, overwrite = payload(answer), self._awaited[position], self._overwrite
        if overwrite is not None:
            for start, stop in awaited:
                overwrite(self._parameters[position][start:stop], values[start:stop])
        awaited.clear()
        self._versions[position] = answer.version


class ServedWorker(WorkerPart):
    """Pushes the gradients of every step and continues with the servers' answers.

    Args:
        servers: link with the servers; default: the plain one.
        own_updates: whether it updates its own copy, in case that an answer is empty.
        dropped_late: whether servers drop a late gradient. Others may then wait for another one of a worker
            that stops, which may itself wait for their states; so it leaves before that.
        scales_parts: whether a gradient counts in proportion to this worker's part of a global batch.
        takes_plans: whether servers take more than a gradient with a push; see `planned_push`.
        lends_gradients: whether servers of this host may read gradients where they lie. Not where the worker reads them
            after they were pushed, since servers may change them then, nor where a user's loop keeps them.
    """

    fields = (StateField("", Part, OWN, at="_own"),)
    __slots__ = (
        "_distributes",
        "_flat",
        "_has_left",
        "_leads",
        "_leaves_at_once",
        "_lends_gradients",
        "_optimizer",
        "_scales_parts",
        "_servers",
    )

    def __init__(
        self,
        setting: WorkerSetting,
        servers: PushPull | None = None,
        *,
        own_updates: bool = False,
        dropped_late: bool = False,
        scales_parts: bool = False,
        takes_plans: bool = True,
        lends_gradients: bool = False,
    ) -> None:
        super().__init__()
        self._scales_parts, self._lends_gradients = scales_parts, lends_gradients
        self.follows = OptimizerSource.PLAN if takes_plans else OptimizerSource.NOTHING
        self.writes = Writes.IN_STEP if takes_plans and not own_updates else Writes.LOST
        self._leaves_at_once = dropped_late
        self._has_left = False
        self._leads = setting.workers.rank == 0
        self._distributes = setting.initializes
        self._servers = servers or PushPull(setting)
        self._flat = setting.flat
        self._optimizer = setting.plan.build(setting.flat.vector) if own_updates else None

    def start(self, step: int) -> int:
        """Take the servers' parameters, which worker 0 hands out; leave if others have stopped.

        Others may wait for a gradient of it in the step in progress, while as worker 0 it waits for them to stop.
        """
        if self._lends_gradients:
            self._servers.lend_gradients()
        if self._distributes:
            self._servers.initialize()
        reached = self._servers.pull()
        if self._servers.stops:
            self._leave()
        return reached

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Push, and take the answers, which overwrite the worker's own update where they are not empty.

        Servers leave out a gradient that is not finite; so it is not taken into the worker's own copy either. Where
        each gradient is an update of its own, one of a larger part counts for more (`Step.share`), so that the updates
        of a step together have the size of one of the whole batch.
        """
        if step.share != 1.0 and self._scales_parts:
            self._flat.gradients.mul_(step.share)
        self._servers.push(step, step.weight, learning_rate)
        if self._optimizer is not None and step.weight > 0 and is_finite(self._flat.gradients):
            update_as(self._optimizer, self._flat, step.plan, learning_rate)
        stops = self._servers.take()
        if stops and self._leaves_at_once:
            self._leave()
        return stops

    def check_servers(self) -> None:
        self._servers.check_losses()

    def next_step(self, step: int) -> int:
        """Return the step at which the servers are, if they did not wait for this worker."""
        reached = self._servers.reached
        return reached if reached > step else step + 1

    @property
    def has_stopped(self) -> bool:
        """Whether the last pull's answer demanded a stop: pushes of a replacement would wait for ever."""
        return self._servers.stops

    def catch_up(self) -> None:
        """Take the newest parameters; a gradient of old ones would be as stale as this worker was long away.

        A worker that has left takes none: it pushes no more, and servers would let it in again.
        """
        if not self._has_left:
            self._servers.pull()

    def end(self) -> None:
        self._leave()
        if self._leads:
            self._servers.pull(final=True)

    def _leave(self) -> None:
        if not self._has_left:
            self._servers.leave()
            self._has_left = True

    def release(self) -> None:
        self._servers.leave()

    @property
    def _own(self) -> Stateful | FlatOptimizer:
        """State of this worker: its optimizer if it updates its own copy, else compression errors."""
        return self._servers if self._optimizer is None else self._optimizer


class OverlappingWorker(ServedWorker):
    """Like `ServedWorker`, but concurrent with the passes; see the top of this file."""

    def __init__(self, setting: WorkerSetting, servers: OverlappedPushPull, **more: bool) -> None:
        super().__init__(setting, servers, **more)
        self._overlapped = servers
        size = setting.flat.size
        self._places = [(bucket.start, min(bucket.stop, size)) for bucket in setting.flat.buckets]
        self._step = Step(0)

    def begin(self, step: Step) -> None:
        self._step = step

    def before_use(self, bucket: int) -> None:
        self._overlapped.await_numbers(*self._places[bucket])

    def bucket_ready(self, bucket: int) -> None:
        """Push a bucket; the last one carries the facts about the whole gradient.

        Raises:
            RequestError: its parameters have been used before their arrival, by something that is not their
                module.
        """
        self._check_was_awaited(bucket)
        step = self._step
        if bucket == len(self._places) - 1 or (self._scales_parts and step.share != 1.0):
            return
        self._overlapped.push_bucket(*self._places[bucket], step)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        for bucket in range(len(self._places)):
            self._check_was_awaited(bucket)
        return super().gradients_ready(step, learning_rate)

    def settle(self) -> None:
        self._overlapped.settle()

    def end(self) -> None:
        self.settle()
        super().end()

    def _check_was_awaited(self, bucket: int) -> None:
        """Receive the parameters of a bucket that no forward pass has waited for; it must have no gradient."""
        start, stop = self._places[bucket]
        if not self._overlapped.awaits(start, stop):
            return
        if bool(self._flat.gradients[start:stop].any()):
            views = [self._flat.views[at] for at in self._flat.buckets[bucket].parameters]
            name = next(view.name for view in views if bool(view.gradient.any()))
            raise RequestError(
                f"{name} was used without calling its module, before servers had answered: call the module, or give "
                "the strategy overlap=false"
            )
        self._overlapped.await_numbers(start, stop)
