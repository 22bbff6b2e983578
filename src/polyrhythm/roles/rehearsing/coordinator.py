"""What a worker of a rehearsal asks of the leader and reports to it; the leader makes the run's figures of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from polyrhythm.errors import PeerLost
from polyrhythm.events import WorkerProgress, WorkerTimings
from polyrhythm.roles.keeping.worker_state import Account
from polyrhythm.roles.regrouping.regroup import FormationSource, Regroup
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.rehearsing.rehearsal_leader import RehearsalLeader
from polyrhythm.roles.rehearsing.remote_rehearsal_leader import RemoteRehearsalLeader
from polyrhythm.roles.world import World


class RehearsalCoordinator(Protocol):
    """As `roles.worker.Coordinator`, without models: `RehearsalLeader`, or a stand-in that sends it messages."""

    @property
    def formations(self) -> FormationSource:
        """How this worker gets the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits here for others."""

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, if the lost rank led and the run survives that; gives whether it does."""

    def ask_to_enter(self) -> None:
        """Asks, as a successor, to be let in where workers go in step; on rank 0, takes the lead over."""

    def begin(self, step: int) -> None:
        """Called when this worker starts, at this step."""

    def progress(self, event: WorkerProgress | WorkerTimings) -> None:
        """Passes a report of the latest steps on."""

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        """Called when this worker has left.

        Args:
            account: what it has done.
            let_go: lets the servers go; called by the leader once all workers have left.
        """


def rehearsal_coordinator(rehearsal: Rehearsal, world: World) -> RehearsalCoordinator:
    """Makes a worker's coordinator."""
    return RehearsalLeader(rehearsal, world) if world.leads else RemoteRehearsalLeader(rehearsal, world)
