"""The rule of servers that own the optimiser, and a shard for rules of their own.

`ShardRule` makes an update of several gradients:

    gradients ── merge rule: each by its staleness ──▶ aggregator: one of several ──▶ optimiser step

An aggregator that compares whole gradients needs their distances over all shards: then an update is deferred until
all servers have said which gradients they have, with their part of the distances (`DistanceExchange`). What a lost
worker had pushed may be on one server and not on another: then none of them takes it, and it comes again.

`OptimizedShard` is for servers with rules of their own: the values, and the optimiser of worker 0's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.aggregators.weighted_mean import WeightedMean
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.strategies.parameter_server.rules.aggregator import Aggregator, squared_distances
from polyrhythm.strategies.parameter_server.rules.merge_rule import MergeRule
from polyrhythm.strategies.parameter_server.serving.admission import admitted_initial, admitted_plan
from polyrhythm.strategies.parameter_server.serving.distance_exchange import DistanceExchange
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Gate
from polyrhythm.strategies.parameter_server.serving.rule import (
    Applied,
    Contribution,
    Deferred,
    Rule,
    applied_of,
)
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.optimizer_plan import OptimizerPlan

_OPTIMIZER, _MERGER = "optimizer.", "merge."


@dataclass(frozen=True)
class Handling:
    """What becomes of gradients between their arrival and the optimiser.

    Attributes:
        merge: corrects each for its staleness.
        aggregator: makes one of several.
        eject_after: gradients in a row that are not finite, after which their pusher is let go; 0: never.
        finite: whether all gradients are known to be finite.
    """

    merge: MergeRule = field(default_factory=Plain)
    aggregator: Aggregator = field(default_factory=WeightedMean)
    eject_after: int = 0
    finite: bool = False


def shard_session(
    pushers: tuple[int, ...],
    consistency: Consistency,
    handling: Handling | None = None,
    servers: tuple[int, ...] = (),
    index: int = 0,
    session: type[ServerSession] = ServerSession,
) -> ServerSession:
    """Make a server that owns the optimiser of its shard.

    Args:
        pushers: ranks that push gradients, in the order in which gates number them.
        consistency: makes the gate.
        handling: of gradients; default: their mean as they come.
        servers: ranks of all servers, where they must agree on something.
        index: of this one among them.
        session: class of the server.
    """
    handling = handling or Handling()
    count, aggregator = len(pushers), handling.aggregator
    spares, spared_by = consistency.spares(count), str(consistency)
    in_step = consistency.in_step()
    if in_step and aggregator.spares(count) < spares:
        spares, spared_by = aggregator.spares(count), str(aggregator)
    rule = ShardRule(consistency, handling, count, servers, index)
    return session(pushers, rule, spares, spared_by, handling.eject_after)


class ShardRule(Rule):
    """A shard, its optimiser, and the handling of its gradients.

    Args:
        consistency: makes the gate.
        handling: of gradients.
        pushers: how many there are.
        servers: ranks of all servers, where they must agree on something.
        index: of this one among them.
    """

    def __init__(
        self, consistency: Consistency, handling: Handling, pushers: int, servers: tuple[int, ...], index: int
    ) -> None:
        super().__init__(consistency.gate(pushers))
        aggregator = handling.aggregator
        self.remembers = handling.merge.remembers
        self.chooses = aggregator.robust
        self.defers = aggregator.whole
        self.leaves_out = not (consistency.in_step() or aggregator.robust)
        self.screens = self.leaves_out and not handling.finite
        self._exchange = DistanceExchange(servers, index, unnamed=pushers) if aggregator.whole else None
        self._alone = len(servers) <= 1
        self._everyone = list(range(pushers))
        self._handling = handling
        self._aggregator = aggregator
        self._least = aggregator.least
        self._merger = handling.merge.merger()
        self._plain = handling.merge.keeps_gradients and not aggregator.robust
        self._plan: OptimizerPlan | None = None
        self._resumed: State | None = None
        self._copy: Tensor | None = None

    def configure(self, message: Message) -> None:
        """Take the plan of the optimiser."""
        if self.ready:
            raise RefusedMessage(Reason.ORDER, "an optimiser's plan came although training has begun")
        self._plan = admitted_plan(message)

    def begin(self, values: Tensor) -> None:
        """Begin with worker 0's parameters, `(n,)`, or go on with those of a resumed run."""
        plan = admitted_initial(self._plan, values, ready=self.ready)
        resumed, self._resumed = self._resumed, None
        self._build(plan, values if resumed is None else resumed[0]["values"])
        if resumed is not None:
            self._restore(resumed)

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied | Deferred:
        """Make an update of gradients, or tell the other servers of them."""
        if self._plain and len(batch) == 1:  # it is applied as it came, and is its own mean
            _, gradient, read_version, _, weight, rate, _, _ = batch[0]
            if weight <= 0:
                return applied_of((batch, 0, {}, None))
            if self._trains:
                self._copy = None
                self._step(gradient, rate)
            return applied_of((batch, 1, {version - read_version: 1}, None))
        return self._update(batch, version, None) if self._exchange is None else self._propose(batch)

    def knows(self, peer: int) -> bool:
        """Return whether a rank is another server whose distances count."""
        return self._exchange is not None and self._exchange.knows(peer)

    def on_peer(self, peer: int, message: Message) -> None:
        """Take another server's part of the distances."""
        if self._exchange is None or message.kind is not Kind.VECTOR or not self._exchange.knows(peer):
            super().on_peer(peer, message)
        else:
            self._exchange.on_message(peer, message)

    def resume(self, batch: Sequence[Contribution], version: int) -> Applied | None:
        """Make the update of the oldest batch, once all servers have said which of its gradients they have."""
        assert self._exchange is not None, "a batch was deferred"
        parts = self._exchange.all()
        if parts is None:
            return None
        if self._alone:  # with gates that do not go in rounds, two gradients may be one pusher's
            return self._update(batch, version, parts[0])
        named = [(part, self._names(part)) for part in parts]
        common = [name for name in self._everyone if all(name in names for _, names in named)]
        distances = torch.zeros(len(common), len(common), dtype=torch.float64)
        for part, names in named:
            distances += _of(part, names, common)
        kept = [entry for entry in batch if entry.weight == 0 or entry.pusher in common]
        return self._update(kept, version, distances)

    def answer(self, pusher: int, version: int) -> Tensor:
        """Return a copy of the values, one for all who are answered with them: it leaves while updates go on."""
        if self._copy is None:
            assert self.ready, "nobody is answered before there are parameters"
            self._copy = self.values.clone()
        return self._copy

    def state(self) -> State:
        """Return what a resumed shard needs, parameters included."""
        if not self.ready:
            raise RefusedMessage(Reason.ORDER, "a server was asked for its state before it had parameters")
        optimizer, facts = self._optimizer.state()
        merger, merger_facts = self._merger.state()
        tensors = {"values": self.values}
        tensors |= {_OPTIMIZER + name: tensor for name, tensor in optimizer.items()}
        tensors |= {_MERGER + name: tensor for name, tensor in merger.items()}
        return tensors, {"optimizer": facts, "merge": merger_facts}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; worker 0's initial parameters are then not needed."""
        self._resumed = state

    def exact_state(self) -> State:
        """Return all that another server's shard needs to go on as this one would."""
        tensors, facts = self.state() if self.ready else ({}, None)
        return tensors, {"plan": None if self._plan is None else self._plan.to_json(), "shard": facts}

    def load_exact_state(self, state: State) -> None:
        """Restore what `exact_state` returned, in place of all that there was."""
        tensors, facts = state
        self._plan = None if facts["plan"] is None else OptimizerPlan.from_json(facts["plan"])
        if self._plan is not None and facts["shard"] is not None:
            self._build(self._plan, tensors["values"])
            self._restore((tensors, facts["shard"]))

    def _build(self, plan: OptimizerPlan, values: Tensor) -> None:
        self.values = values
        self._optimizer = plan.build(values)
        self._step = self._optimizer.step
        self._trains = self._optimizer.inner is not None
        self._merger = self._handling.merge.merger()
        self._copy = None
        self.ready = True

    def _restore(self, state: State) -> None:
        tensors, facts = state
        self._optimizer.load_state(_named(tensors, _OPTIMIZER), facts["optimizer"])
        self._merger.load_state(_named(tensors, _MERGER), facts["merge"])

    def _update(self, batch: Sequence[Contribution], version: int, distances: Tensor | None) -> Applied:
        """Make an update; `distances` are between the whole gradients that weigh something."""
        weighty = [entry for entry in batch if entry.weight > 0]
        if len(weighty) < self._least:
            return Applied(batch, 0, {})
        ages = [version - entry.read_version for entry in batch]
        factors = [self._merger.factor(age) for age in ages]
        weights = [entry.weight for entry in batch]
        share = _share(weights, factors)
        chosen = [*zip(batch, weights, factors, strict=True)]
        if self._aggregator.robust:
            chosen = [entry for entry in chosen if entry[1] > 0]
        gradient = self._aggregator.aggregate(
            [self._corrected(entry) for entry, _, _ in chosen],
            [weight * factor for _, weight, factor in chosen],
            distances,
        )
        if self._trains:
            self._copy = None
        self._step(gradient, _rate(weighty) * share)
        staleness: dict[int, int] = {}
        for age, weight in zip(ages, weights, strict=True):
            if weight > 0:
                staleness[age] = staleness.get(age, 0) + 1
        return Applied(batch, 1, staleness)

    def _corrected(self, entry: Contribution) -> Tensor:
        if entry.weight == 0:
            return entry.gradient
        return self._merger.correct(entry.pusher, entry.gradient, entry.seen, self.values)

    def _propose(self, batch: Sequence[Contribution]) -> Deferred:
        """Tell the other servers which gradients are here, with this shard's part of their distances."""
        assert self._exchange is not None, "the aggregator compares whole gradients"
        weighty = [entry for entry in batch if entry.weight > 0]
        part = squared_distances([entry.gradient for entry in weighty])
        names = [entry.pusher for entry in weighty]
        if names != self._everyone and not self._alone:
            part = torch.cat([part, torch.tensor([names], dtype=part.dtype)])
        return Deferred(self._exchange.offer(part))

    def _names(self, part: Tensor) -> Sequence[float]:
        """Return the pushers whose gradients a part compares."""
        rows, columns = part.shape
        if not columns:
            return []
        return self._everyone if rows == columns else part[-1].tolist()


def _share(weights: Sequence[float], factors: Sequence[float]) -> float:
    """Return what part of their rate the gradients have in common: exactly 1 where nothing is taken off."""
    if all(factor == 1.0 for factor in factors):
        return 1.0
    return sum(weight * factor for weight, factor in zip(weights, factors, strict=True)) / sum(weights)


def _rate(batch: Sequence[Contribution]) -> float:
    """Return the pushers' learning rate; their mean where they are at different steps of its schedule."""
    rates = [entry.rate for entry in batch]
    return rates[0] if len(set(rates)) == 1 else sum(rates) / len(rates)


def _of(part: Tensor, names: Sequence[float], common: Sequence[int]) -> Tensor:
    """Return the distances between gradients that all servers have, out of those of one server."""
    if len(names) == len(common):
        return part[: len(names)]
    places = [names.index(name) for name in common]
    return part[places][:, places]


def _named(tensors: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


_PREFIX = "optimizer."


class OptimizedShard:
    """Values, and what changes them.

    Attributes:
        values: `(n,)`, changed in place; empty until worker 0 has sent them.
    """

    def __init__(self) -> None:
        self.values = torch.empty(0)
        self._plan: OptimizerPlan | None = None
        self._optimizer: FlatOptimizer | None = None
        self._resumed: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._copy: Tensor | None = None

    @property
    def ready(self) -> bool:
        """Whether there are parameters."""
        return self._optimizer is not None

    def configure(self, message: Message) -> None:
        """Takes the plan of the optimiser.

        Raises:
            RefusedMessage: there are parameters already, or it is no plan.
        """
        if self.ready:
            raise RefusedMessage(Reason.ORDER, "an optimiser's plan came although training has begun")
        self._plan = admitted_plan(message)

    def initialise(self, values: Tensor) -> None:
        """Takes the parameters, unless they were in a checkpoint.

        Raises:
            RefusedMessage: they come before the plan or a second time, or do not fit it.
        """
        plan = admitted_initial(self._plan, values, ready=self.ready)
        self.values = values if self._resumed is None else self._resumed[0]["values"]
        self._optimizer = plan.build(self.values)
        if self._resumed is not None:
            tensors, facts = self._resumed
            names = [name for name in tensors if name.startswith(_PREFIX)]
            named = {name.removeprefix(_PREFIX): tensors[name] for name in names}
            self._optimizer.load_state(named, facts["optimizer"])
            self._resumed = None

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Updates the values."""
        if self._optimizer is None:
            raise RefusedMessage(Reason.ORDER, "a gradient came before the parameters")
        self._copy = None
        self._optimizer.step(gradient, learning_rate)

    def change(self, how: Callable[[Tensor], None]) -> None:
        """Changes the values in place without the optimiser."""
        self._copy = None
        how(self.values)

    def shown(self) -> Tensor:
        """Gives a copy of the values, one for all who are given this version: it leaves while updates go on."""
        if self._copy is None:
            self._copy = self.values.clone()
        return self._copy

    def state(self) -> State:
        """Gives all that a resumed shard needs."""
        if self._optimizer is None:
            raise RefusedMessage(Reason.ORDER, "a server was asked for its state before it had parameters")
        tensors, facts = self._optimizer.state()
        return {"values": self.values} | {_PREFIX + name: value for name, value in tensors.items()}, {
            "optimizer": facts
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave, before `initialise`."""
        self._resumed = state


class OptimizedRule(Rule):
    """The base of rules of their own that step with the optimiser of worker 0's plan."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self._shard = OptimizedShard()

    def configure(self, message: Message) -> None:
        """Take the plan of the optimiser."""
        self._shard.configure(message)

    def begin(self, values: Tensor) -> None:
        """Begin with worker 0's parameters, or go on with those of a resumed run."""
        self._shard.initialise(values)
        self.values, self.ready = self._shard.values, True

    def step(self, gradient: Tensor, rate: float) -> None:
        """Update the values."""
        self._shard.step(gradient, rate)

    def answer(self, pusher: int, version: int) -> Tensor:
        """Return a copy of the values, one for all who are given this version."""
        return self._shard.shown()

    def state(self) -> State:
        """Return parameters and optimiser."""
        return self._shard.state()

    def load_state(self, state: State) -> None:
        """Restore what `state` returned, before `begin`."""
        self._shard.load_state(state)
