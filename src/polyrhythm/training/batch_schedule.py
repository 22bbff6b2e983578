"""What every batch schedule has in common: batches may grow, in place of a learning rate that falls.

Papers: A. Devarakonda, M. Naumov, M. Garland, "AdaBatch: adaptive batch sizes for training deep neural networks",
2017, arXiv:1712.02029; S. Smith, P. Kindermans, C. Ying, Q. Le, "Don't decay the learning rate, increase the batch
size", ICLR 2018, arXiv:1711.00489.

    lr(epoch) / batch(epoch)      is what a plan holds on to: batch * k does what lr / k would do

Every epoch still sees every image once, in fewer steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from polyrhythm.specs import Config


class BatchSchedule(Config, ABC):
    """A batch schedule's keys; `factor` is the schedule."""

    @abstractmethod
    def factor(self, epoch: int, epochs: int) -> int:
        """Gives what the first epoch's batch size is multiplied by.

        Args:
            epoch: from 0.
            epochs: of the run.
        """
