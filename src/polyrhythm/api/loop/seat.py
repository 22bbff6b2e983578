"""A worker's seat where an epoch is dealt out."""

from __future__ import annotations

from typing import NamedTuple


class Seat(NamedTuple):
    """Which share of an epoch a worker has.

    Attributes:
        place: of the worker among those who have one.
        of: how many have one.
        taken: batches of it that need not be taken again.
    """

    place: int
    of: int
    taken: int = 0
