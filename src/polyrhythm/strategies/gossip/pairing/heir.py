"""Membership as worker 0's successor keeps it: from what others know it becomes the host of a run under way."""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.gossip.pairing.host import Host
from polyrhythm.strategies.gossip.pairing.keeper import Keeper, Reply
from polyrhythm.strategies.gossip.pairing.membership import Standing
from polyrhythm.training.flat_parameters import FlatParameters


class Heir:
    """Asks all who live, begins with the mean of its partners' parameters, and is the host from then on.

    It waits for everyone's word, since whoever it does not know of would be let out by nobody. What others say to their
    host meanwhile waits.

    Args:
        keeper: of its parameters.
        flat: where they are put first, and where the run's final model is left.
    """

    def __init__(self, keeper: Keeper, flat: FlatParameters) -> None:
        self._keeper = keeper
        self._flat = flat
        self._host = Host(keeper, flat)
        self._leads = self._called = self._stop = False
        self._awaited: set[int] = set()
        self._present: set[int] = set()
        self._giving: set[int] = set()
        self._first: set[int] = set()
        self._asked: set[int] = set()
        self._found: list[Tensor] = []
        self._step = 0
        self._later: list[tuple[int, Message]] = []

    @property
    def over(self) -> bool:
        """Whether nothing more will be said."""
        return self._host.over

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Finds out what there is, then does as the host does."""
        if self._leads:
            return self._host.on_message(source, message)
        if source == self._keeper.place.rank:
            return self._call()
        if message.kind is Kind.LEAD:
            return self._hear(source, message)
        if message.kind is Kind.PARAMETERS:
            return self._take(source, message)
        self._later.append((source, message))
        return []

    def on_loss(self, rank: int) -> list[Reply]:
        """Waits for it no more."""
        if self._leads:
            return self._host.on_loss(rank)
        for group in (self._awaited, self._present, self._giving, self._first, self._asked):
            group.discard(rank)
        self._later = [(source, message) for source, message in self._later if source != rank]
        return self._go_on()

    def _call(self) -> list[Reply]:
        self._called = True
        self._awaited = set(self._keeper.place.others)
        return [(rank, Message(Kind.LEAD)) for rank in sorted(self._awaited)]

    def _hear(self, rank: int, message: Message) -> list[Reply]:
        self._awaited.discard(rank)
        self._step = max(self._step, message.step)
        self._stop |= message.stop
        standing = Standing(message.version)
        if standing is not Standing.OUTSIDE:
            self._present.add(rank)
        if standing.has_parameters:
            self._giving.add(rank)
        if standing.first:
            self._first.add(rank)
        return self._go_on()

    def _take(self, rank: int, message: Message) -> list[Reply]:
        if rank in self._asked and message.tensor is not None:
            self._found.append(message.tensor)
        self._asked.discard(rank)
        return self._go_on()

    def _go_on(self) -> list[Reply]:
        """Asks for parameters once all have spoken, and leads once they are there.

        Raises:
            PeerLost: nobody has any.
        """
        if not self._called or self._awaited or self._asked:
            return []
        if self._found:
            self._flat.vector.copy_(sum(self._found[1:], self._found[0]) / len(self._found))
            self._found = []
            return self._lead(self._host.take_over(self._step, self._present, self._first))
        if self._first and not self._giving:  # its own parameters are those that the lost one began with
            return self._lead(self._host.begin_anew(self._present))
        self._asked = self._giving & {*self._keeper.place.partners} or set(self._giving)
        if not self._asked:
            raise PeerLost(self._keeper.place.rank, "looking for somebody who has parameters")
        return [(rank, Message(Kind.JOIN)) for rank in sorted(self._asked)]

    def _lead(self, replies: list[Reply]) -> list[Reply]:
        self._leads = True
        waiting, self._later = self._later, []
        if self._stop:
            waiting.insert(0, (self._keeper.place.rank, Message(Kind.EVENT, stop=True)))
        for source, message in waiting:
            replies += self._host.on_message(source, message)
        return replies
