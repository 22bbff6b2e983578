"""A vector in memory that ranks of one simulated host share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polyrhythm.communication.transports.simulated.rank import SimulatedRank


@dataclass(frozen=True)
class SharedVector:
    """One vector.

    Attributes:
        vector: the numbers.
        holders: ranks that have had it.
    """

    vector: Tensor
    holders: list[SimulatedRank]

    @property
    def is_there(self) -> bool:
        """Whether somebody who has it lives: memory is gone with the last process."""
        return any(holder.alive for holder in self.holders)
