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
from collections.abc import Sequence
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
from polyrhythm.strategies.parameter_server.serving.admission import admit_push_of_any_step
from polyrhythm.strategies.parameter_server.serving.distance_exchange import DistanceExchange, summed
from polyrhythm.strategies.parameter_server.serving.gate import Decision, Gate
from polyrhythm.strategies.parameter_server.serving.membership import Rounds
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.parameter_server.serving.rule import Applied, Contribution, Deferred
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import OptimizedRule
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
        """Return the part of one worker."""
        return BatchWorker(setting, self.portions)

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server."""
        search = Search(memory=self.memory, trials=self.trials, tolerance=self.tolerance)
        return batch_session(setting, search)


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


def batch_session(setting: ServerSetting, search: Search) -> ServerSession:
    """Make one server.

    Args:
        setting: which of all servers it is, and whose gradients come.
        search: how steps are made of gradients.
    """
    return ServerSession(setting.cast.workers, BatchRule(setting, search))


class BatchRule(OptimizedRule):
    """L-BFGS on a shard; the scalar products of a batch are of all servers.

    Args:
        setting: which of all servers it is, and whose gradients come.
        search: how steps are made of gradients.
    """

    defers = True
    admit = staticmethod(admit_push_of_any_step)  # a batch may end at any step

    def __init__(self, setting: ServerSetting, search: Search) -> None:
        workers = len(setting.cast.workers)
        super().__init__(BatchGate(workers))
        self._workers = workers
        self._curvature = Curvature(self._shard, search)
        self._exchange = DistanceExchange(setting.cast.servers, setting.index)
        self._agreed: Sequence[Contribution] | None = None
        """What all servers have of the batch under way, once they have said so."""

    def apply(self, batch: Sequence[Contribution], version: int) -> Deferred:
        """Tell the others this shard's part of all products; or, if a worker is missing, first who is not."""
        whole = len(batch) == self._workers and _weighs(batch)
        return Deferred(self._exchange.offer(self._products(batch) if whole else _names(batch)))

    def on_peer(self, peer: int, message: Message) -> None:
        """Take another server's part of the products, or the names of those whose gradients it has."""
        if message.kind is not Kind.VECTOR or not self._exchange.knows(peer):
            super().on_peer(peer, message)
        else:
            self._exchange.on_message(peer, message)

    def resume(self, batch: Sequence[Contribution], version: int) -> Applied | Deferred | None:
        """Step, once all servers' products are there; of a batch that is empty here nobody makes anything."""
        parts = self._exchange.all()
        if parts is None:
            return None
        if not batch:
            return Applied(batch, 0, {})
        common = batch if self._agreed is None else self._agreed
        if all(part.dim() == 2 for part in parts):
            self._agreed = None
            return self._step_along(common, summed(parts), version)
        named = [part.tolist() for part in parts if part.dim() == 1]
        # Of a lost worker's gradients, those that not all servers have come again.
        common = [entry for entry in common if all(entry.pusher in names for names in named)]
        if not _weighs(common):
            return Applied(common, 0, {})
        self._agreed = common
        return Deferred(self._exchange.offer(self._products(common)))

    def state(self) -> State:
        """Return parameters, optimiser and curvature."""
        tensors, facts = self._shard.state()
        curvature, curvature_facts = self._curvature.state()
        return tensors | curvature, {"curvature": curvature_facts, **facts}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned, before `begin`."""
        tensors, facts = state
        self._curvature.load_state((tensors, facts["curvature"]))
        self._shard.load_state(state)

    def _products(self, batch: Sequence[Contribution]) -> Tensor:
        """Make the batch's gradient, and this shard's part of all products."""
        gradient = mean([entry.gradient for entry in batch], [entry.weight for entry in batch])
        return self._curvature.products(gradient)

    def _step_along(self, batch: Sequence[Contribution], gram: Tensor, version: int) -> Applied:
        self._curvature.advance(gram, max(entry.rate for entry in batch))
        staleness: Counter[int] = Counter()
        for entry in batch:
            if entry.weight > 0:
                staleness[version - entry.read_version] += entry.fresh
        return Applied(batch, 1, staleness)


class BatchGate(Gate):
    """Holds gradients until there is one of everybody who is there, and no batch is under way.

    Args:
        workers: how many there are.
    """

    rounds: Rounds

    def __init__(self, workers: int) -> None:
        self.rounds = Rounds(workers)
        self._present = set(range(workers))
        self._held: set[int] = set()
        self._owed: set[int] = set()
        """Workers who wait for the batch under way."""
        self._busy = False

    def ask(self, pusher: int, step: int) -> Decision:
        """Answer, also while a batch is under way."""
        return Decision(answer=(pusher,), at_once=True)

    def repeat(self, pusher: int, step: int, due: int) -> Decision:
        """Answer: the batch is over."""
        return self.ask(pusher, due)

    def check_turn(self, pusher: int) -> None:
        """Refuse a second gradient for one batch."""
        if pusher in self._held or pusher in self._owed:
            raise RefusedMessage(Reason.ORDER, "a gradient came although its batch is not over")

    def arrive(self, pusher: int, step: int) -> Decision:
        """Hold the gradient, or begin a batch if it was the last."""
        self._held.add(pusher)
        return self._decide()

    def leave(self, pusher: int) -> Decision:
        """Wait for a worker no longer; what it has pushed still counts."""
        self.rounds.forget(pusher)
        self._present.discard(pusher)
        self._owed.discard(pusher)
        return self._decide()

    def join(self, pusher: int) -> None:
        """Begin no batch until this worker has said at which it comes in."""
        self.rounds.invite(pusher, later=pusher in self._held)

    def enter(self, pusher: int, number: int) -> Decision:
        """Let a worker in at that batch, and answer it then."""
        self.rounds.accept(pusher, number)
        return self._decide()

    def applied(self) -> Decision:
        """Begin the next batch, if all have pushed meanwhile."""
        self._busy, self._owed = False, set()
        return self._decide()

    def _decide(self) -> Decision:
        if self._busy or self.rounds.held_up:
            return Decision(at_once=True)
        entered = self._let_in(alone=False)
        if not self._present:  # others may have had the batches before that of a successor
            forget, self._held = tuple(self._held), set()
            entered += self._let_in(alone=True)
            return Decision(answer=tuple(entered), forget=forget, at_once=True)
        if not self._held >= self._present:
            return Decision(answer=tuple(entered), at_once=True)
        self.rounds.number += 1
        apply, self._held = tuple(sorted(self._held)), set()
        self._busy, self._owed = True, set(self._present)
        return Decision(apply=apply, answer=tuple(sorted(self._present)))

    def _let_in(self, *, alone: bool) -> list[int]:
        entered = self.rounds.let_in(alone=alone)
        self._present.update(entered)
        return entered


def _weighs(batch: Sequence[Contribution]) -> bool:
    return any(entry.weight > 0 for entry in batch)


def _names(batch: Sequence[Contribution]) -> Tensor:
    return torch.tensor([entry.pusher for entry in batch], dtype=torch.int64)
