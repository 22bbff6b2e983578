"""What mixing in turns comes to, computed with whole matrices in float64.

gradient first    X(t+1) = P_t (X(t) - G(t)),  a(t+1) = P_t a(t),  z = X/a       push-sum
else              X(t+1) = P_t X(t) - G(t)                                       D-PSGD
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Gradient = Callable[[int, int], Tensor]
"""Gives the gradient, `(numbers,)`, of a worker's index and step."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a member begins.

    Attributes:
        worker: its index among all workers of the run.
        step: that it takes first.
        learned: whether what it learned in that step is there already.
    """

    worker: int
    step: int = 0
    learned: bool = False


class RuleOfTurns:
    """Members that begin at one point, each at a step of its own, and mix from the latest of these steps on.

    Args:
        places: of the members, in order.
        matrices: a period of them.
        point: `(numbers,)`, where all begin, with a mass of 1.
        gradient_first: whether gradients are applied before mixing, and parameters divided by their mass.
        delay: steps after which what was sent is taken, with gradients first.
    """

    def __init__(
        self,
        places: Sequence[Place],
        matrices: Sequence[Tensor],
        point: Tensor,
        *,
        gradient_first: bool,
        delay: int,
    ) -> None:
        self.places = places
        self._matrices = matrices
        self._first = gradient_first
        self._delay = delay
        self._mixes_from = max(place.step for place in places)
        self._done = min(place.step for place in places)
        self._values = point.double().repeat(len(places), 1)
        self._mass = torch.ones(len(places), 1, dtype=torch.float64)
        self._under_way: list[tuple[Tensor, Tensor]] = []
        self._after = {self._done: (self._values, self._mass)}

    def held(self, member: int, steps: int, gradient: Gradient) -> tuple[Tensor, Tensor]:
        """Gives what a member holds after so many steps: its parameters, times their mass, and the mass.

        Args:
            member: its place.
            steps: done.
            gradient: of all workers.
        """
        while self._done < steps:
            self._turn(gradient)
        values, mass = self._after[max(steps, min(self._after))]
        return values[member], mass[member]

    def _turn(self, gradient: Gradient) -> None:
        step = self._done
        gradients = torch.stack([self._learned(place, step, gradient) for place in self.places])
        alone, matrix = step < self._mixes_from, self._matrices[step % len(self._matrices)]
        if alone:
            self._values = self._values - gradients
        elif self._first:
            self._push(matrix, self._values - gradients)
        else:
            self._values = matrix @ self._values - gradients
        self._done += 1
        self._after[self._done] = (self._values, self._mass)
        self._after.pop(self._done - len(self.places) - 1, None)  # nobody is that far behind its neighbours

    def _learned(self, place: Place, step: int, gradient: Gradient) -> Tensor:
        if step < place.step or (step == place.step and place.learned):
            return torch.zeros_like(self._values[0])
        return gradient(place.worker, step).double()

    def _push(self, matrix: Tensor, values: Tensor) -> None:
        kept = torch.diag(matrix.diag())
        sent = matrix - kept
        self._under_way.append((sent @ values, sent @ self._mass))
        self._values, self._mass = kept @ values, kept @ self._mass
        if len(self._under_way) > self._delay:
            arrived, mass = self._under_way.pop(0)
            self._values, self._mass = self._values + arrived, self._mass + mass
