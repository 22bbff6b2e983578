"""How far a worker's loop has come, and how a successor's comes to where the others are."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.api.loop.distributed_optimizer import DistributedOptimizer
from polyrhythm.api.loop.kept_state import Kept, plain_state, take_state
from polyrhythm.api.loop.mark import Mark
from polyrhythm.api.loop.shard import Shard


class Course:
    """One worker's.

    Attributes:
        averages: how many averages it has taken.
        kept: what the loop keeps that a successor must have, such as schedulers.
        optimizer: once there is one.
    """

    def __init__(self) -> None:
        self.averages = 0
        self.kept: Sequence[Kept] = ()
        self.optimizer: DistributedOptimizer | None = None
        self._shards: list[Shard | None] = []

    @property
    def next_shard(self) -> int:
        """The number of the next shard."""
        return len(self._shards)

    def add(self, shard: Shard) -> None:
        """Notes another shard."""
        self._shards.append(shard)

    def mark(self, present: Sequence[int], entering: Sequence[int]) -> Mark:
        """Says where this loop is.

        Args:
            present: the workers that have a share of what comes next.
            entering: of those, who is let in now.
        """
        assert self.optimizer is not None, "a loop has something to train"
        return Mark(
            present=tuple(present),
            entering=tuple(entering),
            shards=tuple(1 if shard is None else shard.epoch for shard in self._shards),
            averages=self.averages,
            steps=self.optimizer.steps,
            rates=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            kept=tuple(map(plain_state, self.kept)),
        )

    def go_to(self, mark: Mark) -> None:
        """Goes on where the others were at a mark, but for the steps that this worker has taken."""
        assert self.optimizer is not None, "a loop has something to train"
        self.averages = mark.averages
        for shard, epoch in zip(self._shards, mark.shards, strict=False):
            if shard is not None:
                shard.epoch = epoch
        not_made = len(mark.shards) - len(self._shards)
        self._shards += [None] * not_made  # nor will this loop make them
        for kept, state in zip(self.kept, mark.kept, strict=True):
            take_state(kept, state)
        for group, rate in zip(self.optimizer.param_groups, mark.rates, strict=True):
            group["lr"] = rate
