"""A collective that a member has started, for whoever moves its bytes and whoever waits for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from polyrhythm.errors import PolyrhythmError


class Order:
    """What is to be done, and whether it has been.

    Args:
        vector: `(n,)`, contiguous, at least one number; it gets the sum.
        contributors: members whose vectors count.

    Attributes:
        error: what broke it.
        awaited: whether somebody waits for it who does not move its bytes.
    """

    def __init__(self, vector: Tensor, contributors: Sequence[int]) -> None:
        self.vector = vector
        self.contributors = contributors
        self.error: PolyrhythmError | None = None
        self.awaited = False
        self._ended = threading.Event()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def end(self, error: PolyrhythmError | None = None) -> None:
        """Notes that it has ended, and wakes who waits."""
        self.error = error
        self._ended.set()

    def wait(self) -> None:
        """Returns when it has ended."""
        self._ended.wait()
