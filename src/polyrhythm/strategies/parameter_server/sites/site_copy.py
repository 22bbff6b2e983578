"""A site's copy of a shard, and those of its own changes that other sites have not been told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from polyrhythm.communication.message import Message
from polyrhythm.strategies.parameter_server.rules.aggregator import mean
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.optimized_shard import OptimizedShard
from polyrhythm.strategies.parameter_server.sites.significance import Significance, add_packet
from polyrhythm.strategies.state import State


class SiteCopy:
    """Parameters with an optimiser; `w += u, U += u` for each update u of the site's own, `w += U'` for the others'.

    Attributes:
        version: updates so far, those from other sites included.
        staleness: how many gradients were applied at which staleness.
    """

    def __init__(self) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self._shard = OptimizedShard()
        self._unsent: Significance | None = None
        self._resumed: State | None = None

    @property
    def ready(self) -> bool:
        """Whether there are parameters."""
        return self._unsent is not None

    @property
    def values(self) -> Tensor:
        """The parameters, `(n,)`, changed in place; empty until worker 0 has sent them."""
        return self._shard.values

    def configure(self, message: Message) -> None:
        """Takes the plan of the optimiser; see `OptimizedShard.configure`."""
        self._shard.configure(message)

    def initialise(self, values: Tensor) -> bool:
        """Takes the parameters; see `OptimizedShard.initialise`.

        Returns:
            Whether it goes on with those of a checkpoint instead.
        """
        self._shard.initialise(values)
        self._unsent = Significance(self._shard.values)
        if self._resumed is None:
            return False
        self._unsent.retained = self._resumed[0]["retained"]
        return True

    def update(self, pushed: Sequence[Message]) -> None:
        """Takes a step with the mean of gradients; those of weight 0 count nothing."""
        weighty = [message for message in pushed if message.weight > 0]
        if not weighty:
            return
        before = self.values.clone()
        gradient = mean([payload(message) for message in weighty], [message.weight for message in weighty])
        self._shard.step(gradient, weighty[0].learning_rate)
        self._told_later.add(self.values - before)
        self.staleness.update(self.version - message.version for message in weighty)
        self.version += 1

    def take_in(self, packet: Tensor) -> None:
        """Adds what another site has sent."""
        self._shard.change(lambda values: add_packet(values, packet))
        self.version += 1

    def significant(self, threshold: float) -> Tensor | None:
        """Takes out what is significant of all that has not been told; gives a packet, or None if nothing is."""
        return self._told_later.take(self.values, threshold)

    def untold(self) -> Tensor | None:
        """Takes out everything that has not been told; gives a packet, or None if there is nothing."""
        return None if self._unsent is None else self._unsent.take_all()

    def shown(self) -> Tensor:
        """Gives a copy of the parameters, one for all who are given this version."""
        return self._shard.shown()

    def state(self) -> State:
        """Gives all that a resumed copy needs."""
        tensors, facts = self._shard.state()
        counted = {str(key): count for key, count in self.staleness.items()}
        return tensors | {"retained": self._told_later.retained}, facts | {
            "version": self.version,
            "staleness": counted,
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave, before `initialise`."""
        facts = state[1]
        self.version = facts["version"]
        self.staleness = Counter({int(key): count for key, count in facts["staleness"].items()})
        self._shard.load_state(state)
        self._resumed = state

    @property
    def _told_later(self) -> Significance:
        assert self._unsent is not None, "nobody pushes before having pulled"
        return self._unsent
