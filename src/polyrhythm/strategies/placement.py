"""What a placement is: given which rank runs on which host, it chooses the servers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from polyrhythm.specs import Config

PLACEMENTS = "polyrhythm.strategies.placements"
"""The folder that lists them."""


class Placement(Config):
    """A rule for choosing servers among the ranks."""

    dedicated: ClassVar[bool]

    @abstractmethod
    def servers(self, hosts: Sequence[int], count: int) -> tuple[int, ...]:
        """Chooses the ranks that are servers; rank 0 is never one.

        Args:
            hosts: the host of every rank.
            count: how many servers there must be, fewer than ranks.
        """
