"""Membership as worker 0 keeps it: it lets others in and out."""

from __future__ import annotations

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.gossip.pairing.keeper import Keeper, Reply
from polyrhythm.training.flat_parameters import FlatParameters


class Host:
    """Membership on worker 0; see `Membership`.

    Args:
        keeper: of its parameters.
        flat: where the run's final model is left.
    """

    def __init__(self, keeper: Keeper, flat: FlatParameters) -> None:
        self.over = False
        self._keeper = keeper
        self._flat = flat
        self._own = keeper.place.rank
        self._present = set(keeper.place.workers)
        self._begun = self._closing = self._ended = False
        self._waiting: dict[int, int] = {}
        self._known: set[int] = set()
        self._left: set[int] = set()
        self._gave: set[int] = set()
        self._total = keeper.values

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Lets workers in, passes a request to stop on, and collects models."""
        if message.kind is Kind.EVENT:
            return self._stop()
        if message.kind is Kind.JOIN:
            return self._join(source, message.step)
        if message.kind is Kind.LEAVE:
            return self._leave(source)
        if message.kind is Kind.LEAD:
            # Of a successor that found the question in its inbox, and asks to be let in.
            return []
        assert message.tensor is not None, "who leaves gives its parameters"
        self._total.add_(message.tensor.to(self._total.device))
        self._gave.add(source)
        return self._end()

    def take_over(self, step: int, present: set[int], first: set[int]) -> list[Reply]:
        """Goes on with a run that has begun, with the parameters of the flat vector.

        Args:
            step: of its own worker.
            present: ranks of the others that take part.
            first: those of them that wait as from the run's beginning.
        """
        self._begun = True
        self._present = {self._own, *present}
        self._known = {*self._keeper.place.workers} - first  # partners may know more of any
        self._keeper.make_ready(step)
        return [self._keeper.answer(step=step)]

    def begin_anew(self, present: set[int]) -> list[Reply]:
        """Begins again what nobody had begun, or is left of.

        Args:
            present: ranks of the others that take part.
        """
        self._present = {self._own, *present}
        return self._join(self._own, 0)

    def on_loss(self, rank: int) -> list[Reply]:
        """Waits for it no more."""
        self._waiting.pop(rank, None)
        if rank not in self._gave:
            self._present.discard(rank)
        return self._end() if self._closing else [*self._begin(), *self._close()]

    def _join(self, rank: int, step: int) -> list[Reply]:
        if self._closing:
            return [(rank, Message(Kind.LEAVE))]
        self._present.add(rank)
        self._left.discard(rank)
        self._keeper.absent.discard(rank)
        if self._begun:
            return [(rank, self._answer_to(rank, step))]
        self._waiting[rank] = step
        return self._begin()

    def _answer_to(self, rank: int, step: int) -> Message:
        """Lets a worker in where others are under way; the version tells it whether there was one before it.

        Of that one partners may know more.
        """
        values = self._keeper.copy()
        if rank not in self._known:
            self._known.add(rank)
            return Message(Kind.PARAMETERS, values, step=self._keeper.step)
        step = max(step, self._keeper.heard.get(rank, 0))
        return Message(Kind.PARAMETERS, values, step=step, version=1)

    def _begin(self) -> list[Reply]:
        """Lets all begin at once, with the same parameters."""
        if self._begun or not self._waiting.keys() >= self._present:
            return []
        self._begun = True
        self._known = set(self._waiting)
        self._keeper.make_ready(self._waiting[self._own])
        self._keeper.heard.update(self._waiting)  # for successors of those who never speak again
        told = Message(Kind.PARAMETERS, self._keeper.copy(), step=self._keeper.step)
        return [
            self._keeper.answer(step=self._keeper.step) if rank == self._own else (rank, told)
            for rank in self._waiting
        ]

    def _stop(self) -> list[Reply]:
        if self._keeper.stop:
            return []
        self._keeper.stop = True
        return [(rank, Message(Kind.EVENT, stop=True)) for rank in self._present - {self._own}]

    def _leave(self, rank: int) -> list[Reply]:
        if self._ended:  # its own worker lets it go
            self.over |= rank == self._own
            return []
        self._left.add(rank)
        return self._close()

    def _close(self) -> list[Reply]:
        """Once all have taken their last step, asks all for their models."""
        if self._closing or not self._left >= self._present:
            return []
        self._closing = True
        self._total = self._keeper.values.clone()
        self._gave = {self._own}
        asked = [(rank, Message(Kind.LEAVE)) for rank in self._present - {self._own}]
        return asked or self._end()

    def _end(self) -> list[Reply]:
        """Once all models are there, leaves their mean in the flat vector."""
        if self._ended or not self._gave >= self._present:
            return []
        self._ended = True
        self._flat.vector.copy_(self._total.div_(len(self._gave)))
        return [self._keeper.answer()]
