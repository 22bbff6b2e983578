"""Membership as a worker other than 0 keeps it."""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.gossip.pairing.keeper import Keeper, Reply
from polyrhythm.strategies.gossip.pairing.membership import Standing
from polyrhythm.training.flat_parameters import FlatParameters


class Member:
    """Membership of a worker other than 0; see `Membership`.

    Args:
        keeper: of its parameters.
        flat: where they are put first.
        resumed: whether they are in it already, from a checkpoint.
        succeeds: whether it is the successor of one that was lost.
        host_returns: whether worker 0 has a successor when it is lost.
    """

    def __init__(
        self,
        keeper: Keeper,
        flat: FlatParameters,
        *,
        resumed: bool = False,
        succeeds: bool = False,
        host_returns: bool = False,
    ) -> None:
        self.over = False
        self._keeper = keeper
        self._flat = flat
        self._resumed = resumed
        self._host_returns = host_returns
        self._leader = keeper.place.workers[0]
        self._away = self._news = False
        self._succeeds = succeeds
        self._joins: Message | None = None
        """What its own worker began with, as long as worker 0 has not answered."""
        self._came = self._stop_requested = self._left = self._released = False
        self._step = 0
        self._asked: set[int] = set()
        self._found: list[Tensor] = []

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Comes, lets others come, and leaves."""
        if source == self._keeper.place.rank:
            return self._say(message)
        if message.kind is Kind.LEAD:
            return self._introduce()
        if message.kind is Kind.EVENT:
            return self._stop()
        if message.kind is Kind.LEAVE:
            return self._leave()
        if message.kind is Kind.JOIN:
            return self._welcome(source)
        return self._begin_with(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Does without a partner, and without worker 0 until its successor speaks.

        Raises:
            PeerLost: worker 0 is gone, and has no successor.
        """
        if rank != self._leader:
            return self._answered_by(rank)
        if not self._host_returns:
            raise PeerLost(rank, "waiting for a message from anyone")
        self._away = self._news = True
        return self._tell()

    def stay(self) -> None:
        """Goes on answering, though its worker has left, until that one says that it leaves once more."""
        self.over = False

    def _say(self, message: Message) -> list[Reply]:
        """Passes on what its own worker says, to the next worker 0 if this one is lost."""
        if self._released:
            self.over = True
            return []
        if message.kind is Kind.JOIN:
            self._joins, self._came = message, True
        self._stop_requested |= message.kind is Kind.EVENT
        self._left |= message.kind is Kind.LEAVE
        return self._tell() + ([] if self._away else [(self._leader, message)])

    def _tell(self) -> list[Reply]:
        """Tells its own worker once of each loss of worker 0, if it waits for that one's word.

        So that it can hear a new one elsewhere, too, which may wait for what it has to say there.
        """
        waits = self._joins is not None or self._left
        if not (self._news and waits):
            return []
        self._news = False
        return [self._keeper.answer(Kind.LEAD)]

    @property
    def _standing(self) -> Standing:
        if self._keeper.ready or not self._came:
            return Standing.INSIDE if self._keeper.ready else Standing.OUTSIDE
        if self._succeeds:
            return Standing.ENTERING
        return Standing.RESUMED if self._resumed else Standing.WAITING

    def _introduce(self) -> list[Reply]:
        """Tells a new worker 0 what it must know, and what the last one may not have heard."""
        self._away = False
        keeper = self._keeper
        keeper.absent.discard(self._leader)
        here = Message(
            Kind.LEAD,
            version=self._standing,
            step=keeper.heard.get(self._leader, 0),
            stop=keeper.stop or self._stop_requested,
        )
        words = [here] if self._joins is None else [here, self._joins]
        if self._left:
            words.append(Message(Kind.LEAVE))
        return [(self._leader, word) for word in words]

    def _welcome(self, rank: int) -> list[Reply]:
        keeper = self._keeper
        keeper.absent.discard(rank)
        values = self._flat.vector.clone() if self._standing is Standing.RESUMED else keeper.copy()
        return [(rank, Message(Kind.PARAMETERS, values, step=keeper.heard.get(rank, 0)))]

    def _begin_with(self, source: int, message: Message) -> list[Reply]:
        """Takes an answer to `JOIN`."""
        if source != self._leader:
            self._step = max(self._step, message.step)
            self._found += [message.tensor] if message.tensor is not None else []
            return self._answered_by(source)
        joins, self._joins = self._joins, None
        if joins is None:
            return []  # to what was said again
        assert message.tensor is not None, "worker 0 has parameters"
        if not self._resumed:
            self._flat.vector.copy_(message.tensor)
        if not message.version:  # the step is worker 0's own, of which its successor may want to know
            self._step, self._keeper.heard[self._leader] = joins.step, message.step
            return self._begin()
        self._step = max(self._step, joins.step, message.step)
        place = self._keeper.place
        self._found = [message.tensor] if self._leader in place.partners else []
        self._asked = {*place.partners} - {self._leader}
        return [(rank, Message(Kind.JOIN)) for rank in self._asked] or self._begin()

    def _answered_by(self, rank: int) -> list[Reply]:
        if rank not in self._asked:
            return []
        self._asked.discard(rank)
        return [] if self._asked else self._begin()

    def _begin(self) -> list[Reply]:
        if self._found:
            self._flat.vector.copy_(sum(self._found[1:], self._found[0]) / len(self._found))
            self._found = []
        self._keeper.make_ready(self._step)
        return [self._keeper.answer(step=self._step)]

    def _stop(self) -> list[Reply]:
        self._keeper.stop = True
        return []

    def _leave(self) -> list[Reply]:
        if not self._keeper.ready:
            self.over = True
            return [self._keeper.answer(Kind.LEAVE)]
        model = (self._leader, Message(Kind.PARAMETERS, self._keeper.values))
        if self._released:
            return [model]
        self._released = self.over = True
        return [model, self._keeper.answer()]
