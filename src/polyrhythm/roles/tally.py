"""What a worker has done since it last said so."""

from __future__ import annotations

from polyrhythm.communication.clock import Clock
from polyrhythm.events import WorkerProgress

REPORT_EVERY_S = 0.5


class Tally:
    """Adds up steps, images, loss and waiting, and turns them into events now and then.

    Args:
        worker: the worker's index.
        clock: the worker's.

    Attributes:
        images: seen since the tally was made.
        steps: taken since then.
        loss_sum: sum over those of `loss * images` in the epoch under way, and its images.
    """

    def __init__(self, worker: int, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock
        self._started_at = self._said_at = clock.now()
        self.steps = 0
        self._said_steps = 0
        self._said_images = 0
        self._loss = 0.0
        self._wait_s = 0.0
        self.images = 0
        self._images_before_epoch = 0
        self.epoch_loss = 0.0

    @property
    def epoch_images(self) -> int:
        """Seen in the epoch under way."""
        return self.images - self._images_before_epoch

    @property
    def due(self) -> bool:
        """Whether it is time to say something."""
        return self._clock.now() - self._said_at >= REPORT_EVERY_S

    def begin(self, elapsed_s: float = 0.0) -> None:
        """Training starts now, on all ranks at about the same moment: event times count from here.

        Args:
            elapsed_s: for how long the others have been training.
        """
        self._said_at = self._clock.now()
        self._started_at = self._said_at - elapsed_s

    def begin_epoch(self) -> None:
        """Starts the epoch's mean loss anew."""
        self._images_before_epoch = self.images
        self.epoch_loss = 0.0

    def add(self, images: int, loss: float, wait_s: float) -> None:
        """Adds a step: its images, their mean loss, and the seconds in which the worker waited for others."""
        self.steps += 1
        self.images += images
        losses = loss * images
        self._loss += losses
        self.epoch_loss += losses
        self._wait_s += wait_s

    def say(self, epoch: int, step: int, learning_rate: float) -> WorkerProgress:
        """Gives what has been added since the last call, and starts anew."""
        now = self._clock.now()
        images = self.images - self._said_images
        event = WorkerProgress(
            time_s=now - self._started_at,
            worker=self._worker,
            epoch=epoch,
            step=step,
            steps=self.steps - self._said_steps,
            images=images,
            loss=self._loss / max(1, images),
            learning_rate=learning_rate,
            wait_s=self._wait_s,
        )
        self._said_at = now
        self._said_steps, self._said_images = self.steps, self.images
        self._loss, self._wait_s = 0.0, 0.0
        return event
