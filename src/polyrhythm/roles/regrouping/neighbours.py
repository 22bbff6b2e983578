"""Who goes in step with whom where groups regroup apart: what a leader that waits must know of a loss."""

from __future__ import annotations

from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.cast import Cast
from polyrhythm.strategies.strategy import Strategy


class Neighbours:
    """The groups of a run.

    Args:
        strategy: of the run; where it does not regroup apart, each worker is a group of its own.
        cast: who does what.
    """

    def __init__(self, strategy: Strategy, cast: Cast) -> None:
        groups = strategy.contributors(cast).values() if strategy.regroups_apart(len(cast.workers)) else ()
        self._group_of = {worker: group for group in groups for worker in group}

    def beside_leader(self, worker: int) -> bool:
        """Whether a worker, given by its index, is in worker 0's group, which regroups with it."""
        return LEADER in self._group_of.get(worker, ())

    def held_up_by(self, worker: int) -> tuple[int, ...]:
        """Gives the workers that may fall behind worker 0 when one, given by its index, is lost."""
        return () if self.beside_leader(worker) else self._group_of.get(worker, ())
