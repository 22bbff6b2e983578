"""Torus: workers in cyclic rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from pydantic import Field

from polyrhythm.errors import RequestError
from polyrhythm.strategies.topology import Topology


class Torus(Topology):
    """Every worker has four neighbors, a fifth for each; rho = 3/5 + 2/5 cos(2 pi / a) for a x a, a at least 4.

    Attributes:
        rows: number of rows; as near to a square as the number of workers allows, if not given.
    """

    rows: int | None = Field(default=None, ge=2)

    def height(self, peers: int) -> int:
        """Number of rows."""
        if self.rows is not None:
            return self.rows
        return next((rows for rows in range(isqrt(peers), 1, -1) if peers % rows == 0), 1)

    def targets(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        """Above, below, left and right; two of them may be the same."""
        if peers == 1:
            return ()
        width = peers // self.height(peers)
        row, column = divmod(peer, width)
        around = {
            *((row + step) % (peers // width) * width + column for step in (-1, 1)),
            *(row * width + (column + step) % width for step in (-1, 1)),
        }
        return sorted(around - {peer})

    def check(self, peers: int) -> None:
        """Check that the workers form a grid with at least two rows and two columns.

        Raises:
            RequestError: the number of workers has no such factors.
        """
        if peers == 1:
            return
        rows = self.height(peers)
        if rows > 1 and peers % rows == 0 and peers // rows > 1:
            return
        if self.rows is not None:
            raise RequestError(
                f"topology {self}: {peers} workers do not fill {rows} rows of two or more: ask for a multiple of "
                f"{rows}, such as {rows * max(2, peers // rows)}"
            )
        raise RequestError(
            f"topology torus: {peers} workers make no rows and columns: ask for {max(4, peers + 1)}, or take "
            "topology ring"
        )
