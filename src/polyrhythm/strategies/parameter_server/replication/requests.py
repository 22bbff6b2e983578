"""What every pusher has asked last, so that a request that comes again is answered, and not carried out twice."""

from __future__ import annotations

from collections.abc import Hashable

from polyrhythm.communication.message import Kind, Message


class Requests:
    """One replica's list: of every pusher its last request, and whether that has been answered."""

    def __init__(self) -> None:
        self._last: dict[int, Hashable] = {}
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

    def is_repeated(self, rank: int, message: Message) -> bool:
        """Whether a request is the pusher's last one once more."""
        return self._last.get(rank) == _name(message)

    def is_answered(self, rank: int) -> bool:
        """Whether the pusher's last request has been answered."""
        return rank in self._answered


def _name(message: Message) -> Hashable:
    """Gives what tells a request of a pusher from its others: it has one at a time, and takes steps in order."""
    return message.kind, message.step, message.kind is Kind.PULL and message.stop
