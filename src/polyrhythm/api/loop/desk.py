"""Where a worker in a loop of a user's own hears of others: at the leader's own desk, or by message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from polyrhythm.errors import PeerLost
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.regrouping.regroup import Regroup, Side
from polyrhythm.roles.replica import Replica


class LoopDesk(Protocol):
    """One worker's.

    Attributes:
        mend: goes on with whoever is there, between two steps; set where workers regroup.
        regroup: of this worker, where workers regroup.
    """

    mend: Callable[[], None]
    regroup: Regroup | None

    @property
    def side(self) -> Side:
        """How this worker comes to the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for others."""

    def bears(self, loss: PeerLost) -> bool:
        """Waits until another leads, if it is the leader that is lost, and that is borne; gives whether it is."""

    def introduce(self, replica: Replica) -> None:
        """Has what another leader would need of this worker from now on."""

    def heed(self) -> None:
        """Takes what has arrived, without waiting."""

    def attend(self) -> None:
        """Takes what has arrived while this worker waits for others; regroups if they do."""

    def took(self, taken: int, of: int) -> None:
        """This worker has taken so many batches of its share of an epoch."""

    def leave(self, state: WorkerState, replica: Replica) -> Counter[int]:
        """This worker is through; returns when the replica holds the run's final model.

        Returns:
            On the leader, how many gradients servers have applied at which staleness.
        """
