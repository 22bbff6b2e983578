"""What every pusher has asked last, so that a request that comes again is answered, and not carried out twice."""

from __future__ import annotations

from typing import Any

from polyrhythm.communication.message import Kind, Message

_Name = tuple[Kind, int, bool]


class Requests:
    """One replica's list: of every pusher its last request, and whether that has been answered."""

    def __init__(self) -> None:
        self._last: dict[int, _Name] = {}
        self._answered: set[int] = set()

    def note(self, rank: int, message: Message) -> None:
        """A pusher asks something new."""
        self._last[rank] = _name(message)
        self._answered.discard(rank)

    def answer(self, rank: int) -> None:
        """A pusher's request is answered."""
        self._answered.add(rank)

    def forget(self, rank: int) -> None:
        """A pusher is gone."""
        self._last.pop(rank, None)
        self._answered.discard(rank)

    def facts(self) -> dict[str, Any]:
        """Gives the list, JSON-able."""
        return {
            "last": {str(rank): list(name) for rank, name in self._last.items()},
            "answered": sorted(self._answered),
        }

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Takes the list that `facts` gave."""
        self._last = {
            int(rank): (Kind(kind), step, final) for rank, (kind, step, final) in facts["last"].items()
        }
        self._answered = set(facts["answered"])

    def is_repeated(self, rank: int, message: Message) -> bool:
        """Whether a request is the pusher's last one once more."""
        return self._last.get(rank) == _name(message)

    def is_answered(self, rank: int) -> bool:
        """Whether the pusher's last request has been answered."""
        return rank in self._answered


def _name(message: Message) -> _Name:
    """Gives what tells a request of a pusher from its others: it has one at a time, and takes steps in order."""
    return message.kind, message.step, message.kind is Kind.PULL and message.stop
