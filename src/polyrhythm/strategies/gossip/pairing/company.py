"""How workers that go at their own pace begin together, come back, and end together: worker 0 sees to it.

    worker                     worker 0                    its partners
    JOIN ───────────────────▶  (waits for all who live)
      ◀──────── PARAMETERS ──
    …                                                                     a successor's JOIN goes to its partners, too,
    JOIN ───────────────────▶ ───▶ PARAMETERS   JOIN ──────────────────▶  and it begins with the mean of their
      ◀─────────────────────────────────────────────────── PARAMETERS ──  parameters, at the step they last heard of
    LEAVE ──────────────────▶  (waits for all who live)
      ◀───────────── LEAVE ──
    PARAMETERS ─────────────▶  the mean of all: the run's final model

Until worker 0 says `LEAVE`, everybody goes on answering. Then all have taken their last step, so nobody asks any more,
and a successor that comes now is told to leave.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.gossip.pairing.keeper import Keeper, Reply
from polyrhythm.training.flat_parameters import FlatParameters

KINDS = (Kind.JOIN, Kind.PARAMETERS, Kind.LEAVE, Kind.EVENT)
"""What these messages are; all others are about parameters. `EVENT` passes on a wish to stop."""


class Company(Protocol):
    """One worker's side.

    Attributes:
        over: whether nothing more will be said.
    """

    over: bool

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message and gives what is to be sent."""

    def on_loss(self, rank: int) -> list[Reply]:
        """A worker is gone."""


class Member:
    """The side of a worker that does not lead.

    Args:
        keeper: of its parameters.
        flat: where they are put first.
        resumed: whether they are in it already, from a checkpoint.
    """

    def __init__(self, keeper: Keeper, flat: FlatParameters, *, resumed: bool) -> None:
        self.over = False
        self._keeper = keeper
        self._flat = flat
        self._resumed = resumed
        self._leader = keeper.place.workers[0]
        self._step = 0
        self._asked: set[int] = set()
        self._found: list[Tensor] = []

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Comes, lets others come, and leaves."""
        own = source == self._keeper.place.rank
        if message.kind is Kind.EVENT:
            return [(self._leader, message)] if own else self._stop()
        if message.kind is Kind.LEAVE:
            return [(self._leader, Message(Kind.LEAVE))] if own else self._leave()
        if message.kind is Kind.JOIN:
            return [(self._leader, message)] if own else self._welcome(source)
        return self._begin_with(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Does without a partner; nobody can do without worker 0."""
        if rank == self._leader:
            raise PeerLost(rank, "waiting for a message from anyone")
        return self._answered_by(rank)

    def _welcome(self, rank: int) -> list[Reply]:
        keeper = self._keeper
        keeper.absent.discard(rank)
        step = keeper.heard.get(rank, 0)
        return [(rank, Message(Kind.PARAMETERS, keeper.copy(), step=step))]

    def _begin_with(self, source: int, message: Message) -> list[Reply]:
        """Takes an answer to `JOIN`."""
        self._step = max(self._step, message.step)
        if source != self._leader:
            self._found += [message.tensor] if message.tensor is not None else []
            return self._answered_by(source)
        assert message.tensor is not None, "worker 0 has parameters"
        if not self._resumed:
            self._flat.vector.copy_(message.tensor)
        if not message.version:
            return self._begin()
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
        self.over = True
        if not self._keeper.ready:
            return [self._keeper.answer(Kind.LEAVE)]
        return [(self._leader, Message(Kind.PARAMETERS, self._keeper.values)), self._keeper.answer()]


class Host:
    """Worker 0's side.

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
        """Lets workers in, passes a wish to stop on, and collects models."""
        if message.kind is Kind.EVENT:
            return self._stop()
        if message.kind is Kind.JOIN:
            return self._join(source, message.step)
        if message.kind is Kind.LEAVE:
            return self._leave(source)
        assert message.tensor is not None, "who leaves gives its parameters"
        self._total.add_(message.tensor.to(self._total.device))
        self._gave.add(source)
        return self._end()

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
            successor = rank in self._known
            self._known.add(rank)
            step = max(step, self._keeper.heard.get(rank, 0))
            # The version tells it whether there was one before it, of whom partners may know more.
            return [(rank, Message(Kind.PARAMETERS, self._keeper.copy(), step=step, version=int(successor)))]
        self._waiting[rank] = step
        return self._begin()

    def _begin(self) -> list[Reply]:
        """Lets all begin at once, with the same parameters."""
        if self._begun or not self._waiting.keys() >= self._present:
            return []
        self._begun = True
        self._known = set(self._waiting)
        self._keeper.make_ready(self._waiting[self._own])
        values = self._keeper.copy()
        return [
            self._keeper.answer(step=step)
            if rank == self._own
            else (rank, Message(Kind.PARAMETERS, values, step=step))
            for rank, step in self._waiting.items()
        ]

    def _stop(self) -> list[Reply]:
        if self._keeper.stop:
            return []
        self._keeper.stop = True
        return [(rank, Message(Kind.EVENT, stop=True)) for rank in self._present - {self._own}]

    def _leave(self, rank: int) -> list[Reply]:
        if self._ended:  # its own worker lets it go
            self.over = True
            return []
        self._left.add(rank)
        return self._close()

    def _close(self) -> list[Reply]:
        """Once all have taken their last step, asks all for their models."""
        if not self._left >= self._present:
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
