"""A server's shard and the updates that it has had: from the plan of its optimiser to what a resumed run needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from polyrhythm.communication.message import Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import admitted_initial, admitted_plan
from polyrhythm.strategies.parameter_server.serving.shard import Handling, Pushed, Shard
from polyrhythm.strategies.state import State
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan

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
