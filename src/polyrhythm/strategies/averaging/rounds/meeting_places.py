"""Where a worker meets others: all of them, and those of its group; made anew when workers regroup.

Those who regroup may have come to different places: some have seen a presentation, or met in their group, where for
others it broke. They tell each other, and whoever missed something leaves it out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.averaging.rounds.model_mean import ModelMean
from polyrhythm.strategies.averaging.rounds.rounds import Rounds
from polyrhythm.training.flat_parameters import FlatParameters

_NEVER = -1


class Agreed(NamedTuple):
    """What those who regroup know together.

    Attributes:
        stops: whether any has heard that it must stop.
        counted: how many models count in the next mean.
    """

    stops: bool
    counted: float


class MeetingPlaces:
    """The communicators over which one worker's models are averaged, with all workers and within its group.

    Args:
        workers: all that are there.
        members: their indices among all workers of the run, in the same order.
        flat: of this worker.
        rounds: says who belongs to a group: neighbours among all workers of the run.

    Attributes:
        all: where all meet.
        group: where this worker's group does; None where it has none.
        presented: steps done when this worker's latest presentation began.
        group_met: the step of its group's latest mean.
    """

    def __init__(
        self, workers: Communicator, members: tuple[int, ...], flat: FlatParameters, rounds: Rounds
    ) -> None:
        self._flat = flat
        self._rounds = rounds
        self.presented = self._presented_to_all = _NEVER
        self.group_met = self._group_met_by_any = _NEVER
        self.all = ModelMean(workers, flat, rounds.collective)
        self.group: ModelMean | None = None
        if rounds.group > 1:
            self.group = ModelMean(self._near(workers, members), flat, rounds.collective)

    def prepare(self) -> None:
        """Lets collectives look at the links; all workers must call it."""
        self.all.prepare()
        if self.group is not None:
            self.group.prepare()

    def move(self, workers: Communicator, members: tuple[int, ...], own: Agreed) -> Agreed:
        """Meets others from now on, who all call it.

        Args:
            workers: as at first.
            members: as at first.
            own: what this worker knows, and brings.
        """
        self.all = self.all.over(workers)
        if self.group is not None:
            self.group = self.group.over(self._near(workers, members))
        told = torch.zeros(2 * workers.size + 2, dtype=torch.float64, device=self._flat.vector.device)
        told[workers.rank] = self.presented - _NEVER
        told[workers.size + workers.rank] = self.group_met - _NEVER
        told[-2:] = told.new_tensor([float(own.stops), own.counted])
        workers.all_reduce(told)
        latest = [int(value) + _NEVER for value in told[:-2].tolist()]
        self._presented_to_all = max(latest[: workers.size])
        self._group_met_by_any = max(
            latest[workers.size :][place] for place in self._group_of(workers, members)
        )
        self.prepare()
        return Agreed(stops=bool(told[-2] > 0), counted=float(told[-1]))

    def presents(self, done: int) -> bool:
        """Whether all meet for a presentation after so many steps; else some have had it already."""
        self.presented = done
        return done > self._presented_to_all

    def meets_group(self, step: int) -> bool:
        """Whether this worker's group meets after a step; else some of it have done so already."""
        return self.group is not None and self._rounds.group_ends(step) and step > self._group_met_by_any

    def _near(self, workers: Communicator, members: tuple[int, ...]) -> Communicator:
        """Gives the communicator of this worker's group."""
        number = members[workers.rank] // self._rounds.group
        return workers.subgroup(f"averaging group {number}", self._group_of(workers, members))

    def _group_of(self, workers: Communicator, members: tuple[int, ...]) -> list[int]:
        """Gives the places of this worker's group among those who are there."""
        number = members[workers.rank] // self._rounds.group
        return [place for place, member in enumerate(members) if member // self._rounds.group == number]
