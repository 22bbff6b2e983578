"""What all strategies have in common whose workers average their models in rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.specs import chosen
from polyrhythm.strategies.averaging.rounds.resharding import OfRounds
from polyrhythm.strategies.averaging.rounds.rounds import every
from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.local_models import LocalModels
from polyrhythm.strategies.invariants.meetings import Meetings
from polyrhythm.strategies.invariants.replicas import Replicas
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.strategy import Strategy

MEET_AGAIN = "the others finish the round, and the mean is theirs; a successor joins them there"
"""What happens when a worker dies."""


class Averaging(Strategy):
    """Workers train alone and meet at means of their models, from which nobody goes on before all have come.

    Attributes:
        sums_gradients: whether plain SGD's models are the sum of all gradients at the end of a round.
        collective: how models are added up.
    """

    sums_gradients: ClassVar[bool] = False

    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()

    def in_step(self, workers: int) -> bool:
        """Always; who wants to stop is heard at a mean, and after an epoch."""
        return True

    def agrees(self, workers: int) -> bool:
        """Only if every step ends with a mean."""
        return self.round_steps(workers) == 1 or workers == 1

    def goes_on(self, workers: int) -> bool:
        """By regrouping."""
        return self.regroups(workers)

    def regroups(self, workers: int) -> bool:
        """If there is more than one worker."""
        return workers > 1

    def resharding(self, before: int, after: int) -> Resharding:
        """All go on from the mean of all models."""
        return OfRounds()

    def updates_per_step(self, workers: int) -> int:
        """One: each model gets its own worker's."""
        return 1

    def slices(self, workers: int) -> int:
        """One a worker."""
        return workers

    def invariants(self, conditions: Conditions) -> list[Invariant]:
        """At the end of a round all replicas are equal, and the mean of all models that plain SGD has made."""
        meet = self.meet(conditions)
        replicas = Meetings(Replicas(conditions, [conditions.cast.workers], alone=False), meet)
        made = [LocalModels(conditions, meet)] if self.sums_gradients else []
        return [*super().invariants(conditions), replicas, *made]

    def meet(self, conditions: Conditions) -> Callable[[int], bool]:
        """Gives what tells, from a step's number, whether all replicas are equal after it."""
        return every(self.round_steps(len(conditions.cast.workers)))
