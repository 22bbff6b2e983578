"""One vector: what all workers share is the sum of all their updates, each whole.

w = 0 - sum over all steps of all workers of their gradients      steps of rate 1, exact numbers
"""

from __future__ import annotations

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
        self._steps = 0

    def stepped(self, event: Stepped) -> None:
        """Adds an update, and looks."""
        self._sum -= self._gradient(self._workers.index(event.rank), event.step)
        self._steps += 1
        wrong = int((self._sum != event.vector.to(self._sum.dtype)).sum())
        if wrong:
            raise Violation(
                f"the shared vector after step {event.step}",
                rank=event.rank,
                time_s=event.time_s,
                expected=f"the sum of {self._steps} updates",
                found=f"{wrong} of {len(self._sum)} numbers wrong",
            )

    def ended(self, event: Ended) -> None:
        """All steps of all workers were done."""
        if self._steps != event.steps * len(self._workers):
            raise Violation(
                "updates at the end",
                rank=event.survivors[0],
                time_s=event.time_s,
                expected=event.steps * len(self._workers),
                found=self._steps,
            )
