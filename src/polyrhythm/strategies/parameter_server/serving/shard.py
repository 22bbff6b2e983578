"""The rule of servers that own the optimizer, and the base of other rules that do.

`ShardRule` makes an update of several gradients:

    gradients ── merge rule: each by its staleness ──▶ aggregator: one of several ──▶ optimizer step

An aggregator that compares whole gradients needs their distances over all shards: then an update is deferred
until all servers have reported their gradients, with their part of the distances (`DistanceExchange`). A lost
worker's push may be on one server and not on another: then none of them uses it, and it is repeated.

`OptimizedRule` is the base of rules of their own that step with the optimizer of worker 0's plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.communicator import LentMemory
from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.aggregator import Aggregator, squared_distances
from polyrhythm.strategies.aggregators.weighted_mean import WeightedMean
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.strategies.parameter_server.rules.merge_rule import MergeRule
from polyrhythm.strategies.parameter_server.serving.admission import (
    Configuration,
    admit_known_push,
    admitted_initial,
)
from polyrhythm.strategies.parameter_server.serving.distance_exchange import DistanceExchange
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Gate
from polyrhythm.strategies.parameter_server.serving.planned_push import (
    admit_planned_push,
    common_plan,
    unpacked_push,
)
from polyrhythm.strategies.parameter_server.serving.rule import (
    Applied,
    Contribution,
    Deferred,
    Rule,
    applied_of,
)
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.state import OF_SERVER, Part, State, StateField
from polyrhythm.training.checkpoint import restoring
from polyrhythm.training.closed_loop import ClosedLoopSGD
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.optimizer_plan import OptimizerPlan

_LEAST_LENT_BYTES = 1 << 16
"""Least size of values that are lent without a copy: copying fewer takes less time than tracking their holders."""


@dataclass(frozen=True)
class Handling:
    """Treatment of gradients between their arrival and the optimizer.

    Attributes:
        merge: correction of each gradient for its staleness.
        aggregator: combination of several gradients.
        eject_after: gradients in a row that are not finite, after which their pusher is evicted; 0: never.
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
    session: Callable[..., ServerSession] = ServerSession,
    memory: LentMemory | None = None,
) -> ServerSession:
    """Make a server that owns the optimizer of its shard.

    Args:
        pushers: ranks that push gradients, in the order in which gates number them.
        consistency: consistency, which makes the gate.
        handling: handling of gradients; default: their unchanged mean.
        servers: ranks of all servers, where they must agree on something.
        index: index of this one among them.
        session: class of the server.
        memory: memory in which the parameters may lie; see `OptimizedRule`.
    """
    handling = handling or Handling()
    count, aggregator = len(pushers), handling.aggregator
    spares, spared_by = consistency.spares(count), str(consistency)
    in_step = consistency.in_step()
    if in_step and aggregator.spares(count) < spares:
        spares, spared_by = aggregator.spares(count), str(aggregator)
    rule = ShardRule(consistency, handling, count, servers, index, memory)
    return session(pushers, rule, spares, spared_by, handling.eject_after)


VALUES = StateField("values", Tensor, OF_SERVER, at="values", loads=False)
"""Parameters of a server, which are given to `OptimizedRule.build`."""


class OptimizedRule(Rule):
    """The base of rules that step with the optimizer of worker 0's plan.

    Answers share the memory of the values. If one is still held at the next update, the values move to a
    copy, and the answer keeps its memory:

        answer ── a tensor of the same memory ─▶ link: lends it to a rank of this host, or sends a copy, and drops it
        update ── is it held, or lent? ─▶ no: in place
                                       ─▶ yes (a worker has not read it yet, it waits for a slow wire, or someone
                                          remembers it): copy, update the copy

    Args:
        memory: memory in which values may lie, to be lent; None: links copy them.
    """

    fields: ClassVar[tuple[StateField, ...]] = (VALUES, StateField("optimizer", Part, OF_SERVER))

    def __init__(self, gate: Gate, memory: LentMemory | None = None) -> None:
        super().__init__(gate)
        self._memory = memory
        self._plan: OptimizerPlan | None = None
        self._resumed: State | None = None
        self._shown: Tensor | None = None
        self._held: weakref.ref[memoryview] | None = None  # dead when no answer is held

    def configure(self, message: Message) -> None:
        if self.ready:
            raise RefusedMessage(Reason.ORDER, "an optimizer's plan arrived although training has begun")
        self._plan = Configuration.of(message).plan

    def begin(self, values: Tensor) -> None:
        plan = admitted_initial(self._plan, values, ready=self.ready)
        resumed, self._resumed = self._resumed, None
        self.build(plan, values if resumed is None else resumed[0]["values"])
        if resumed is not None:
            self._restore(resumed)

    def step(self, gradient: Tensor, rate: float) -> None:
        """Update the values with the optimizer."""
        self._before_change()
        self._optimizer.step(gradient, rate)
        self._optimizer.drop_gradient()

    def step_as(self, gradient: Tensor, rate: float, plan: OptimizerPlan) -> None:
        """Update the values with the optimizer, by the plan of this step."""
        self._before_change()
        self._optimizer.step_as(gradient, rate, plan.spans, plan.rate)
        self._optimizer.drop_gradient()

    def change(self, how: Callable[[Tensor], None]) -> None:
        """Change the values in place without the optimizer."""
        self._before_change()
        how(self.values)

    def answer(self, pusher: int, version: int) -> Tensor:
        # One tensor for all answers of this version: it leaves while updates continue.
        if self._shown is None:
            assert self.ready, "answers need parameters"
            self._shown, self._held = _shown(self.values)
        return self._shown

    def state(self) -> State:
        if not self.ready:
            raise RefusedMessage(Reason.ORDER, "a server was asked for its state before it had parameters")
        return super().state()

    def load_state(self, state: State) -> None:
        self._resumed = state

    def exact_state(self) -> State:
        tensors, facts = self.state() if self.ready else ({}, None)
        return tensors, {"plan": None if self._plan is None else self._plan.to_json(), "shard": facts}

    def load_exact_state(self, state: State) -> None:
        tensors, facts = state
        self._plan = None if facts["plan"] is None else OptimizerPlan.from_json(facts["plan"])
        if self._plan is not None and facts["shard"] is not None:
            self.build(self._plan, tensors["values"])
            self._restore((tensors, facts["shard"]))

    def build(self, plan: OptimizerPlan, values: Tensor) -> None:
        """Make the optimizer of the values, which it changes in place; training can begin."""
        if self._memory is not None and _is_exposed(values):
            values = _copied(values, self._memory)
        self.values = values
        self._optimizer: FlatOptimizer = plan.build(values)
        self._shown = self._held = None
        self.ready = True

    def _restore(self, state: State) -> None:
        with restoring("the saved state of this server"):
            self.load_fields(self.fields, state)

    def _before_change(self) -> None:
        """Have the values where they may change in place: elsewhere, if what was shown of them is held or lent."""
        self._shown, held, memory = None, self._held, self._memory
        if held is None and memory is None:
            return
        self._held = None
        if (held is not None and held() is not None) or (memory is not None and memory.lends(self.values)):
            self.values = _copied(self.values, memory)
            self._optimizer.move_to(self.values)


class ShardRule(OptimizedRule):
    """A shard, its optimizer, and the handling of its gradients.

    Args:
        servers: ranks of all servers, where they must agree on something.
        memory: see `OptimizedRule`.
    """

    fields = (*OptimizedRule.fields, StateField("merge", Part, OF_SERVER, at="_merger"))

    def __init__(
        self,
        consistency: Consistency,
        handling: Handling,
        pushers: int,
        servers: tuple[int, ...],
        index: int,
        memory: LentMemory | None = None,
    ) -> None:
        super().__init__(consistency.gate(pushers), memory)
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
        self._known: Tensor | None = None
        """In dry runs: the gradient that all push, known to fit the parameters."""

    def admit(self, message: Message, values: Tensor, version: int, step: int) -> None:
        try:
            admit_known_push(message, values, version, step, self._known)
        except RefusedMessage:  # rare: the usual case is checked only once
            admit_planned_push(message, values, version, step)
        else:
            if self._handling.finite:
                self._known = message.tensor

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied | Deferred:
        if self._plain and len(batch) == 1:  # it is applied unchanged, and is its own mean
            _, gradient, read_version, _, weight, rate, _, _ = batch[0]
            if gradient is not self._known and gradient.numel() != self._size:  # it brings more
                return self._update_as_planned(batch, version, None)
            if weight <= 0:
                return applied_of((batch, 0, {}, None))
            if self._trains:
                self._before_change()
                if self._closed_loop is not None:
                    self._closed_loop.age = version - read_version
                self._step(gradient, rate)
                self._drop_gradient()
            return applied_of((batch, 1, {version - read_version: 1}, None))
        return (
            self._update_as_planned(batch, version, None) if self._exchange is None else self._propose(batch)
        )

    def on_peer(self, peer: int, message: Message) -> None:
        if self._exchange is None or message.kind is not Kind.VECTOR or not self._exchange.knows(peer):
            super().on_peer(peer, message)
        else:
            self._exchange.on_message(peer, message)

    def resume(self, batch: Sequence[Contribution], version: int) -> Applied | None:
        assert self._exchange is not None, "a batch was deferred"
        parts = self._exchange.all()
        if parts is None:
            return None
        if self._alone:  # with gates that do not go in rounds, two gradients may be one pusher's
            return self._update_as_planned(batch, version, parts[0])
        named = [(part, self._names(part)) for part in parts]
        common = [name for name in self._everyone if all(name in names for _, names in named)]
        distances = torch.zeros(len(common), len(common), dtype=torch.float64)
        for part, names in named:
            distances += _of(part, names, common)
        kept = [entry for entry in batch if entry.weight == 0 or entry.pusher in common]
        return self._update_as_planned(kept, version, distances)

    def build(self, plan: OptimizerPlan, values: Tensor) -> None:
        super().build(plan, values)
        self._size = values.numel()
        self._step, self._drop_gradient = self._optimizer.step, self._optimizer.drop_gradient
        self._kind = plan.kind
        inner = self._optimizer.inner
        self._trains = inner is not None
        self._closed_loop = inner if isinstance(inner, ClosedLoopSGD) else None
        self._merger = self._handling.merge.merger()

    def _update_as_planned(
        self, batch: Sequence[Contribution], version: int, distances: Tensor | None
    ) -> Applied:
        """Make an update, with what some pushes bring in addition to their gradients."""
        size = len(self.values)
        if all(len(entry.gradient) == size for entry in batch):
            return self._update(batch, version, distances)
        pushes = [unpacked_push(entry.gradient, size) for entry in batch]
        written = next((push.written for push in pushes if push.written is not None), None)
        if written is not None:
            self._before_change()
            self.values.copy_(written)
        plan = common_plan(pushes, [entry.weight for entry in batch])
        if plan is not None and plan.kind != self._kind:
            plan = None
        bare = [entry._replace(gradient=push.gradient) for entry, push in zip(batch, pushes, strict=True)]
        return self._update(bare, version, distances, plan)

    def _update(
        self,
        batch: Sequence[Contribution],
        version: int,
        distances: Tensor | None,
        plan: OptimizerPlan | None = None,
    ) -> Applied:
        weighty = [entry for entry in batch if entry.weight > 0]
        if len(weighty) < self._least:
            return Applied(batch, 0, {})
        ages = [version - entry.read_version for entry in batch]
        factors = [self._handling.merge.factor(age) for age in ages]
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
            self._before_change()
        if plan is None:
            self._step(gradient, _rate(weighty) * share)
            self._drop_gradient()
        else:
            self.step_as(gradient, _rate(weighty) * share, plan)
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
        assert self._exchange is not None, "the aggregator compares whole gradients"
        weighty = [entry for entry in batch if entry.weight > 0]
        part = squared_distances([entry.gradient[: len(self.values)] for entry in weighty])
        names = [entry.pusher for entry in weighty]
        if names != self._everyone and not self._alone:
            part = torch.cat([part, torch.tensor([names], dtype=part.dtype)])
        return Deferred(self._exchange.offer(part))

    def _names(self, part: Tensor) -> Sequence[float]:
        rows, columns = part.shape
        if not columns:
            return []
        return self._everyone if rows == columns else part[-1].tolist()


def _is_exposed(values: Tensor) -> bool:
    """Return whether values are shown where they lie, and not as a copy."""
    return values.nbytes >= _LEAST_LENT_BYTES and not values.is_cuda and values.is_contiguous()


def _copied(values: Tensor, memory: LentMemory | None) -> Tensor:
    return values.clone() if memory is None else memory.vector(values).copy_(values)


def _shown(values: Tensor) -> tuple[Tensor, weakref.ref[memoryview] | None]:
    """Return values, `(n,)`, as others may read them, and what dies with the last tensor of them; None: a copy."""
    if not _is_exposed(values):
        return values.clone(), None
    # Held by the storage of the tensor that is made of it, and by no other process.
    view: memoryview = values.detach().view(torch.uint8).numpy().data
    return torch.frombuffer(view, dtype=values.dtype), weakref.ref(view)


def _share(weights: Sequence[float], factors: Sequence[float]) -> float:
    """Return the weighted mean of the gradients' factors: exactly 1 if all factors are 1."""
    if all(factor == 1.0 for factor in factors):
        return 1.0
    return sum(weight * factor for weight, factor in zip(weights, factors, strict=True)) / sum(weights)


def _rate(batch: Sequence[Contribution]) -> float:
    rates = [entry.rate for entry in batch]
    return rates[0] if len(set(rates)) == 1 else sum(rates) / len(rates)


def _of(part: Tensor, names: Sequence[float], common: Sequence[int]) -> Tensor:
    """Return the distances between gradients that all servers have, out of those of one server."""
    if len(names) == len(common):
        return part[: len(names)]
    places = [names.index(name) for name in common]
    return part[places][:, places]
