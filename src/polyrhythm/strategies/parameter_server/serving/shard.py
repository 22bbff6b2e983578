"""One shard of the parameters: what a server does with the gradients of an update.

gradients ── merge rule: each by its staleness ──▶ aggregator: one of several ──▶ optimiser step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from polyrhythm.communication.message import Message
from polyrhythm.strategies.parameter_server.aggregators.weighted_mean import WeightedMean
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.strategies.parameter_server.rules.aggregator import Aggregator
from polyrhythm.strategies.parameter_server.rules.merge_rule import MergeRule
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.state import State
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan

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
