"""What strategies have in common whose workers mix in turns."""

from __future__ import annotations

from typing import Annotated, ClassVar

from polyrhythm.specs import chosen
from polyrhythm.strategies.gossip.mixing.turns import remark
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.topology import TOPOLOGIES, Topology


class InTurns(Strategy):
    """A strategy of messages to neighbours, which everybody waits for.

    Attributes:
        topology: who sends to whom, and how much of it counts.
    """

    can_begin_anew: ClassVar[bool] = True

    topology: Annotated[Topology, chosen("topology", TOPOLOGIES)]

    def check(self, workers: int) -> None:
        """Refuses graphs that so many workers cannot have."""
        super().check(workers)
        self.topology.check(workers)

    def remark(self, workers: int) -> str:
        """Tells the spectral gap."""
        return remark(self.topology, workers)

    def in_step(self, workers: int) -> bool:
        """Always: everybody waits for what it is sent."""
        return True

    def agrees(self, workers: int) -> bool:
        """Only alone: others differ by what has not spread yet."""
        return workers == 1

    def goes_on(self, workers: int) -> bool:
        """By regrouping."""
        return self.regroups(workers)

    def regroups(self, workers: int) -> bool:
        """If there is more than one worker."""
        return workers > 1

    def updates_per_step(self, workers: int) -> int:
        """One: the mean moves by the mean gradient."""
        return 1
