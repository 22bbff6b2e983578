"""How a worker spends its rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polyrhythm.communication.collective import Collective
from polyrhythm.strategies.averaging.rounds.local_optimizer import AtAverage
from polyrhythm.strategies.averaging.rounds.outer import Outer
from polyrhythm.strategies.averaging.rounds.preconditioner import Preconditioner


def every(steps: int) -> Callable[[int], bool]:
    """Gives a rhythm: tells whether a round of so many steps ends with a step; with 0 none does."""
    return lambda step: steps > 0 and (step + 1) % steps == 0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How a worker spends its rounds.

    Attributes:
        steps: of a round; 0: the whole run is one.
        first: the step with which the first round begins; before it workers meet at every step.
        collective: how models are added up.
        optimizer_state: what becomes of the local optimiser's state at a mean of all.
        preconditioner: changes gradients before the local optimiser sees them; None: nothing does.
        outer: what is made of the mean; None: it is the new model.
        group: neighbouring workers that average among themselves more often; 1: none do.
        group_steps: between two means inside a group.
    """

    steps: int
    collective: Collective
    first: int = 0
    optimizer_state: AtAverage = "keep"
    preconditioner: Preconditioner | None = None
    outer: Outer | None = None
    group: int = 1
    group_steps: int = 0

    def ends(self, step: int) -> bool:
        """Whether a round ends with a step."""
        return step >= self.first and every(self.steps)(step - self.first)

    def group_ends(self, step: int) -> bool:
        """Whether groups meet after a step."""
        return self.group > 1 and every(self.group_steps)(step)

    def meetings(self, step: int) -> int:
        """Gives how often all workers have met in so many steps."""
        rounds = max(0, step - self.first) // self.steps if self.steps else 0
        return min(step, self.first) + rounds
