"""The numbers of elastic averaging, and for which of them it is stable.

On f(x) = x^2 / 2, with learning rate h, N workers and beta = N alpha, the iteration contracts if 0 <= h <= 2 and

    asynchronous, one after the other    alpha <= (4 - 2 h) / (4 - h)
    synchronous                          alpha <= 2 (2 - h) / (2 + N (2 - h))
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElasticRule:
    """How far, how often and when workers and the centre pull at each other.

    Attributes:
        alpha: share of the difference that each side moves by.
        tau: steps of a worker between two exchanges.
        together: whether all workers exchange at the same time.
    """

    alpha: float
    tau: int
    together: bool

    def due(self, step: int) -> bool:
        """Whether a worker exchanges in its step of this number."""
        return step % self.tau == 0

    def largest_stable_alpha(self, workers: int, learning_rate: float) -> float:
        """Gives the largest alpha that is stable where the loss has curvature 1; at most 0 if none is."""
        left = 2 - learning_rate
        if self.together:
            return 2 * left / (2 + workers * left) if left > 0 else 0.0
        return 2 * left / (4 - learning_rate) if left > 0 else 0.0

    def caution(self, workers: int, learning_rate: float) -> str:
        """Says in one line what is wrong where alpha is out of the stable range; empty if nothing is."""
        bound = self.largest_stable_alpha(workers, learning_rate)
        if self.alpha <= bound:
            return ""
        way = "synchronous" if self.together else "asynchronous"
        return (
            f"alpha={self.alpha:g} is above {bound:.4g}, up to which {way} elastic averaging of {workers} workers is "
            f"stable at learning rate {learning_rate:g} (on a quadratic of curvature 1): lower alpha or beta"
        )
