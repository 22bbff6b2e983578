"""How long a run is: what a schedule needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunLength:
    """A run's length and width.

    Attributes:
        steps_per_epoch: steps that every worker takes in an epoch.
        epochs: epochs to train.
        global_batch: images that all workers together look at for one step of each.
    """

    steps_per_epoch: int
    epochs: int
    global_batch: int

    @property
    def total_steps(self) -> int:
        """Steps that every worker takes in the whole run."""
        return self.steps_per_epoch * self.epochs
