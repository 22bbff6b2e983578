"""How computing passes time: by itself in reality, as drawn in simulation.

    real       forward, whose hooks announce each use ──▶ backward, whose hooks announce each bucket ──▶ …
    simulated  for each bucket: announce its use, sleep ──▶ whole forward, whole backward
               ──▶ for each bucket: sleep, announce it ──▶ …

A simulated rank must not switch to another in the middle of a forward or backward pass: they share autograd, the
random generator and autocast. So its uses are played before the forward pass, and its buckets after the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from polyrhythm.communication.clock import Clock

FORWARD_SHARE = 1 / 3
"""A backward pass takes twice as long as its forward pass: one product for the weights, one for the inputs."""

Announce = Callable[[int], None]


class Pace(Protocol):
    """Passes the time of a step."""

    @property
    def live(self) -> bool:
        """Whether hooks announce uses and buckets while a pass runs."""

    def forward(self, shares: Sequence[float], use: Announce, work: float = 1.0) -> None:
        """A forward pass is about to be computed.

        Args:
            shares: of the pass's time, a bucket each, in the order of the backward pass; they add up to 1. Empty if
                nobody listens.
            use: to be called with each bucket before it is used, if hooks will not do so.
            work: of the step, in units of what the clock's step times are those of: more where batches have grown.
        """

    def backward(self, shares: Sequence[float], ready: Announce) -> None:
        """A backward pass has been computed.

        Args:
            shares: as given to `forward`.
            ready: to be called with each bucket in order, if hooks have not done so.
        """


class LivePace:
    """Time passes by itself."""

    live = True

    def forward(self, shares: Sequence[float], use: Announce, work: float = 1.0) -> None:
        """Nothing to do: hooks will announce the uses."""

    def backward(self, shares: Sequence[float], ready: Announce) -> None:
        """Nothing to do: hooks have announced the buckets."""


@dataclass
class DrawnPace:
    """Time passes on a virtual clock.

    Attributes:
        clock: the simulation's.
        draw_s: gives the compute seconds of the next step.
    """

    clock: Clock
    draw_s: Callable[[], float]
    live = False
    _step_s: float = 0.0

    def forward(self, shares: Sequence[float], use: Announce, work: float = 1.0) -> None:
        """Sleeps for a third of the step, the first layers' share first; not yet, if nobody listens."""
        # A call of what an object holds, written as one of its methods, is looked up anew.
        draw_s = self.draw_s
        self._step_s = draw_s() * work
        if shares:
            for bucket in reversed(range(len(shares))):
                use(bucket)
                self.clock.sleep(self._step_s * FORWARD_SHARE * shares[bucket])

    def backward(self, shares: Sequence[float], ready: Announce) -> None:
        """Sleeps for the rest, announcing each bucket after its share."""
        if not shares:
            self.clock.sleep(self._step_s)
            return
        for bucket, share in enumerate(shares):
            self.clock.sleep(self._step_s * (1 - FORWARD_SHARE) * share)
            ready(bucket)
