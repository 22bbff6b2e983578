"""The control plane: how a worker reaches the leader, or leads itself.

    worker 0   Leader   listens to all ranks, and does the run's duties: tests, saves, makes its figures
    others     Member   sends the leader messages, which wait while a lost leader is replaced

Every loop calls it alike: `enter` once, `begin` when training starts, `after_step` and `report` on the way,
`boundary` where states are handed in, `leave` last. Regrouping asks it for membership views.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from torch import Tensor

from polyrhythm.data.dealing import Begun
from polyrhythm.evaluation.evaluate import PartialEvaluation
from polyrhythm.events import Event
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.roles.control_messages import FinalModel, TakenBatches
from polyrhythm.roles.regroup import RegroupControl

EvaluatesPart = Callable[[], PartialEvaluation]
"""Tests the part of one of several workers that hold the same model."""


class Boundary(Enum):
    """Why a worker hands in its state between two steps."""

    ENTERED = "entered"
    """It has just come: as a successor, or from a checkpoint of the run's end."""
    EPOCH = "epoch"
    """An epoch is over."""
    STOP = "stop"
    """It stops early because a rank was asked to."""


@dataclass(frozen=True)
class Entry:
    """How a worker has come into the run.

    Attributes:
        restored: its state in the checkpoint from which the run goes on; None where there is none.
        elapsed_s: seconds since training started, where it is a successor.
        begun: what other numbers of workers did of epochs that are not over.
    """

    restored: WorkerState | None = None
    elapsed_s: float = 0.0
    begun: Begun = field(default_factory=Begun)


class ControlPlane(RegroupControl, Protocol):
    """What a worker's loop asks of the leader and reports to it: rank 0 has a `Leader`, all others a `Member`."""

    def enter(self) -> Entry:
        """Enter the run: fresh, from a checkpoint, or as a successor, of whom worker 0's takes over the lead.

        Raises:
            PeerLost: somebody is gone whom the run needs.
        """

    def begin(self, epoch: int) -> None:
        """Note that all replicas are equal and training starts, in this epoch."""

    def after_step(self) -> None:
        """Called after a step; never waits.

        Raises:
            Departed: this worker was asked to leave.
        """

    def report(self, fact: Event | TakenBatches) -> None:
        """Pass on what this worker has done lately."""

    def boundary(
        self,
        why: Boundary,
        record: WorkerState,
        epochs: int = 0,
        presented: Tensor | None = None,
        test: EvaluatesPart | None = None,
    ) -> None:
        """Hand in this worker's state between two steps; the leader tests and saves.

        Args:
            why: it is handed in.
            record: the state.
            epochs: that are over, where one has just come to its end.
            presented: `(size,)`, the model to be tested, where it is not this worker's own.
            test: tests this worker's part of what is tested then; None: the leader tests all of it.
        """

    def work_done(self, record: WorkerState) -> bool:
        """Return whether nothing is left for this worker to draw, which has found nothing more.

        The leader waits until all others have found so, too: what one of them leaves that is lost now is the leader's.

        Args:
            record: this worker's state.
        """

    def attend(self) -> bool:
        """Handle messages that have arrived while this worker waits elsewhere; return whether it must regroup."""

    def leave(self, record: WorkerState) -> FinalModel | None:
        """Hand in this worker's last state, and wait until the leader needs nothing more of it.

        Args:
            record: the state.

        Returns:
            The run's final model, where the leader hands it out.
        """
