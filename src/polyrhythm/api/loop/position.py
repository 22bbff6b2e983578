"""Where loops are that go in step, so that a successor of worker 0 comes to the same batch.

    others     batch 4  step ✝ ───────────── formation ── position(epoch 2, 4 batches taken, …) ── step, again
    successor                 ▷ mustering ── formation ── ◀ waits for it ── leaves 4 batches out ── step

A worker notes its position whenever it comes to a step, or to the end of its share of an epoch: there, and nowhere
else, all are at the same line of the script. Whoever has one of the steps at which all go on leaves it in the store.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from polyrhythm.api.loop.bulletin import Bulletin

ALL = 1 << 62
"""Batches taken of an epoch of which nothing is left."""
UNKNOWN = -1
"""Batches taken where they do not come from a shard."""
_KEPT = 3
"""Positions: of the step under way, of the one before, which may have to be taken again, and of a share's end."""


@dataclass(frozen=True)
class Position:
    """One of a loop.

    Attributes:
        loop: how many loops over epochs the script has been through before.
        epoch: in this loop.
        steps: that have been done.
        taken: batches of the epoch that those steps were made of; `ALL` of them, or `UNKNOWN` without a shard.
        at_end: whether a share of the epoch has been handed out to its end.
        averages: how many have been taken.
        rates: the learning rate of every parameter group.
        kept: plain states of what the loop keeps.
    """

    loop: int
    epoch: int
    steps: int
    taken: int
    at_end: bool
    averages: int
    rates: tuple[float, ...]
    kept: tuple[dict[str, Any], ...]

    def to_text(self) -> str:
        """Writes it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Reads what `to_text` wrote."""
        told: dict[str, Any] = json.loads(text)
        return cls(**told | {"rates": tuple(told["rates"]), "kept": tuple(told["kept"])})


class Logbook:
    """Notes one worker's positions, and leaves them where a new leader of its formation looks for them.

    Args:
        bulletin: where.
    """

    def __init__(self, bulletin: Bulletin) -> None:
        self._bulletin = bulletin
        self._latest: list[Position] = []
        self._told_to = 0
        self._owed: int | None = None

    def note(self, position: Position) -> None:
        """Notes a position."""
        self._latest = [*self._latest[1 - _KEPT :], position]
        if self._owed is not None:
            self._tell()
            if position.steps > self._owed:
                self._owed = None

    def formed(self, leader: int, steps: int) -> None:
        """A formation has been made, with the steps that count; who leads may have begun to, and have no position.

        Args:
            leader: how many have led before the one who leads it.
            steps: that this worker has done, as far as they count.
        """
        if leader:
            self._told_to, self._owed = leader, steps
            self._tell()

    def _tell(self) -> None:
        for position in self._latest:
            if position.steps == self._owed:
                self._bulletin.post(_key(self._told_to, position.steps, position.at_end), position.to_text())


def find_position(bulletin: Bulletin, leader: int, steps: int, epoch: tuple[int, int]) -> Position | None:
    """Looks for what workers have left for a new leader; None as long as nobody has.

    Args:
        bulletin: where.
        leader: how many have led before it.
        steps: with which its formation goes on.
        epoch: loop and epoch that the last leader had begun; of two positions the one in there counts.
    """
    texts = [bulletin.read(_key(leader, steps, at_end)) for at_end in (True, False)]
    found = [Position.from_text(text) for text in texts if text is not None]
    inside = [position for position in found if (position.loop, position.epoch) == epoch]
    return next(iter(inside or found), None)


def _key(leader: int, steps: int, at_end: bool) -> str:
    return f"script/position/{leader}/{steps}/{'end' if at_end else 'step'}"
