"""Which workers of a script are there, in the store where all can look: its launcher knows first who is gone.

launcher    HERE ─────▶ GONE, or COMING if it starts a successor
successor               COMING ─▶ WAITING, where others regroup ─▶ HERE, or BEHIND where it stays behind the others
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any


class Place(StrEnum):
    """What has become of a worker's place."""

    HERE = "here"
    GONE = "gone"
    COMING = "coming"  # a successor is started
    WAITING = "waiting"  # a successor waits for the next epoch
    BEHIND = "behind"  # a successor takes part, steps behind the others, who must not wait for it


class Places:
    """Those of all workers.

    Args:
        store: where the ranks meet.
        workers: how many there are.
        is_lost: whether this rank knows a worker to be gone; asked where no launcher says so.
    """

    def __init__(
        self, store: Any, workers: int, is_lost: Callable[[int], bool] = lambda worker: False
    ) -> None:
        self._store = store
        self._keys = [f"script/place/{worker}" for worker in range(workers)]
        self._is_lost = is_lost

    def begin(self) -> None:
        """Says that all are there, or about to be; only a launcher does."""
        for worker in range(len(self._keys)):
            self.set(worker, Place.HERE)

    def set(self, worker: int, place: Place) -> None:
        """Says what has become of a worker."""
        self._store.set(self._keys[worker], place.value)

    def of(self, worker: int) -> Place:
        """Gives what has become of a worker."""
        return self.read()[worker]

    def read(self) -> list[Place]:
        """Gives what has become of all."""
        if not self._store.check(self._keys):  # torchrun's
            return [Place.GONE if self._is_lost(worker) else Place.HERE for worker in range(len(self._keys))]
        return [Place(bytes(value).decode()) for value in self._store.multi_get(self._keys)]
