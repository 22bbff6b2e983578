"""Who is there, as a new leader hears it from themselves.

worker    ── LEAD(untrained), its latest state ─▶ new leader      has been there
newcomer  ── JOIN ─▶ waits for its welcome, until somebody has told the leader what that must hold
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from polyrhythm.communication.message import Message, unpack_tensors
from polyrhythm.roles.world import LEADER


class Introductions:
    """One leader's list.

    Attributes:
        untrained: what the first has told that it holds and nobody trains, by name.
    """

    def __init__(self) -> None:
        self.untrained: dict[str, Tensor] | None = None
        self._newcomers: set[int] = set()
        self._follows: dict[int, bool] = {}
        self._asking: dict[int, tuple[int, int]] | None = None

    def on_message(self, worker: int, message: Message) -> None:
        """Takes a worker's introduction, which says as well whether a state follows."""
        assert message.tensor is not None, "a worker says what it holds"
        self._follows[worker] = message.weight > 0
        self.untrained = self.untrained or unpack_tensors(message.tensor)[0]

    def on_newcomer(self, worker: int, rank: int, incarnation: int) -> bool:
        """Notes that a newcomer asks to be let in; gives whether that can be done now."""
        self._newcomers.add(worker)
        if self._asking is None:
            return True
        self._asking[worker] = rank, incarnation
        return False

    def lose(self, worker: int) -> None:
        """Forgets a newcomer that is gone."""
        if self._asking is not None:
            self._asking.pop(worker, None)

    def hold_back(self) -> None:
        """Has newcomers wait from now on."""
        self._asking = {}

    def held_back(self) -> list[tuple[int, int]]:
        """Gives those who wait, by rank and incarnation; from now on nobody need."""
        asking, self._asking = self._asking or {}, None
        return list(asking.values())

    def none_left(self, present: Collection[int]) -> bool:
        """Whether all others who are there are newcomers."""
        return set(present) <= {LEADER} | self._newcomers

    def complete(self, present: Collection[int], handed_in: Collection[int]) -> bool:
        """Whether all who are there have introduced themselves, and their states have come.

        Args:
            present: who is there.
            handed_in: whose states have come.
        """
        return all(
            worker in self._newcomers or not self._follows.get(worker, True) or self._has(worker, handed_in)
            for worker in present
            if worker != LEADER
        )

    def _has(self, worker: int, handed_in: Collection[int]) -> bool:
        return worker in self._follows and worker in handed_in
