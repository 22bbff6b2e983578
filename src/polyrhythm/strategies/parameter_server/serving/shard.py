"""A shard of the parameters with its optimiser, as a server keeps it.

`Shard` makes an update of several gradients:

    gradients ── merge rule: each by its staleness ──▶ aggregator: one of several ──▶ optimiser step

`Updates` is a server's shard from the plan of its optimiser to what a resumed run needs, and counts the
updates. `OptimizedShard` is for servers with rules of their own: the values, and the optimiser of worker 0's
plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyrhythm.communication.message import Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.aggregators.weighted_mean import WeightedMean
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.strategies.parameter_server.rules.aggregator import Aggregator
from polyrhythm.strategies.parameter_server.rules.merge_rule import MergeRule
from polyrhythm.strategies.parameter_server.serving.admission import admitted_initial, admitted_plan, payload
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.optimizer_plan import OptimizerPlan

_OPTIMIZER, _MERGER = "optimizer.", "merge."


class Pushed(NamedTuple):
    """A gradient that a server holds.

    Attributes:
        pusher: its number.
        message: the push.
        seen: `(n,)`, what the pusher was answered with before, where the merge rule remembers it.
    """

    pusher: int
    message: Message
    seen: Tensor | None = None


pushed_of: Callable[[tuple[int, Message, Tensor | None]], Pushed] = partial(tuple.__new__, Pushed)
"""Makes one of its fields, in less time than calling the class takes; see `message_of`."""


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


class Shard:
    """Parameters, their optimiser, and the handling of their gradients.

    Args:
        plan: of the optimiser.
        values: `(n,)`, the parameters to begin with; every update changes them in place.
        handling: of gradients.

    Attributes:
        values: `(n,)`, the parameters now.
        trains: whether updates change any of them.
    """

    def __init__(self, plan: OptimizerPlan, values: Tensor, handling: Handling) -> None:
        self.values = values
        self._optimizer = plan.build(values)
        self.trains = self._optimizer.inner is not None
        self._merger = handling.merge.merger()
        self._aggregator = handling.aggregator
        self._least = handling.aggregator.least
        self._plain = handling.merge.keeps_gradients and not handling.aggregator.robust
        self._copy: Tensor | None = None

    def shown(self) -> Tensor:
        """Gives a copy of the values, one for all who are answered with them: it leaves while updates go on."""
        if self._copy is None:
            self._copy = self.values.clone()
        return self._copy

    def update(self, pushed: Sequence[Pushed], version: int, distances: Tensor | None) -> dict[int, int]:
        """Makes one update of several gradients.

        Args:
            pushed: in the order in which they are summed.
            version: updates that were made before.
            distances: between the whole gradients that weigh something, where the aggregator needs them.

        Returns:
            How many gradients were applied at which staleness; nothing where there was no update: only empty batches,
            or fewer gradients than the aggregator needs.
        """
        weighty = [entry for entry in pushed if entry.message.weight > 0]
        if len(weighty) < self._least:
            return Counter()
        staleness = [version - entry.message.version for entry in pushed]
        factors = [self._merger.factor(age) for age in staleness]
        weights = [entry.message.weight for entry in pushed]
        share = _share(weights, factors)
        chosen = [*zip(pushed, weights, factors, strict=True)]
        if self._aggregator.robust:
            chosen = [entry for entry in chosen if entry[1] > 0]
        gradient = self._aggregator.aggregate(
            [self._corrected(entry) for entry, _, _ in chosen],
            [weight * factor for _, weight, factor in chosen],
            distances,
        )
        self._step(gradient, _rate(weighty) * share)
        return Counter(age for age, weight in zip(staleness, weights, strict=True) if weight > 0)

    def update_by_one(self, entry: Pushed, version: int, distances: Tensor | None = None) -> int | None:
        """Does what `update` does with one gradient, as asynchronous servers do at every push, with less ado.

        Returns:
            Its staleness; None where there was no update.
        """
        message = entry.message
        if message.weight <= 0 or self._least > 1:
            return None
        age = version - message.version
        if self._plain:  # it is applied as it came, and is its own mean
            if self.trains:
                self._step(payload(message), message.learning_rate)
            return age
        factor = self._merger.factor(age)
        weight = message.weight * factor
        gradient = self._aggregator.aggregate([self._corrected(entry)], [weight], distances)
        share = 1.0 if factor == 1.0 else weight / message.weight
        self._step(gradient, message.learning_rate * share)
        return age

    def state(self) -> State:
        """Gives all that a resumed shard needs, parameters included."""
        optimizer, facts = self._optimizer.state()
        merger, merger_facts = self._merger.state()
        tensors = {"values": self.values}
        tensors |= {_OPTIMIZER + name: tensor for name, tensor in optimizer.items()}
        tensors |= {_MERGER + name: tensor for name, tensor in merger.items()}
        return tensors, {"optimizer": facts, "merge": merger_facts}

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave, but for the values, which it was made with."""
        tensors, facts = state
        self._optimizer.load_state(_named(tensors, _OPTIMIZER), facts["optimizer"])
        self._merger.load_state(_named(tensors, _MERGER), facts["merge"])

    def _step(self, gradient: Tensor, learning_rate: float) -> None:
        if self.trains:
            self._copy = None
        self._optimizer.step(gradient, learning_rate)

    def _corrected(self, entry: Pushed) -> Tensor:
        gradient = payload(entry.message)
        if entry.message.weight == 0:
            return gradient
        return self._merger.correct(entry.pusher, gradient, entry.seen, self.values)


def _share(weights: Sequence[float], factors: Sequence[float]) -> float:
    """Gives what part of their rate the gradients have in common: exactly 1 where nothing is taken off."""
    if all(factor == 1.0 for factor in factors):
        return 1.0
    return sum(weight * factor for weight, factor in zip(weights, factors, strict=True)) / sum(weights)


def _rate(pushed: Sequence[Pushed]) -> float:
    """Gives the pushers' learning rate; their mean where they are at different steps of its schedule."""
    rates = [entry.message.learning_rate for entry in pushed]
    return rates[0] if len(set(rates)) == 1 else sum(rates) / len(rates)


def _named(tensors: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


_NO_PARAMETERS = "nobody pushes before having pulled"


class Updates:
    """One server's shard, its optimiser, and counts of what was applied.

    Args:
        handling: of gradients.

    Attributes:
        shard: the parameters and their optimiser; None until worker 0 has sent them.
        version: updates applied so far.
        staleness: how many gradients were applied at which staleness.
        dropped: gradients that came too late.
    """

    def __init__(self, handling: Handling) -> None:
        self.shard: Shard | None = None
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self.dropped = 0
        self._latest_staleness: Counter[int] = Counter()
        self._handling = handling
        self._plan: OptimizerPlan | None = None
        self._resumed: State | None = None

    def configure(self, message: Message) -> None:
        """Takes the plan of the optimiser.

        Raises:
            RefusedMessage: it is none that can be carried out, or comes too late.
        """
        if self.shard is not None:
            raise RefusedMessage(Reason.ORDER, "an optimiser's plan came although training has begun")
        self._plan = admitted_plan(message)

    def begin(self, values: Tensor) -> None:
        """Begins with worker 0's parameters, or goes on with those of a resumed run.

        Args:
            values: `(n,)`, the shard's; every update changes them in place.

        Raises:
            RefusedMessage: they cannot be those to begin with.
        """
        plan = admitted_initial(self._plan, values, ready=self.shard is not None)
        if self._resumed is not None:
            values = self._resumed[0]["values"]
        self.shard = Shard(plan, values, self._handling)
        if self._resumed is not None:
            self.shard.load_state(self._resumed)
            self._resumed = None

    def make(self, gradients: Sequence[Pushed], distances: Tensor | None) -> bool:
        """Makes one update, and counts it; gives whether there was one, which empty batches and too few do not make.

        Args:
            gradients: in the order in which they are summed.
            distances: between the whole gradients that weigh something, where the aggregator needs them.
        """
        if len(gradients) == 1:
            return self.make_of_one(gradients[0], distances)
        assert self.shard is not None, _NO_PARAMETERS
        applied = self.shard.update(gradients, self.version, distances)
        if not applied:
            return False
        for age, gradients_of_it in applied.items():  # `+=` would look at all that there ever were
            self.staleness[age] += gradients_of_it
            self._latest_staleness[age] += gradients_of_it
        self.version += 1
        return True

    def make_of_one(self, gradient: Pushed, distances: Tensor | None = None) -> bool:
        """Does what `make` does with one gradient."""
        assert self.shard is not None, _NO_PARAMETERS
        age = self.shard.update_by_one(gradient, self.version, distances)
        if age is None:
            return False
        self.staleness[age] += 1
        self._latest_staleness[age] += 1
        self.version += 1
        return True

    def latest_staleness(self) -> dict[int, int]:
        """Gives how many gradients were applied at which staleness since the last call.

        That are few, where thousands of pushers have seen thousands of stalenesses.
        """
        latest, self._latest_staleness = self._latest_staleness, Counter()
        return dict(latest)

    def counts(self) -> dict[str, Any]:
        """Gives what has been counted, JSON-able."""
        return {
            "version": self.version,
            "staleness": {str(key): count for key, count in self.staleness.items()},
            "dropped": self.dropped,
        }

    def state(self) -> State:
        """Gives what a resumed shard needs, parameters included, beside the `counts`.

        Raises:
            RefusedMessage: there are no parameters yet.
        """
        if self.shard is None:
            raise RefusedMessage(Reason.ORDER, "a server was asked for its state before it had parameters")
        return self.shard.state()

    def load_state(self, state: State) -> None:
        """Takes back `state` with `counts`; worker 0's initial parameters are then not needed."""
        self._take_counts(state[1])
        self._resumed = state

    def exact_state(self) -> State:
        """Gives all that another server's shard needs to go on as this one would, beside the `counts`."""
        tensors, facts = ({}, {}) if self.shard is None else self.shard.state()
        return tensors, {
            "plan": None if self._plan is None else self._plan.to_json(),
            "shard": None if self.shard is None else facts,
        }

    def load_exact_state(self, state: State) -> None:
        """Takes back `exact_state` with `counts`, in place of all that there was."""
        tensors, facts = state
        self._take_counts(facts)
        self._plan = None if facts["plan"] is None else OptimizerPlan.from_json(facts["plan"])
        if self._plan is not None and facts["shard"] is not None:
            self.shard = Shard(self._plan, tensors["values"], self._handling)
            self.shard.load_state((tensors, facts["shard"]))

    def _take_counts(self, facts: dict[str, Any]) -> None:
        self.version = facts["version"]
        self.staleness = Counter({int(key): count for key, count in facts["staleness"].items()})
        self.dropped = facts["dropped"]


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
