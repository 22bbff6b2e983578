"""What every size schedule has in common: the size of training pictures as a function of the epoch alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

from polyrhythm.specs import Config


class SizeSchedule(Config, ABC):
    """A size schedule's keys; `side` is the schedule."""

    @abstractmethod
    def side(self, epoch: int, epochs: int, image_size: int) -> int:
        """Gives the pixels a side of an epoch's training pictures, at most the image size.

        Args:
            epoch: from 0.
            epochs: of the run.
            image_size: of the pictures that the network is tested on.
        """
