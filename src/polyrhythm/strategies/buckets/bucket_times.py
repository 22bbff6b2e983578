"""When a step uses the parameters of each bucket, and when it has the gradients."""

from __future__ import annotations

from polyrhythm.communication.clock import Clock


class BucketTimes:
    """Notes the times of one worker's steps, as if it had never waited for a transfer.

    Args:
        clock: the worker's.
        buckets: how many there are.

    Attributes:
        use_s: of each bucket, seconds from the first use in the forward pass of the latest step.
        ready_s: of each bucket, seconds from when the first was ready in the backward pass of the latest step; they
            never fall.
    """

    def __init__(self, clock: Clock, buckets: int) -> None:
        self.use_s = [0.0] * buckets
        self.ready_s = [0.0] * buckets
        self._clock = clock
        self._first_use: float | None = None
        self._first_ready = 0.0
        self._waited_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._first_use, self._waited_s = None, 0.0

    def use(self, bucket: int) -> float:
        """A bucket is about to be used; gives the time."""
        now = self._clock.now()
        if self._first_use is None:
            self._first_use = now
        self.use_s[bucket] = now - self._first_use - self._waited_s
        return now

    def waited_since(self, began: float) -> None:
        """The step has waited since a time."""
        self._waited_s += self._clock.now() - began

    def ready(self, bucket: int) -> None:
        """A bucket's gradients are ready; buckets come in order."""
        now = self._clock.now()
        if bucket == 0:
            self._first_ready = now
        self.ready_s[bucket] = now - self._first_ready
