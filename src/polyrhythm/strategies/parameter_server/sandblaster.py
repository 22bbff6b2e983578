"""Sandblaster L-BFGS.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.2 and the appendix's coordinator.

    g = mean of a batch's gradients, of `portions` steps of every worker, all at w
    r = H g, by the two-loop recursion over the latest `memory` pairs (s, y) = (w' - w, g' - g) with s'y > 0
    w' = w + t s, s = an optimiser's step with r
    t = 1, then slope(0) / (slope(0) - slope(1)), slope(t) = g(w + t s)'s

Servers keep w and all pairs in shards. Scalar products travel between them, once a batch. The two-loop
recursion runs on coefficients (Chen, Wang, Zhou, NIPS 2014).

The first step along a line is that of the user's optimiser, with r in place of g. So learning rate, schedule
and weight decay mean what they always do. SGD's momentum m would bend the line; here it makes that step
1/(1-m) times as long. Optimisers that scale every number by itself (Adam) undo what r knows: use SGD.

Departures from the paper:

- Every worker takes equally many portions of a batch, since its data are its own. So the slowest decides how
  long a batch takes. A lost worker's portions are dealt anew to its successor, in later batches; until then
  others have smaller batches.
- There is no coordinator: all servers decide the same from the same numbers.
- The paper's line search needs the loss. This one needs the slope, which the next batch's gradient gives, so
  each trial costs a batch.

A worker adds up the gradients of its portions, and pushes their mean at the end of a batch:

    step     0   1   2   3 ┃ 4   5   6   7 ┃ 8 …        portions = 4
    push                 ──┃             ──┃            then continue with the servers' answer

A server gathers the means of all workers, and makes its shard's part of an L-BFGS step:

    all workers ── PUSH(mean) ─▶ the batch's gradient ─▶ scalar products ── VECTOR ─▶ all other servers
                ◀─ PARAMETERS ── a step along the line, or along the next ◀── their sum ──

After the loss of a worker, a batch consists of those who are left, and of what the lost one had pushed if all
servers have that; otherwise its portions are computed again. Its successor enters at the same batch on all
servers. With another number of workers, a batch that was under way is dealt out again, and the curvature
stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss, Rejoin
from polyrhythm.strategies.parameter_server.batches.lbfgs import Curvature, Search
from polyrhythm.strategies.parameter_server.composition.served import WithServers
from polyrhythm.strategies.parameter_server.rules.aggregator import mean
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare, admit_push, payload
from polyrhythm.strategies.parameter_server.serving.distance_exchange import DistanceExchange, summed
from polyrhythm.strategies.parameter_server.serving.membership import PusherRegistry, Rounds
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.parameter_server.serving.shard import OptimizedShard
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import STEPS, Resharding, State, StateField, steps_of_servers
from polyrhythm.strategies.strategy import Facts, Paper, Traits
from polyrhythm.strategies.worker_part import Step, UsesServers, WorkerPart, WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count, NonNegative


class Sandblaster(WithServers):
    """Workers add up gradients of a large batch, and servers take an L-BFGS step with it, each on its shard.

    Attributes:
        portions: steps of every worker that make a batch.
        memory: pairs that estimate the curvature; 0: none, r is g.
        trials: corrections of a step along its line, at most; each costs a batch.
        tolerance: what part of the slope may be left when a line is over.
        servers: how many, each with an equal shard.
        placement: where servers run.
    """

    paper: ClassVar[Paper] = Paper(
        "Dean, Corrado, Monga, Chen, Devin et al.", "Large Scale Distributed Deep Networks", "NIPS", 2012
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M/portions",
        staleness="0",
        use_it="large batches and a network that is much slower than computing",
        when_a_worker_dies="the others go on, and a successor takes over the portions that are left",
    )

    portions: Count = 2
    memory: int = Field(default=10, ge=0)
    trials: int = Field(default=1, ge=0)
    tolerance: NonNegative = 0.9

    def traits(self, workers: int) -> Traits:
        """Return those of batches that are everybody's; each makes one update at most."""
        return replace(
            super().traits(workers), exchange_every=self.portions, gradients=workers, plain_alone=False
        )

    def faults(self, workers: int) -> FaultPolicy:
        """Return going on: a batch is of those who are there, and servers hold all that a run has come to."""
        return FaultPolicy(worker=OnLoss.GO_ON, leader=True, spares=workers - 1, rejoin=Rejoin.BEHIND)

    def resharding(self, before: int, after: int) -> Resharding:
        """Batches that are whole count."""
        return Resharding(
            after=after,
            text=(
                "the servers go on with their parameters and what they know of the curvature; a batch under way is "
                "left out"
            ),
            servers=(STEPS, StateField("*", "keep", "server")),
            count=steps_of_servers,
        )

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        return BatchWorker(setting, self.portions)

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server."""
        search = Search(memory=self.memory, trials=self.trials, tolerance=self.tolerance)
        return BatchServer(setting, search)


_MOST = torch.finfo(torch.float32).max
"""A server refuses a greater rate; with this one, a loss that is not finite says what to mend."""


class BatchWorker(WorkerPart, UsesServers):
    """Contributes portions to batches; between two batches its parameters do not change.

    Args:
        setting: the worker's.
        portions: of a batch, that this worker takes.
    """

    def __init__(self, setting: WorkerSetting, portions: int) -> None:
        super().__init__()
        self._worker = setting.workers.rank
        self._hands_out = self._worker == 0 and not setting.succeeds
        self._flat = setting.flat
        self._servers = PushPull(setting, without_momentum(setting.plan))
        self._portions = portions
        self._sum = torch.zeros_like(setting.flat.vector) if portions > 1 else None
        self._weight = 0.0
        self._pushed = 0
        self._last: tuple[Step, float] | None = None
        self._stop_requested = False
        self._restored = False

    def start(self, step: int) -> int:
        """Takes the servers' parameters; who is resumed goes on in the middle of its batch, if they are there."""
        if self._hands_out:
            self._servers.initialise()
        known = self._servers.pull()
        if self._restored and known == self._pushed:
            return step
        self._pushed, self._weight = known, 0.0
        if self._sum is not None:
            self._sum.zero_()
        return known

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Adds the gradient to the batch's, and pushes if the batch is over."""
        if self._sum is not None and step.weight > 0:
            self._flat.add_gradients_to(self._sum, step.weight)
        self._weight += step.weight
        self._stop_requested |= step.stop
        self._last = step, learning_rate
        return self._push() if (step.number + 1) % self._portions == 0 else False

    def end(self) -> None:
        """Ends the batch under way and leaves; worker 0 waits for the final parameters."""
        if self._last is not None and self._last[0].number >= self._pushed:
            self._push()
        self._servers.leave()
        if self._worker == 0:
            self._servers.pull(final=True)

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        self._servers.leave()

    def state(self) -> State:
        """Gives the portions of the batch under way."""
        tensors = {} if self._sum is None else {"sum": self._sum}
        facts = {"worker": self._worker, "weight": self._weight, "pushed": self._pushed}
        return tensors, facts | {"last": None if self._last is None else _numbers(*self._last)}

    def load_state(self, state: State) -> None:
        """Takes it back; another worker's, where this one had handed in none, is left alone."""
        tensors, facts = state
        if facts["worker"] != self._worker:
            return
        if self._sum is not None:
            self._sum.copy_(tensors["sum"])
        self._weight, self._pushed = facts["weight"], facts["pushed"]
        if facts["last"] is not None:
            number, rate = facts["last"]
            self._last = Step(number), rate
        self._restored = True

    def _push(self) -> bool:
        assert self._last is not None, "a batch has a step"
        step, learning_rate = self._last
        if self._sum is not None:
            if self._weight > 0:
                self._flat.take_gradients_of(self._sum, self._weight)
            self._sum.zero_()
        stop, weight = self._stop_requested, self._weight
        self._weight, self._pushed = 0.0, step.number + 1
        return self._servers.push_and_pull(replace(step, stop=stop), weight, learning_rate)


def without_momentum(plan: OptimizerPlan) -> OptimizerPlan:
    """Gives SGD whose steps are as long as those with momentum become where gradients stay the same.

    Momentum would bend the line that is searched. Other optimisers stay as they are.
    """
    if plan.kind != "SGD":
        return plan
    spans = []
    for span in plan.spans:
        rate, momentum = span.options["lr"], span.options.get("momentum", 0)
        longer = (1 - span.options.get("dampening", 0)) / (1 - momentum) if momentum else 1.0
        rate = min(rate * longer, _MOST)
        without = {"lr": rate, "momentum": 0, "nesterov": False, "dampening": 0}
        options = {key: without.get(key, value) for key, value in span.options.items()}
        spans.append(replace(span, options=options))
    return replace(plan, spans=tuple(spans))


def _numbers(step: Step, learning_rate: float) -> list[float]:
    return [step.number, learning_rate]


Reply = tuple[int, Message]


class BatchServer:
    """One server; see `ServerPart`.

    Args:
        setting: which of all servers it is, and whose gradients come.
        search: how steps are made of gradients.

    Attributes:
        version: batches so far that have changed the parameters.
        staleness: how many gradients were applied at which staleness.
    """

    def __init__(self, setting: ServerSetting, search: Search) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self._shard = OptimizedShard()
        self._curvature = Curvature(self._shard, search)
        self._presence = PusherRegistry(setting.cast.workers)
        self._parts = DistanceExchange(setting.cast.servers, setting.index)
        self._steps = [0] * len(setting.cast.workers)
        self._rounds = Rounds(len(setting.cast.workers))
        self._held: dict[int, Message] = {}
        self._batch: dict[int, Message] = {}
        """What is multiplied, by worker, in their order."""
        self._owed: set[int] = set()
        """Workers who wait for that."""
        self._void = 0
        """Batches of which others may have something, and this server has nothing."""
        self._stop = False

    @property
    def done(self) -> bool:
        """Whether all workers have left, and worker 0 has let the servers go."""
        return self._presence.done

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each worker are in batches that are over."""
        return dict(zip(self._presence.pushers, self._steps, strict=True))

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a rank and gives the replies.

        Raises:
            RefusedMessage: a message that no worker or server of ours sends now.
        """
        if self._parts.knows(source) and message.kind is Kind.VECTOR:
            self._parts.on_message(source, message)
            return self._decide()
        number = self._presence.number(source, message.kind)
        if message.kind is Kind.PUSH:
            return self._push(number, message)
        if message.kind is Kind.PULL:
            admit_bare(message)
            return self._pull(source, final=message.stop)
        if message.kind is Kind.LEAVE:
            admit_bare(message)
            return self._go_on_without(number) if self._presence.leave(source) else []
        if message.kind is Kind.JOIN:
            admit_bare(message._replace(step=0))
            self._rounds.accept(number, message.step)
            return self._gather()
        return self._begin(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Waits for a worker no longer; what it has pushed still counts."""
        if rank not in self._presence.numbers or not self._presence.lose(rank):
            return []
        return self._go_on_without(self._presence.numbers[rank])

    def state(self) -> State:
        """Gives all that a resumed server needs, parameters included."""
        tensors, facts = self._shard.state()
        curvature, curvature_facts = self._curvature.state()
        return tensors | curvature, {
            "version": self.version,
            "steps": list(self._steps),
            "staleness": {str(key): count for key, count in self.staleness.items()},
            "curvature": curvature_facts,
            **facts,
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; worker 0's initial parameters are then not needed."""
        tensors, facts = state
        self.version = facts["version"]
        self._steps = list(facts["steps"])
        self.staleness = Counter({int(key): count for key, count in facts["staleness"].items()})
        self._curvature.load_state((tensors, facts["curvature"]))
        self._shard.load_state(state)

    def _begin(self, source: int, message: Message) -> list[Reply]:
        if message.kind is Kind.CONFIGURE:
            self._shard.configure(message)
            return []
        if message.kind is Kind.PARAMETERS:
            self._shard.initialise(payload(message))
            asking, self._presence.asking = self._presence.asking, []
            return [self._answer(rank) for rank in asking]
        raise RefusedMessage(
            Reason.KIND, f"a server cannot do anything with {message.kind.name} from rank {source}"
        )

    def _pull(self, source: int, *, final: bool) -> list[Reply]:
        if final:
            if source != self._presence.pushers[0]:
                raise RefusedMessage(Reason.SENDER, f"rank {source} asked for the final parameters")
            self._presence.final = source
            return self._answer_final()
        number = self._presence.numbers[source]
        succeeds = not self._presence.is_there(source)
        if not self._presence.enter(source):
            return [(source, Message(Kind.LEAVE))]
        if succeeds:
            self._rounds.invite(number, later=number in self._held)
            return [(source, Message(Kind.JOIN, step=self._rounds.invitation(number) or 0))]
        return self._answer_if_begun([number])

    def _go_on_without(self, worker: int) -> list[Reply]:
        self._rounds.forget(worker)
        self._owed.discard(worker)
        return self._gather() + self._answer_final()

    def _push(self, worker: int, message: Message) -> list[Reply]:
        if not self._shard.ready:
            raise RefusedMessage(Reason.ORDER, "a gradient came before the parameters")
        if worker in self._held or worker in self._owed:
            raise RefusedMessage(Reason.ORDER, "a gradient came although its batch is not over")
        admit_push(message, self._shard.values, self.version, message.step)  # a batch may end at any step
        self._stop |= message.stop
        if message.step < self._steps[worker]:
            return self._answer_if_begun([worker])
        self._held[worker] = message
        return self._gather()

    def _gather(self) -> list[Reply]:
        """Begins to multiply once all who are there have pushed; lets in who comes at the next batch."""
        if self._batch or self._rounds.held_up:
            return []
        replies = self._answer_if_begun(self._rounds.let_in(alone=False))
        there = self._there()
        if not there:
            return replies + self._skip()
        if self._held.keys() >= there:
            self._rounds.number += 1
            self._batch, self._owed, self._held = dict(sorted(self._held.items())), there, {}
            return replies + self._multiply()
        return replies

    def _there(self) -> set[int]:
        """Gives the workers who take part in the batch under way."""
        numbers, rounds = self._presence.numbers, self._rounds
        return {
            n for rank, n in numbers.items() if self._presence.is_there(rank) and not rounds.is_outside(n)
        }

    def _skip(self) -> list[Reply]:
        """Goes on to the batch of a successor, since nobody else is there; others may have had the ones before."""
        self._held.clear()
        number = self._rounds.number
        entered = self._rounds.let_in(alone=True)
        skipped = self._rounds.number - number
        self._void += skipped
        told = [reply for _ in range(skipped) for reply in self._parts.offer(_names(()))]
        return told + self._answer_if_begun(entered) + self._decide()

    def _multiply(self) -> list[Reply]:
        """Tells the others this shard's part of all products; or, if a worker is missing, first who is not."""
        whole = len(self._batch) == len(self._steps) and self._weighs
        return self._parts.offer(self._products() if whole else _names(self._batch)) + self._decide()

    @property
    def _weighs(self) -> bool:
        return any(message.weight > 0 for message in self._batch.values())

    def _products(self) -> Tensor:
        """Makes the batch's gradient, and this shard's part of all products."""
        weights = [message.weight for message in self._batch.values()]
        gradient = mean([payload(message) for message in self._batch.values()], weights)
        return self._curvature.products(gradient)

    def _decide(self) -> list[Reply]:
        """Steps, once all servers' products are there."""
        while self._void or self._batch:
            parts = self._parts.all()
            if parts is None:
                return []
            if self._void:  # nobody makes anything of it
                self._void -= 1
            elif all(part.dim() == 2 for part in parts):
                return self._step(summed(parts))
            else:
                return self._agree([part.tolist() for part in parts if part.dim() == 1])
        return []

    def _agree(self, named: list[list[int]]) -> list[Reply]:
        """Takes the gradients that all servers have; of a lost worker's, others come again."""
        self._batch = {n: held for n, held in self._batch.items() if all(n in names for names in named)}
        if not self._weighs:
            return self._end_batch()
        return self._parts.offer(self._products()) + self._decide()

    def _step(self, gram: Tensor) -> list[Reply]:
        self._curvature.advance(gram, max(message.learning_rate for message in self._batch.values()))
        for number, message in self._batch.items():
            if message.weight > 0:
                self.staleness[self.version - message.version] += message.step + 1 - self._steps[number]
        self.version += 1
        return self._end_batch()

    def _end_batch(self) -> list[Reply]:
        batch, self._batch = self._batch, {}
        for number, message in batch.items():
            self._steps[number] = message.step + 1
        owed, self._owed = sorted(self._owed), set()
        return self._answer_if_begun(owed) + self._gather() + self._answer_final()

    def _answer_if_begun(self, workers: list[int]) -> list[Reply]:
        """Answers with the parameters; as soon as there are some."""
        sources = [self._presence.pushers[worker] for worker in workers]
        if not self._shard.ready:
            self._presence.asking += sources
            return []
        return [self._answer(source) for source in sources]

    def _answer_final(self) -> list[Reply]:
        final = self._presence.ready_to_end
        due = final is not None and self._shard.ready and not self._batch
        return [self._answer(final)] if due and final is not None else []

    def _answer(self, source: int) -> Reply:
        step = self._steps[self._presence.numbers[source]]
        values = self._shard.shown()
        return source, Message(Kind.PARAMETERS, values, version=self.version, step=step, stop=self._stop)


def _names(workers: Iterable[int]) -> Tensor:
    return torch.tensor(list(workers), dtype=torch.int64)
