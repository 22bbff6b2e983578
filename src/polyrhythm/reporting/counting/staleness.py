"""Staleness, counted."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Staleness:
    """How many gradients were applied at which staleness (versions between read and apply; fresh = 0).

    Attributes:
        counts: gradients by staleness.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, counts: Mapping[int, int]) -> None:
        """Adds more gradients, counted by staleness."""
        self.counts.update(counts)

    @classmethod
    def merged(cls, parts: Iterable[Staleness]) -> Staleness:
        """Puts the counts of several servers into one."""
        whole = cls()
        for part in parts:
            whole.add(part.counts)
        return whole

    @property
    def histogram(self) -> dict[int, int]:
        """The counts in rising order of staleness."""
        return dict(sorted(self.counts.items()))

    @property
    def mean(self) -> float:
        """The mean over all gradients; not a number if there are none."""
        gradients = self.counts.total()
        return (
            sum(staleness * count for staleness, count in self.counts.items()) / gradients
            if gradients
            else math.nan
        )

    @property
    def max(self) -> int:
        """The largest that occurred; 0 if there were no gradients."""
        return max((staleness for staleness, count in self.counts.items() if count), default=0)
