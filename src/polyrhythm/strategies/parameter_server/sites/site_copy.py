"""A site's copy of a shard, and its own updates that other sites have not received.

    U += u            every update u of the site's own
    |U_j| > t |w_j|   number j is sent, and U_j becomes 0: what was sent and is kept add up to all updates

At w_j = 0 every change is significant; a number that has not changed never is, and with t = 0 all others are.

A packet is U with zeros for what is kept, or, where that is shorter, only the numbers that are sent and their
places: as whole numbers of 4 bytes (8 beside float64), in the bits of the parameters' dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from polyrhythm.communication.message import Message
from polyrhythm.strategies.parameter_server.rules.aggregator import mean
from polyrhythm.strategies.parameter_server.serving.rule import Contribution
from polyrhythm.strategies.parameter_server.serving.shard import OptimizedShard
from polyrhythm.strategies.state import State


class Significance:
    """One shard's unsent updates.

    Args:
        values: `(n,)`, the shard, for size and dtype.

    Attributes:
        retained: `(n,)`, U.
    """

    def __init__(self, values: Tensor) -> None:
        self.retained = torch.zeros_like(values)

    def add(self, update: Tensor) -> None:
        """Adds an update of the site's own."""
        self.retained.add_(update)

    def take(self, values: Tensor, threshold: float) -> Tensor | None:
        """Takes out what is significant beside the values as they are now; gives a packet, or None if nothing is."""
        chosen = self.retained.abs() > values.abs().mul_(threshold)
        return self._take(chosen)

    def take_all(self) -> Tensor | None:
        """Takes out everything."""
        return self._take(self.retained != 0)

    def _take(self, chosen: Tensor) -> Tensor | None:
        places = chosen.nonzero().flatten()
        if not len(places):
            return None
        sent = self.retained[places]
        self.retained[places] = 0
        short = torch.cat([sent, _as_numbers(places, sent.dtype)])
        if len(short) < len(self.retained):
            return short
        whole = torch.zeros_like(self.retained)
        whole[places] = sent
        return whole


def add_packet(values: Tensor, packet: Tensor) -> None:
    """Adds what another site has sent to the values, `(n,)`, in place."""
    if len(packet) == len(values):
        values.add_(packet)
        return
    count = len(packet) // (1 + _numbers_a_place(packet.dtype))
    places = packet[count:].clone().view(_place_dtype(packet.dtype)).long()
    values.index_add_(0, places, packet[:count])


def _place_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def _numbers_a_place(dtype: torch.dtype) -> int:
    return _place_dtype(dtype).itemsize // dtype.itemsize


def _as_numbers(places: Tensor, dtype: torch.dtype) -> Tensor:
    return places.to(_place_dtype(dtype)).view(dtype)


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

    def update(self, pushed: Sequence[Contribution]) -> None:
        """Takes a step with the mean of gradients; those of weight 0 count nothing."""
        weighty = [entry for entry in pushed if entry.weight > 0]
        if not weighty:
            return
        before = self.values.clone()
        gradient = mean([entry.gradient for entry in weighty], [entry.weight for entry in weighty])
        self._shard.step(gradient, weighty[0].rate)
        self._told_later.add(self.values - before)
        self.staleness.update(self.version - entry.read_version for entry in weighty)
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
