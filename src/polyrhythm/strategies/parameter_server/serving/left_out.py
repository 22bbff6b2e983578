"""Steps of which a server applied no gradient: late ones that it dropped, and those that were left out to catch up."""

from __future__ import annotations

from typing import Any

Stretch = list[int]
"""A first step, and the one after the last."""


class LeftOut:
    """One server's note.

    Attributes:
        by_pusher: for each pusher's number that left any out, stretches of steps, in order and apart.
    """

    def __init__(self) -> None:
        self.by_pusher: dict[int, list[Stretch]] = {}

    def add(self, pusher: int, start: int, stop: int) -> None:
        """Notes the steps `[start, stop)` of a pusher, which come after all that were noted before."""
        if start >= stop:
            return
        stretches = self.by_pusher.setdefault(pusher, [])
        if stretches and stretches[-1][1] == start:
            stretches[-1][1] = stop
        else:
            stretches.append([start, stop])

    def state(self) -> dict[str, Any]:
        """Gives what a resumed server needs, JSON-able."""
        return {str(pusher): [list(stretch) for stretch in found] for pusher, found in self.by_pusher.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""
        self.by_pusher = {
            int(pusher): [list(stretch) for stretch in found] for pusher, found in state.items()
        }
