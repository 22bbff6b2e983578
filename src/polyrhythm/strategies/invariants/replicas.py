"""Replicas: those that go in step hold the same bits after the same step; known gradients say which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from polyrhythm.strategies.invariant import Conditions, Invariant, Stepped, Violation


class Replicas(Invariant):
    """The members of a group agree.

    Where they regroup, a step that only lost members had finished is taken again by those who are left; nobody who
    has finished it goes on beside them.

    Args:
        conditions: with or without known gradients.
        groups: ranks of workers that go in step with each other.
        alone: whether a group's parameters are the sum of its own gradients only, so that they can be told beforehand.
    """

    def __init__(self, conditions: Conditions, groups: Sequence[Sequence[int]], *, alone: bool) -> None:
        self._group_of = {rank: number for number, group in enumerate(groups) for rank in group}
        self._groups = [tuple(group) for group in groups]
        self._workers = conditions.cast.workers
        self._gradient = conditions.gradient if alone else None
        self._latest: dict[int, Stepped] = {}
        self._finishers: dict[int, set[tuple[int, int]]] = {}
        zeros = torch.zeros(conditions.numbers if self._gradient else 0)
        self._sums = {number: zeros.clone() for number in range(len(groups))}
        self._sums_before = dict(self._sums)

    def stepped(self, event: Stepped) -> None:
        """Compares with whoever was first at this step."""
        number = self._group_of[event.rank]
        latest = self._latest.get(number)
        step, first = (-1, event.vector) if latest is None else (latest.step, latest.vector)
        if latest is not None and self._is_taken_again(event, latest, number):
            self._sums[number] = self._sums_before[number]
            step -= 1
        if event.step > step:
            self._latest[number] = replace(event, vector=event.vector.clone())
            self._finishers[number] = set()
            self._sums_before[number] = self._sums[number].clone()
            self._check_first(event, number, step)
        elif event.step < step or not torch.equal(first, event.vector):
            raise Violation(
                "a replica beside the others of its group",
                rank=event.rank,
                time_s=event.time_s,
                expected=f"step {step} and the same bits",
                found=f"step {event.step}, {int((first != event.vector).sum())} numbers differ",
            )
        self._finishers[number].add((event.rank, (event.regrouped or {}).get(event.rank, 0)))

    def _is_taken_again(self, event: Stepped, latest: Stepped, number: int) -> bool:
        """Whether this is the latest step, by a later formation to which none belongs who has finished it before."""
        if event.step != latest.step or event.regrouped in (None, latest.regrouped):
            return False
        return self._finishers[number].isdisjoint((event.regrouped or {}).items())

    def _check_first(self, event: Stepped, number: int, step: int) -> None:
        if self._gradient is None:
            return
        members = self._groups[number] if event.regrouped is None else tuple(event.regrouped)
        for missed in range(step + 1, event.step + 1):
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
