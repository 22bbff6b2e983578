"""When a site tells others what it has changed, and when it waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SiteRule:
    """When a site tells others, and when it waits for them.

    Attributes:
        threshold: share of a number's value, above which its change is significant in the first round; in round t,
            this divided by the root of t.
        lag: how many rounds the slowest site may be behind.
        barrier: share of a shard's bytes; a packet with more is announced, and readers wait for it.
    """

    threshold: float
    lag: int
    barrier: float = 1.0

    def is_large(self, packet: Tensor | None, values: Tensor) -> bool:
        """Whether a packet is to be announced."""
        return packet is not None and len(packet) > self.barrier * len(values)

    def threshold_of(self, number: int) -> float:
        """Gives the threshold of a round, counted from 1."""
        return self.threshold / sqrt(number)
