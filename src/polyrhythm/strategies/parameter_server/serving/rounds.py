"""Rounds that workers take together, and at which of them a successor comes in: at the same one on all servers.

successor ── PULL ──▶ every server, which ends no round until it hears more
          ◀─ JOIN(the round that it is at) ──
          ── JOIN(the latest of these) ──▶ every server: goes on to that round without it
          ◀─ PARAMETERS ── as soon as that round begins

Were it let in wherever it comes, it would read one shard an update later than another, and servers that compare whole
gradients would not be of one mind about whose there are. Nobody waits in a circle: the questions are answered at once,
and of those who have come in, each gives every server its part of every round.
"""

from __future__ import annotations

from polyrhythm.communication.message import Reason, RefusedMessage

_NO_STEP = -1
_MOST_APART = 1000
"""Rounds by which no two servers differ: by one or two, since each worker gives its part of a round to all."""


class Rounds:
    """One server's count of rounds, and who is to come in at which. Workers are numbered from 0.

    Args:
        workers: how many there are.

    Attributes:
        number: of the round under way, from 0; one counts if somebody is answered in it, who is in the same elsewhere.
    """

    def __init__(self, workers: int) -> None:
        self.number = 0
        self._invited: set[int] = set()
        self._coming: set[int] = set()
        self._begins_at = [0] * workers
        self._next = [_NO_STEP] * workers
        """The step that a worker's next gradient must be of; none, for its first."""

    @property
    def held_up(self) -> bool:
        """Whether a successor has still to say at which round it comes in."""
        return bool(self._invited)

    @property
    def outside(self) -> int:
        """How many successors have not come in yet."""
        return len(self._invited) + len(self._coming)

    def is_outside(self, worker: int) -> bool:
        """Whether a worker is a successor that has not come in yet."""
        return worker in self._invited or worker in self._coming

    def check_inside(self, worker: int) -> None:
        """Lets a worker ask or push that takes part in rounds.

        Raises:
            RefusedMessage: it is a successor that has not come in yet.
        """
        if self.is_outside(worker):
            raise RefusedMessage(
                Reason.ORDER, f"worker {worker} went on before the round that it comes in at"
            )

    def invite(self, worker: int, *, later: bool) -> None:
        """A successor asks to be let in.

        Args:
            worker: its number.
            later: whether something that its predecessor left is for the round under way.
        """
        self.forget(worker)
        self._invited.add(worker)
        self._begins_at[worker] = self.number + later

    def invitation(self, worker: int) -> int | None:
        """Gives the earliest round at which a successor can come in here; None where it is not to say which."""
        return self._begins_at[worker] if worker in self._invited else None

    def accept(self, worker: int, number: int) -> None:
        """A successor says at which round it comes in.

        Raises:
            RefusedMessage: it was not asked, or named one that is over, or that no server can be at.
        """
        if worker not in self._invited:
            raise RefusedMessage(Reason.ORDER, f"worker {worker} named a round, and was not asked for one")
        earliest = self._begins_at[worker]
        if not earliest <= number <= earliest + _MOST_APART:
            raise RefusedMessage(
                Reason.STEP,
                f"worker {worker} would come in at round {number}, where {earliest} is the first for it",
            )
        self._invited.discard(worker)
        self._coming.add(worker)
        self._begins_at[worker] = number

    def let_in(self, *, alone: bool) -> list[int]:
        """Gives the successors that come in now, in their order.

        Args:
            alone: whether nobody else is there, so that the rounds before theirs are not taken.
        """
        if alone and self._coming:
            self.number = max(self.number, min(self._begins_at[worker] for worker in self._coming))
        entered = sorted(worker for worker in self._coming if self._begins_at[worker] <= self.number)
        self._coming.difference_update(entered)
        return entered

    def forget(self, worker: int) -> None:
        """A worker is gone."""
        self._invited.discard(worker)
        self._coming.discard(worker)
        self._next[worker] = _NO_STEP

    def is_next(self, worker: int, step: int) -> bool:
        """Whether a gradient of a step is this worker's part in a round, and not one that comes twice."""
        return self._next[worker] in (_NO_STEP, step)

    def take(self, worker: int, step: int) -> None:
        """A worker has given its part, of a step."""
        self._next[worker] = step + 1
