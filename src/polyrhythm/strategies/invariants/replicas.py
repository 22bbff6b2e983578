"""Replicas: those that go in step hold the same bits after the same step; known gradients say which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyrhythm.strategies.invariant import Conditions, Invariant, Stepped, Violation


class Replicas(Invariant):
    """The members of a group agree.

    Args:
        conditions: with or without known gradients.
        groups: ranks of workers that go in step with each other.
        alone: whether a group's parameters are the sum of its own gradients only, so that they can be told beforehand.
        behind: how many of the latest steps' gradients are still on their way when a step is over.
    """

    def __init__(
        self, conditions: Conditions, groups: Sequence[Sequence[int]], *, alone: bool, behind: int = 0
    ) -> None:
        self._behind = behind
        self._group_of = {rank: number for number, group in enumerate(groups) for rank in group}
        self._groups = [tuple(group) for group in groups]
        self._workers = conditions.cast.workers
        self._gradient = conditions.gradient if alone else None
        self._latest: dict[int, tuple[int, Tensor]] = {}
        self._sums = {
            number: torch.zeros(conditions.numbers if self._gradient else 0) for number in range(len(groups))
        }

    def stepped(self, event: Stepped) -> None:
        """Compares with whoever was first at this step."""
        number = self._group_of[event.rank]
        step, first = self._latest.get(number, (-1, event.vector))
        if event.step > step:
            self._latest[number] = event.step, event.vector.clone()
            self._check_first(event, number, step)
        elif event.step < step or not torch.equal(first, event.vector):
            raise Violation(
                "a replica beside the others of its group",
                rank=event.rank,
                time_s=event.time_s,
                expected=f"step {step} and the same bits",
                found=f"step {event.step}, {int((first != event.vector).sum())} numbers differ",
            )

    def _check_first(self, event: Stepped, number: int, step: int) -> None:
        if self._gradient is None:
            return
        members = self._groups[number]
        for missed in range(max(0, step + 1 - self._behind), event.step + 1 - self._behind):
            for rank in members:
                self._sums[number] -= self._gradient(self._workers.index(rank), missed) / len(members)
        wrong = int((self._sums[number] != event.vector.to(self._sums[number].dtype)).sum())
        if wrong:
            raise Violation(
                f"parameters after step {event.step}",
                rank=event.rank,
                time_s=event.time_s,
                expected="the sum of all workers' mean gradients",
                found=f"{wrong} of {len(event.vector)} numbers wrong",
            )
