"""What a worker in a user's own loop needs of the leader: the leader itself, or its stand-in over messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from polyrhythm.errors import PeerLost
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.regrouping.regroup import FormationSource, Regroup
from polyrhythm.roles.replica import Replica


class LoopCoordinator(Protocol):
    """Lets a worker take part in the run; implemented by `LoopLeader` and `LoopMember`.

    Attributes:
        reform: regroups with whoever is there, between two steps; set where workers regroup.
        regroup: of this worker, where workers regroup.
    """

    reform: Callable[[], None]
    regroup: Regroup | None

    @property
    def formations(self) -> FormationSource:
        """How this worker gets the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits for others."""

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, if the lost rank led and the run survives that; gives whether it does."""

    def introduce(self, replica: Replica) -> None:
        """Makes ready what a new leader would need of this worker."""

    def read(self) -> None:
        """Handles the messages that have arrived, without waiting."""

    def attend(self) -> None:
        """Handles the messages that have arrived while this worker waits for others; regroups if they do."""

    def took(self, taken: int, of: int) -> None:
        """Notes that this worker has taken `taken` of the `of` batches of its share of an epoch."""

    def leave(self, state: WorkerState, replica: Replica) -> Counter[int]:
        """Ends this worker's part; returns when the replica holds the run's final model.

        Returns:
            On the leader, how many gradients servers have applied at which staleness.
        """
