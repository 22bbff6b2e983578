"""The control plane: how a worker reaches the coordinator, or coordinates itself.

    worker 0   Leader   receives from all ranks; tests, saves, and reports the run's results
    others     Member   sends messages to the coordinator, which wait while a failed one is replaced

The calls of a loop: `enter` once, `begin` when training starts, `after_step` and `report` during training,
`boundary` where states are collected, `leave` last. Regrouping uses it to request membership views.
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
from polyrhythm.roles.control_messages import FinalModel, StateDigests, TakenBatches
from polyrhythm.roles.regroup import RegroupControl

EvaluatesPart = Callable[[], PartialEvaluation]
"""Tests this worker's share of the test images, where several workers hold the same model."""


class Boundary(Enum):
    """The reason why a worker sends its state between two steps."""

    ENTERED = "entered"
    """The worker has just joined: as a replacement, or from a checkpoint of the run's end."""
    EPOCH = "epoch"
    """An epoch is over."""
    CHECKPOINT = "checkpoint"
    """A checkpoint is due inside an epoch."""
    STOP = "stop"
    """The worker stops early because a rank was asked to."""


@dataclass(frozen=True)
class Entry:
    """How a worker has entered the run.

    Attributes:
        restored: state in the checkpoint from which the run resumes; None if there is none.
        elapsed_s: seconds since training started, for a replacement.
        begun: progress of other numbers of workers in unfinished epochs.
    """

    restored: WorkerState | None = None
    elapsed_s: float = 0.0
    begun: Begun = field(default_factory=Begun)


class ControlPlane(RegroupControl, Protocol):
    """Requests and reports of a worker's loop to the coordinator: rank 0 has a `Leader`, all others a `Member`."""

    def enter(self) -> Entry:
        """Enter the run: fresh, from a checkpoint, or as a replacement, which coordinates if it replaces worker 0.

        Raises:
            PeerLost: a rank that the run needs has failed.
        """

    def begin(self, epoch: int) -> None:
        """Note that all replicas are equal and training starts in this epoch."""

    def after_step(self) -> None:
        """Called after a step; never blocks.

        Raises:
            RankExited: this worker was asked to leave.
        """

    def state_due(self, done: int, epochs: int = 0) -> bool:
        """Return whether this worker sends its state now, for a checkpoint; never blocks.

        Args:
            done: steps done by this worker; called first with those at which it begins.
            epochs: epochs done by its loop; 0 where an epoch's end is a boundary of its own.
        """

    def report(self, fact: Event | TakenBatches | StateDigests, *, before_state: bool = False) -> None:
        """Report this worker's recent progress.

        Args:
            fact: the fact to report.
            before_state: whether the state at an epoch's end follows, with which the report may wait.
        """

    def boundary(
        self,
        why: Boundary,
        record: WorkerState,
        epochs: int = 0,
        presented: Tensor | None = None,
        test: EvaluatesPart | None = None,
        *,
        together: bool = False,
    ) -> None:
        """Send this worker's state between two steps; the coordinator tests and saves.

        Args:
            why: reason for sending it.
            record: state of the worker.
            epochs: number of finished epochs, where one has just finished.
            presented: `(size,)`, the model to be tested, where it is not this worker's own.
            test: test of this worker's share; None: the coordinator tests all images.
            together: whether all members of the view send their states after this step.
        """

    def work_done(self, record: WorkerState) -> bool:
        """Return whether no batches remain for this worker, which has found none.

        The coordinator waits until all others have found none either: it takes over the unfinished batches of
        a worker that fails now.

        Args:
            record: state of this worker.
        """

    def attend(self) -> bool:
        """Handle messages that arrive while this worker waits elsewhere; return whether it must regroup."""

    def leave(self, record: WorkerState) -> FinalModel | None:
        """Send this worker's last state, and wait until the coordinator needs nothing more of it.

        Args:
            record: state of the worker.

        Returns:
            The run's final model, where the coordinator sends it.
        """
