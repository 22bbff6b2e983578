"""One vector: what all workers share is the sum of all their updates, each whole.

w = 0 - sum over all steps of all workers of their gradients      steps of rate 1, exact numbers
"""

from __future__ import annotations

from collections import Counter

import torch

from polyrhythm.strategies.invariant import Conditions, Ended, Invariant, Stepped, Violation


class OneVector(Invariant):
    """No update is lost, torn or doubled.

    Args:
        conditions: with gradients that are known.
    """

    def __init__(self, conditions: Conditions) -> None:
        assert conditions.gradient is not None, "updates are checked that are known"
        self._gradient = conditions.gradient
        self._workers = conditions.cast.workers
        self._sum = torch.zeros(conditions.numbers)
        self._steps: Counter[int] = Counter()

    def stepped(self, event: Stepped) -> None:
        """Adds an update, and looks."""
        self._sum -= self._gradient(self._workers.index(event.rank), event.step)
        self._steps[event.rank] += 1
        wrong = int((self._sum != event.vector.to(self._sum.dtype)).sum())
        if wrong:
            raise Violation(
                f"the shared vector after step {event.step}",
                rank=event.rank,
                time_s=event.time_s,
                expected=f"the sum of {self._steps.total()} updates",
                found=f"{wrong} of {len(self._sum)} numbers wrong",
            )

    def ended(self, event: Ended) -> None:
        """All steps of all who have left were done, each once."""
        for rank in event.survivors:
            if self._steps[rank] != event.steps:
                raise Violation(
                    f"updates of rank {rank} at the end",
                    rank=rank,
                    time_s=event.time_s,
                    expected=event.steps,
                    found=self._steps[rank],
                )
