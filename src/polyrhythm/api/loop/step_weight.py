"""How much the gradient of a step counts: as much as the batches that were handed out for it."""

from __future__ import annotations


class StepWeight:
    """Hears of every batch that a shard hands out, and of every step.

    Shards may be nested (a validation pass in the middle of a training epoch), so each iteration keeps a list of its
    own, and the innermost one is in use.
    """

    def __init__(self) -> None:
        self._weights: list[float] = []

    def use(self, weights: list[float]) -> list[float]:
        """Takes the weights of another iteration's batches since its last step; gives those in use before."""
        before, self._weights = self._weights, weights
        return before

    def take(self) -> float:
        """Gives the weight of a step that is due now, in units of a full batch, and forgets its batches.

        With several backward passes a step, it is the mean of their batches' weights; without any shard it is 1.
        """
        weight = sum(self._weights) / len(self._weights) if self._weights else 1.0
        self._weights.clear()
        return weight
