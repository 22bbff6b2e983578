"""Who of some processes has ended, zombies among them."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence


class Lifelines:
    """Watches processes through descriptors (pidfd), which a new process of the same number cannot take over.

    Args:
        processes: their numbers.

    Raises:
        OSError: one of them has ended already, or the system has no such descriptors.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError("this system has no descriptors of processes (pidfd)")
        self._places: dict[int, int] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self._poll = select.poll()
        try:
            for place, process in enumerate(processes):
                descriptor = os.pidfd_open(process)
                self._places[descriptor] = place
                self._poll.register(descriptor, select.POLLIN)
        except OSError:
            self.close()
            raise

    def ended(self) -> set[int]:
        """Gives the places, in the given order of processes, of those that have ended; never waits."""
        with self._lock:
            for descriptor, _ in self._poll.poll(0):
                self._ended.add(self._places[descriptor])
        return self._ended

    def close(self) -> None:
        """Watches no longer; whoever has ended by then stays known. Another thread may be looking."""
        with self._lock:  # a number that is closed may be somebody else's at once
            for descriptor in self._places:
                os.close(descriptor)
            self._places = {}
            self._poll = select.poll()
