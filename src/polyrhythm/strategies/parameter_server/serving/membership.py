"""Membership of a server: its pushers, those that are lost, and at which round a replacement enters.

`PusherRegistry` knows a server's pushers, the lost ones, those that wait for the first parameters, and the
end of the run. The end of several servers is one end: rank 0 asks all for the final parameters, and lets them
go (a second LEAVE) once it has all. From the first of its two requests on, a replacement is asked to leave.

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
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare


class PusherRegistry:
    """A server's list of its pushers.

    Args:
        spares: number of pushers that may be lost at once; 0: the run decides.
        spared_by: limiting rule, for an error's text.

    Attributes:
        pushers: ranks of the pushers.
        numbers: numbers of the pushers, from 0, by rank.
        asking: ranks that wait for the first parameters.
        final: rank that has asked for the final parameters, or None.
        done: whether that one has let the servers go.
        ejected: number of evictions.
    """

    def __init__(self, pushers: tuple[int, ...], spares: int = 0, spared_by: str = "") -> None:
        self.pushers = pushers
        self.numbers = {rank: number for number, rank in enumerate(pushers)}
        self.asking: list[int] = []
        self.final: int | None = None
        self.done = False
        self.ejected = 0
        self._spares = spares
        self._spared_by = spared_by
        self._left: set[int] = set()
        self._lost: set[int] = set()
        self._dismissed: set[int] = set()

    @property
    def present(self) -> int:
        """Number of present pushers."""
        return len(self.pushers) - len(self._left)

    @property
    def lost(self) -> bool:
        """Whether any pusher is lost and has no replacement yet."""
        return bool(self._lost)

    def is_there(self, rank: int) -> bool:
        """Return whether a pusher has not left."""
        return rank not in self._left

    def enter(self, rank: int) -> bool:
        """Admit a pusher or its replacement; return False where the run is ending and it is too late."""
        if rank in self._left:
            if self.final is not None:  # it might change one shard and not another
                return False
            self._left.remove(rank)
            self._lost.discard(rank)
            self._dismissed.discard(rank)
        return True

    def leave(self, rank: int) -> bool:
        """Record that a pusher has left or failed; return whether it was present.

        The second leave of the pusher that has the final parameters ends the run.
        """
        if rank in self.asking:
            self.asking.remove(rank)
        if rank in self._left:
            self.done |= self.final == rank
            return False
        self._left.add(rank)
        return True

    def lose(self, rank: int) -> bool:
        """Take note that a pusher is lost, as in `leave`; its replacement has to ask for the final parameters again."""
        if self.final == rank:
            self.final = None
        return self.leave(rank)

    def miss(self, rank: int) -> None:
        """Count a present pusher as failed until a replacement enters; raise `RunError` if too many have failed."""
        if rank not in self._left:
            self._lost.add(rank)
        if 0 < self._spares < len(self._lost):
            ranks = ", ".join(map(str, sorted(self._lost)))
            raise RunError(
                f"{len(self._lost)} workers are lost (ranks {ranks}), and {self._spared_by} can spare "
                f"{self._spares}: continue with --resume, or start a new run with more spare ones"
            )

    def dismiss(self, rank: int) -> None:
        """Note that a pusher is asked to leave."""
        self.ejected += 1
        self._dismissed.add(rank)

    def was_dismissed(self, rank: int) -> bool:
        """Return whether a pusher was asked to leave, and has no replacement."""
        return rank in self._dismissed

    def take_asking(self) -> list[int]:
        """Return the ranks that wait for the first parameters, which wait no more."""
        asking, self.asking = self.asking, []
        return asking

    @property
    def ready_to_end(self) -> int | None:
        """Rank that can be given the final parameters now, since no pusher can change them any more; or None."""
        return self.final if not self.present else None


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
