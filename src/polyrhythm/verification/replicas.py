"""Workers that hold the same parameters: equal bits after equal steps, and every gradient in them exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polyrhythm.verification.invariant import Conditions, Ended, Invariant, Stepped, Violation


def differing(first: Tensor, second: Tensor) -> int:
    """Return how many numbers of two vectors differ; what has overflowed to no number at both places does not."""
    return int(((first != second) & ~(first.isnan() & second.isnan())).sum())


class Replicas(Invariant):
    """Members of a group hold the same bits after the same step; if gradients are known, the right ones.

    When a group regroups, a step that only lost members had finished is repeated by the survivors. No member that has
    finished it goes on beside them.

    Args:
        conditions: of the run.
        groups: ranks of workers that step together.
        alone: whether a group's parameters are the sum of its own gradients only, so that they can be predicted.
    """

    def __init__(self, conditions: Conditions, groups: Sequence[Sequence[int]], *, alone: bool) -> None:
        self._group_of = {rank: number for number, group in enumerate(groups) for rank in group}
        self._groups = [tuple(group) for group in groups]
        self._workers = conditions.roles.workers
        self._gradient = conditions.gradient if alone else None
        self._latest: dict[int, Stepped] = {}
        self._finishers: dict[int, set[tuple[int, int]]] = {}
        zeros = torch.zeros(conditions.numbers if self._gradient else 0)
        self._sums = {number: zeros.clone() for number in range(len(groups))}
        self._sums_before = dict(self._sums)

    def stepped(self, event: Stepped) -> None:
        """Compare with the first member of the group to have finished this step."""
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
        elif event.step < step or differing(first, event.vector):
            raise Violation(
                "a replica beside the others of its group",
                event.rank,
                event.time_s,
                expected=f"step {step} and the same bits",
                found=f"step {event.step}, {differing(first, event.vector)} numbers differ",
            )
        self._finishers[number].add((event.rank, (event.regrouped or {}).get(event.rank, 0)))

    def _is_taken_again(self, event: Stepped, latest: Stepped, number: int) -> bool:
        """Return whether a later view repeats the latest step, none of whose members had finished it."""
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
                event.rank,
                event.time_s,
                expected="the sum of all workers' mean gradients",
                found=f"{wrong} of {len(event.vector)} numbers wrong",
            )


_View = tuple[str | int | None, tuple[int, ...]]
"""A membership view and its members."""


@dataclass
class _Taken:
    """One step.

    Attributes:
        before: `(numbers,)`, with the updates of all steps before it.
        by_view: parameters after it, for each view that has taken it.
        finishers: rank and generation of every worker that has taken it.
    """

    before: Tensor
    by_view: dict[_View, Tensor] = field(default_factory=dict)
    finishers: set[tuple[int, int]] = field(default_factory=set)


class LateReplicas(Invariant):
    """Replicas are equal, while updates come up to a step late: each number gets each step's update once.

        after step s      a number has the updates of all steps before s; of step s too, if its worker is alone
                          or if the update had come before workers regrouped and repeated the step,
                          or where some numbers need not wait (`at_once`)

    Args:
        conditions: of the run; without known gradients, members are only compared with each other.
        at_once: whether a server may give its numbers at once, whose shard is of one bucket only.
        alike: whether all are given the same numbers at once; not where one who takes over from a lost server does.
    """

    def __init__(self, conditions: Conditions, *, at_once: bool = False, alike: bool = True) -> None:
        self._at_once, self._alike = at_once, alike
        self._workers = conditions.roles.workers
        self._gradient = conditions.gradient
        nothing = torch.zeros(conditions.numbers if self._gradient else 0)
        self._steps = [_Taken(nothing)]

    def stepped(self, event: Stepped) -> None:
        there = event.regrouped if event.regrouped is not None else dict.fromkeys(self._workers, 0)
        view = event.view, tuple(there)
        self._go_to(event, set(there.items()), view)
        taken = self._steps[-1]
        taken.finishers.add((event.rank, there.get(event.rank, 0)))
        known = taken.by_view.setdefault(view, event.vector.clone())
        if self._alike and (wrong := differing(known, event.vector)):
            self._refuse(event, "the same bits as the others", wrong)
        if self._gradient is not None:
            own = [self._update(event.step, view)] if len(view[1]) == 1 or self._at_once else []
            self._compare(event, taken.before, [*self._updates(event.step, taken, view), *own])

    def _go_to(self, event: Stepped, there: set[tuple[int, int]], view: _View) -> None:
        """Make the event's step the latest one; it is the next, or one beyond which only lost workers had got."""
        latest = len(self._steps) - 1
        if event.step == latest + 1:
            self._steps.append(_Taken(self._before_next(event, view)))
            return
        beyond = [taken for taken in self._steps[event.step + 1 :] if not taken.finishers.isdisjoint(there)]
        if event.step > latest or beyond:
            self._refuse(event, f"a step beside step {latest} of the others", 0)
        del self._steps[event.step + 1 :]

    def _before_next(self, event: Stepped, view: _View) -> Tensor:
        """Return the parameters before this step, of which the event shows all but its own update."""
        if self._gradient is None:
            return self._steps[-1].before
        taken = self._steps[-1]
        if self._at_once:  # nobody regroups
            return taken.before - self._update(event.step - 1, view) if event.step else taken.before
        shown = event.vector.to(taken.before.dtype)
        if len(view[1]) == 1:
            shown = shown + self._update(event.step, view)
        updates = torch.stack([self._update(event.step - 1, each) for each in taken.by_view])
        wrong = int((taken.before - updates != shown).all(0).sum())
        if wrong:
            self._refuse(event, f"each number with one update of step {event.step - 1}", wrong)
        return shown.clone()

    def _compare(self, event: Stepped, before: Tensor, updates: Sequence[Tensor]) -> None:
        shown = event.vector.to(before.dtype)
        possible = torch.stack([torch.zeros_like(before), *updates])
        wrong = int((before - possible != shown).all(0).sum())
        if wrong:
            self._refuse(event, "all updates before this step's", wrong)

    def _updates(self, step: int, taken: _Taken, view: _View) -> list[Tensor]:
        """Return the updates that other views have made of a step; some numbers may have one of them."""
        return [self._update(step, each) for each in taken.by_view if each != view]

    def _update(self, step: int, view: _View) -> Tensor:
        assert self._gradient is not None, "asked only where gradients are known"
        gradients = [self._gradient(self._workers.index(rank), step) for rank in view[1]]
        return torch.stack(gradients).sum(0) / len(gradients)

    def _refuse(self, event: Stepped, expected: str, wrong: int) -> None:
        raise Violation(
            f"parameters after step {event.step}",
            event.rank,
            event.time_s,
            expected=expected,
            found=f"{wrong} of {len(event.vector)} numbers differ",
        )


class OneVector(Invariant):
    """Workers share one vector: no update is lost, torn or doubled.

        w = 0 - sum over all steps of all workers of their gradients      steps of rate 1, exact numbers

    Args:
        conditions: with known gradients.
    """

    def __init__(self, conditions: Conditions) -> None:
        assert conditions.gradient is not None, "updates are checked that are known"
        self._gradient = conditions.gradient
        self._workers = conditions.roles.workers
        self._sum = torch.zeros(conditions.numbers)
        self._steps: Counter[int] = Counter()

    def stepped(self, event: Stepped) -> None:
        self._sum -= self._gradient(self._workers.index(event.rank), event.step)
        self._steps[event.rank] += 1
        wrong = int((self._sum != event.vector.to(self._sum.dtype)).sum())
        if wrong:
            raise Violation(
                f"the shared vector after step {event.step}",
                event.rank,
                event.time_s,
                expected=f"the sum of {self._steps.total()} updates",
                found=f"{wrong} of {len(self._sum)} numbers wrong",
            )

    def ended(self, event: Ended) -> None:
        for rank in event.survivors:
            if event.steps_of(rank) not in (None, self._steps[rank]):
                raise Violation(
                    f"updates of rank {rank} at the end",
                    rank,
                    event.time_s,
                    expected=event.steps_of(rank),
                    found=self._steps[rank],
                )
