"""Ring: every worker has two neighbors."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.strategies.topology import Circulant


class Ring(Circulant):
    """Worker i talks to i - 1 and i + 1, thirds for each; rho = 1/3 + 2/3 cos(2 pi / N)."""

    def offsets(self, peers: int, turn: int = 0) -> Sequence[int]:
        """One up and one down, which are the same among two."""
        return tuple({1, peers - 1}) if peers > 1 else ()
