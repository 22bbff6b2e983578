"""Images of one size throughout."""

from __future__ import annotations

from polyrhythm.training.schedule import SizeSchedule


class Constant(SizeSchedule):
    """Keys of the constant size schedule: none."""

    def side(self, epoch: int, epochs: int, image_size: int) -> int:
        return image_size
