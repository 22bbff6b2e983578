"""How far a worker's loop has come, and how a successor's comes to where the others are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyrhythm.api.loop.distributed_optimizer import DistributedOptimizer
from polyrhythm.api.loop.kept_state import Kept, plain_state, take_state
from polyrhythm.api.loop.mark import Mark
from polyrhythm.api.loop.position import Position
from polyrhythm.api.loop.shard import Shard


class Course:
    """Counts how far one worker's loop has come.

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

    def position(self, epoch: tuple[int, int], taken: int, *, at_end: bool = False) -> Position:
        """Says where this loop is, at a step or at the end of a share.

        Args:
            epoch: loop and epoch.
            taken: batches of it.
            at_end: whether a share of it has been handed out to its end.
        """
        assert self.optimizer is not None, "a loop has something to train"
        return Position(
            loop=epoch[0],
            epoch=epoch[1],
            steps=self.optimizer.steps,
            taken=taken,
            at_end=at_end,
            averages=self.averages,
            rates=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            kept=tuple(map(plain_state, self.kept)),
        )

    def come_to(self, position: Position) -> None:
        """Goes on inside an epoch, to whose beginning it has gone, where the others are."""
        self.averages = position.averages
        self._take(position.kept, position.rates)

    def go_to(self, mark: Mark) -> None:
        """Goes on where the others were at a mark, but for the steps that this worker has taken."""
        self.averages = mark.averages
        for shard, epoch in zip(self._shards, mark.shards, strict=False):
            if shard is not None:
                shard.epoch = epoch
        not_made = len(mark.shards) - len(self._shards)
        self._shards += [None] * not_made  # nor will this loop make them
        self._take(mark.kept, mark.rates)

    def _take(self, states: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
        assert self.optimizer is not None, "a loop has something to train"
        for kept, state in zip(self.kept, states, strict=True):
            take_state(kept, state)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
