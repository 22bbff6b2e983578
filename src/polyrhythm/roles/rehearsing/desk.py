"""Where the workers of a rehearsal report: to the leader, who makes the run's figures of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from polyrhythm.errors import PeerLost
from polyrhythm.events import WorkerProgress, WorkerTimings
from polyrhythm.roles.keeping.worker_state import Account
from polyrhythm.roles.regrouping.regroup import Regroup, Side
from polyrhythm.roles.rehearsing.leading_desk import LeadingDesk
from polyrhythm.roles.rehearsing.mailing_desk import MailingDesk
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.world import World


class RehearsalDesk(Protocol):
    """What a worker has to say."""

    @property
    def side(self) -> Side:
        """How this worker comes to the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for others here."""

    def bears(self, loss: PeerLost) -> bool:
        """Waits until another leads, if it is the leader that is lost, and that is borne; gives whether it is."""

    def ask_to_enter(self) -> None:
        """It is a successor among workers that go in step, or leads them."""

    def begin(self, step: int) -> None:
        """It starts, at this step."""

    def progress(self, event: WorkerProgress | WorkerTimings) -> None:
        """It has done some steps."""

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        """It has left; `let_go` lets the servers go, which is the leader's to do once all have."""


def rehearsal_desk(rehearsal: Rehearsal, world: World) -> RehearsalDesk:
    """Gives a worker its desk."""
    return LeadingDesk(rehearsal, world) if world.leads else MailingDesk(rehearsal, world)
