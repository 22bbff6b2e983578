"""Local models: each is what its worker's own gradients make of the last mean, and each mean is of those that count.

w_i(s) = w_i(s-1) - g_i(s)                          between two meetings
w_i(s) = mean over members j of w_j(s-1) - g_j(s)   at a meeting; who came during the round brings nothing, unless
                                                    nobody else is left
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from polyrhythm.strategies.invariant import Conditions, Invariant, Stepped, Violation

_NEVER = -1


@dataclass
class _Model:
    """What is known of one worker: its vector after step `at`, and whether that counts in a mean."""

    vector: Tensor
    incarnation: int = 0
    at: int = _NEVER
    counts: bool = True


class LocalModels(Invariant):
    """No update is lost or doubled, in a round or by a mean.

    Args:
        conditions: with known gradients; without, nothing is checked.
        meet: tells, from a step's number, whether all workers have met after it.
    """

    def __init__(self, conditions: Conditions, meet: Callable[[int], bool]) -> None:
        self._gradient = conditions.gradient
        self._workers = conditions.cast.workers
        self._meet = meet
        zeros = torch.zeros(conditions.numbers if self._gradient else 0)
        self._models = {rank: _Model(zeros) for rank in self._workers}
        self._met = _NEVER
        self._outcome = self._before = zeros
        self._brought: dict[tuple[int, int], Tensor] = {}

    def stepped(self, event: Stepped) -> None:
        """Compares with what the worker should hold."""
        if self._gradient is None:
            return
        model = self._models[event.rank]
        if event.incarnation != model.incarnation:
            model = self._came(event)
        elif model.at < self._met < event.step:  # the mean broke for this worker, and was handed on to it
            model.vector, model.at, model.counts = self._outcome, self._met, True
        if self._meet(event.step):
            self._check_mean(event)
            model.counts = True
        elif model.at == event.step - 1:
            self._compare(event, [self._stepped_on(model.vector, event.rank, event.step)])
        model.vector, model.at = event.vector.clone(), event.step

    def _came(self, event: Stepped) -> _Model:
        """Enters a successor: it holds the last mean if a round begins, else another worker's model."""
        first = self._met == event.step - 1 and not self._meet(event.step)
        model = _Model(self._outcome, event.incarnation, event.step - 1 if first else _NEVER, first)
        self._models[event.rank] = model
        return model

    def _check_mean(self, event: Stepped) -> None:
        if event.step > self._met:
            self._met, self._before = event.step, self._outcome
            self._brought = {
                (rank, model.incarnation): self._stepped_on(model.vector, rank, event.step)
                for rank, model in self._models.items()
                if model.counts and model.at == event.step - 1 and (event.step == 0 or model.at > _NEVER)
            }
        there = event.regrouped or dict.fromkeys(self._workers, 0)
        brought = [self._brought[member] for member in there.items() if member in self._brought]
        if event.regrouped is not None and not brought:  # all have come since, with models of who is lost
            self._outcome = event.vector.clone()
            return
        wholes = [
            brought + list(some)
            for many in range(len(there) if event.regrouped is not None else 1)
            for some in combinations(self._doubtful(event.step, there), many)
        ]
        self._compare(event, [torch.stack(whole).sum(0) / len(whole) for whole in wholes if whole])
        self._outcome = event.vector.clone()

    def _doubtful(self, step: int, there: dict[int, int]) -> list[Tensor]:
        """Gives what may be in a mean or not.

        Who takes its first step at a meeting counts if it came before the others took theirs. Who is replaced by
        now may have been there, or was lost before.
        """
        new = [member for member in there.items() if member not in self._brought]
        early = [self._stepped_on(self._before, rank, step) for rank, _ in new]
        replaced = [
            vector
            for (rank, incarnation), vector in self._brought.items()
            if there.get(rank, incarnation) != incarnation
        ]
        return early + replaced

    def _stepped_on(self, vector: Tensor, rank: int, step: int) -> Tensor:
        assert self._gradient is not None, "asked only where gradients are known"
        return vector - self._gradient(self._workers.index(rank), step)

    def _compare(self, event: Stepped, possible: list[Tensor]) -> None:
        vector = event.vector.to(self._outcome.dtype)
        wrong = [int((expected != vector).sum()) for expected in possible]
        if min(wrong, default=1):
            raise Violation(
                f"parameters after step {event.step}",
                rank=event.rank,
                time_s=event.time_s,
                expected="the sum of all workers' mean gradients"
                if self._meet(event.step)
                else "its own step",
                found=f"{min(wrong, default=len(vector))} of {len(vector)} numbers wrong",
            )
