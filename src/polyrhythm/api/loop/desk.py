"""Where a worker in a loop of a user's own hears of others: at the leader's own desk, or by message."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from torch import Tensor

from polyrhythm.errors import PeerLost
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.regrouping.regroup import Regroup, Side
from polyrhythm.roles.replica import Replica


class LoopDesk(Protocol):
    """One worker's."""

    @property
    def side(self) -> Side:
        """How this worker comes to the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for others here."""

    def bears(self, loss: PeerLost) -> bool:
        """Never: without worker 0 the loops end."""

    def heed(self) -> None:
        """Takes what has arrived, without waiting."""

    def mean(self, number: int, total: Tensor) -> Tensor:
        """Adds up what the workers that are there bring, in their order; returns when all have brought it.

        Args:
            number: of the sum, from 0; what has been added up before is given again.
            total: of this worker.
        """

    def took(self, taken: int, of: int) -> None:
        """This worker has taken so many batches of its share of an epoch."""

    def leave(self, state: WorkerState, replica: Replica) -> Counter[int]:
        """This worker is through; returns when the replica holds the run's final model.

        Returns:
            On the leader, how many gradients servers have applied at which staleness.
        """
