"""Rounds of a server, and at which one a replacement enters.

`Rounds` counts the rounds that workers take together, which a replacement enters at the same one on all
servers:

    replacement ─ PULL ─▶ every server, which ends no round until the next message
              ◀─ JOIN(its present round) ──
              ── JOIN(the latest of these) ──▶ every server: continues to that round without it
              ◀─ PARAMETERS ── as soon as that round begins

If it were admitted at a different round on each server, it would read one shard an update later than another,
and servers that compare whole gradients would not agree about the present ones. There is no cyclic wait: the
questions are answered at once, and each worker that has entered gives every server its part of every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare


@dataclass(frozen=True)
class Entrance:
    """First round of a replacement: the earliest that a server allows, or the one that the replacement requests."""

    round: int

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(Kind.JOIN, step=self.round)

    @classmethod
    def of(cls, message: Message) -> Entrance:
        """Unpack the result of `message`; raise `RefusedMessage` if it has further fields."""
        admit_bare(message._replace(step=0))
        return cls(message.step)


def latest_entrance(answers: Sequence[Message]) -> Message | None:
    """Return the JOIN to send to all servers: the latest first round among theirs; None unless all have sent one."""
    if any(answer.kind is not Kind.JOIN for answer in answers):
        return None
    return Entrance(max(answer.step for answer in answers)).message()


_NO_STEP = -1
_MOST_APART = 1000
"""Rounds by which no two servers differ: by one or two, since each worker gives its part of a round to all."""


class Rounds:
    """One server's count of rounds, and the first round of each entering worker. Workers are numbered from 0.

    Attributes:
        number: number of the round in progress, from 0; a round counts if a worker that is in the same round
            elsewhere is answered in it.
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
        """Whether a replacement has still to announce its first round."""
        return bool(self._invited)

    @property
    def outside(self) -> int:
        """Number of replacements that have not entered yet."""
        return len(self._invited) + len(self._coming)

    def is_outside(self, worker: int) -> bool:
        """Return whether a worker is a replacement that has not entered yet."""
        return worker in self._invited or worker in self._coming

    def check_inside(self, worker: int) -> None:
        """Raise `RefusedMessage` if a worker that pulls or pushes is a replacement that has not entered yet."""
        if self.is_outside(worker):
            raise RefusedMessage(Reason.ORDER, f"worker {worker} continued before the round that it joins at")

    def invite(self, worker: int, *, later: bool) -> None:
        """Invite a replacement; `later`: something that its predecessor left is for the round in progress."""
        self.forget(worker)
        self._invited.add(worker)
        self._begins_at[worker] = self.number + later

    def invitation(self, worker: int) -> int | None:
        """Return the earliest possible round for a replacement here; None where it need not announce one."""
        return self._begins_at[worker] if worker in self._invited else None

    def accept(self, worker: int, number: int) -> None:
        """Set the first round of a replacement; raise `RefusedMessage` if it is impossible."""
        if worker not in self._invited:
            raise RefusedMessage(Reason.ORDER, f"worker {worker} named a round, and was not asked for one")
        earliest = self._begins_at[worker]
        if not earliest <= number <= earliest + _MOST_APART:
            raise RefusedMessage(
                Reason.STEP,
                f"worker {worker} would join at round {number}, where {earliest} is the first for it",
            )
        self._invited.discard(worker)
        self._coming.add(worker)
        self._begins_at[worker] = number

    def admit(self, *, alone: bool) -> list[int]:
        """Return the replacements that enter now; `alone`: skip rounds before theirs, without workers."""
        if alone and self._coming:
            self.number = max(self.number, min(self._begins_at[worker] for worker in self._coming))
        entered = sorted(worker for worker in self._coming if self._begins_at[worker] <= self.number)
        self._coming.difference_update(entered)
        return entered

    def forget(self, worker: int) -> None:
        """Handle the loss of a worker."""
        self._invited.discard(worker)
        self._coming.discard(worker)
        self._next[worker] = _NO_STEP

    def is_next(self, worker: int, step: int) -> bool:
        """Return whether a gradient of a step is this worker's part of a round, and no repetition."""
        return self._next[worker] in (_NO_STEP, step)

    def take(self, worker: int, step: int) -> None:
        """A worker has given its part, of a step."""
        self._next[worker] = step + 1
