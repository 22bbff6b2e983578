"""Batches of one size throughout."""

from __future__ import annotations

from polyrhythm.training.schedule import BatchSchedule


class Constant(BatchSchedule):
    """Keys of the constant batch schedule: none."""

    def factor(self, epoch: int, epochs: int) -> int:
        return 1
