"""Late replicas: equal bits after the same step, where updates come up to a step later, each number's once a step.

after step s      a number has the updates of all steps before s; of step s too, if nobody else is there
                  or if it had come before workers regrouped and took the step again for the others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyrhythm.strategies.invariant import Conditions, Invariant, Stepped, Violation

_Formation = tuple[int, tuple[int, ...]]
"""The number of a formation, and its members."""


@dataclass
class _Taken:
    """What is known of a step.

    Attributes:
        before: `(numbers,)`, with the updates of all steps before it.
        by_formation: that have taken it, with what each held afterwards.
        finishers: who have taken it.
    """

    before: Tensor
    by_formation: dict[_Formation, Tensor] = field(default_factory=dict)
    finishers: set[tuple[int, int]] = field(default_factory=set)


class LateReplicas(Invariant):
    """All members of a formation agree, and every gradient is in every number once.

    Args:
        conditions: with or without known gradients; without them, members are only compared.
    """

    def __init__(self, conditions: Conditions) -> None:
        self._workers = conditions.cast.workers
        self._gradient = conditions.gradient
        nothing = torch.zeros(conditions.numbers if self._gradient else 0)
        self._steps = [_Taken(nothing)]

    def stepped(self, event: Stepped) -> None:
        """Compares with what others held after this step, or with what it may have come to."""
        there = event.regrouped if event.regrouped is not None else dict.fromkeys(self._workers, 0)
        formation = event.formation, tuple(there)
        self._go_to(event, set(there.items()), formation)
        taken = self._steps[-1]
        taken.finishers.add((event.rank, there.get(event.rank, 0)))
        known = taken.by_formation.setdefault(formation, event.vector.clone())
        if not torch.equal(known, event.vector):
            self._refuse(event, "the same bits as the others", int((known != event.vector).sum()))
        if self._gradient is not None:
            own = [self._update(event.step, formation)] if len(formation[1]) == 1 else []
            self._compare(event, taken.before, [*self._updates(event.step, taken, formation), *own])

    def _go_to(self, event: Stepped, there: set[tuple[int, int]], formation: _Formation) -> None:
        """Makes the event's step the latest: the one after it, or one that only lost workers had got beyond."""
        latest = len(self._steps) - 1
        if event.step == latest + 1:
            self._steps.append(_Taken(self._before_next(event, formation)))
            return
        beyond = [taken for taken in self._steps[event.step + 1 :] if not taken.finishers.isdisjoint(there)]
        if event.step > latest or beyond:
            self._refuse(event, f"a step beside step {latest} of the others", 0)
        del self._steps[event.step + 1 :]

    def _before_next(self, event: Stepped, formation: _Formation) -> Tensor:
        """Gives what the step before has come to, which this event shows: alone, less its own update."""
        if self._gradient is None:
            return self._steps[-1].before
        taken = self._steps[-1]
        shown = event.vector.to(taken.before.dtype)
        if len(formation[1]) == 1:
            shown = shown + self._update(event.step, formation)
        updates = torch.stack([self._update(event.step - 1, each) for each in taken.by_formation])
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

    def _updates(self, step: int, taken: _Taken, formation: _Formation) -> list[Tensor]:
        """Gives the updates of a step that others have made of it, of which some numbers may have had theirs."""
        return [self._update(step, each) for each in taken.by_formation if each != formation]

    def _update(self, step: int, formation: _Formation) -> Tensor:
        assert self._gradient is not None, "asked only where gradients are known"
        gradients = [self._gradient(self._workers.index(rank), step) for rank in formation[1]]
        return torch.stack(gradients).sum(0) / len(gradients)

    def _refuse(self, event: Stepped, expected: str, wrong: int) -> None:
        raise Violation(
            f"parameters after step {event.step}",
            rank=event.rank,
            time_s=event.time_s,
            expected=expected,
            found=f"{wrong} of {len(event.vector)} numbers differ",
        )
