"""How computing passes time: by itself in reality, as drawn in simulation.

    real       forward ──▶ backward, whose hooks announce each bucket ──▶ …
    simulated  forward, sleep ──▶ whole backward, then for each bucket: sleep its share, announce it ──▶ …

A simulated rank must not switch to another inside autograd, so its backward pass runs whole and is then played.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from polyrhythm.communication.clock import Clock

FORWARD_SHARE = 1 / 3
"""A backward pass takes about twice as long as its forward pass: one product for the weights, one for the inputs."""


class Pace(Protocol):
    """Passes the time of a step.

    Attributes:
        announces_in_backward: whether gradient hooks must announce buckets while autograd runs.
    """

    @property
    def announces_in_backward(self) -> bool:
        """Whether gradient hooks must announce buckets while autograd runs."""

    def forward(self) -> None:
        """A forward pass has been computed."""

    def backward(self, shares: Sequence[float], announce: Callable[[int], None]) -> None:
        """A backward pass has been computed.

        Args:
            shares: of the pass's time, a bucket each; they add up to 1.
            announce: to be called with each bucket in order, if hooks have not done so.
        """


class LivePace:
    """Time passes by itself."""

    announces_in_backward = True

    def forward(self) -> None:
        """Nothing to do."""

    def backward(self, shares: Sequence[float], announce: Callable[[int], None]) -> None:
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
    announces_in_backward = False
    _step_s: float = 0.0

    def forward(self) -> None:
        """Sleeps for a third of the step."""
        self._step_s = self.draw_s()
        self.clock.sleep(self._step_s * FORWARD_SHARE)

    def backward(self, shares: Sequence[float], announce: Callable[[int], None]) -> None:
        """Sleeps for the rest, announcing each bucket after its share."""
        for bucket, share in enumerate(shares):
            self.clock.sleep(self._step_s * (1 - FORWARD_SHARE) * share)
            announce(bucket)
