"""Dedicated: servers have hosts of their own where there are several, and cores of their own where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polyrhythm.strategies.role_assignment import Placement


class Dedicated(Placement):
    """Servers share nothing with workers where that can be."""

    dedicated: ClassVar[bool] = True

    def servers(self, hosts: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the last ranks, which are those of the last hosts."""
        return tuple(range(len(hosts) - count, len(hosts)))
