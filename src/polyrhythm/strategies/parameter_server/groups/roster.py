"""Who is in a group now, as the first server keeps it; the server's word takes the place of an agreement.

member breaks a step off ─▶ BROKEN(round) ──────┐
successor of a lost one  ─▶ JOIN(incarnation) ──┼─▶ all of the group that are there have said so ─▶ REGROUP
a member is lost ───────────────────────────────┘
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from polyrhythm.communication.message import Kind, Message, pack_json, unpack_json
from polyrhythm.strategies.parameter_server.serving.admission import payload

WORD_TAG = 1
"""Nothing else that a server sends a worker can be taken for a word about its group."""


@dataclass(frozen=True)
class Formation:
    """The members of a group that go on together.

    Attributes:
        round: how many formations of the group there have been before.
        ranks: of the members, who has been there longest first; that one speaks for the group.
        incarnations: how many have had each one's rank before it.
    """

    round: int
    ranks: tuple[int, ...]
    incarnations: tuple[int, ...]

    def message(self) -> Message:
        """Packs it to be sent."""
        return Message(Kind.REGROUP, pack_json(asdict(self)), tag=WORD_TAG)

    @classmethod
    def of(cls, message: Message) -> Formation:
        """Reads what `message` wrote."""
        told = unpack_json(payload(message))
        return cls(told["round"], tuple(told["ranks"]), tuple(told["incarnations"]))


class Roster:
    """Keeps track of one group's members, from formation to formation.

    Args:
        ranks: of the members that it begins with; the first speaks for it.

    Attributes:
        ranks: of the present formation, with those that have been lost since.
        round: of the present formation.
        gone: which of the ranks are lost.
        waiting: members that have broken a step off.
        absent: by rank, the stretches of steps, `[first, one past the last]`, that a formation without it has begun
            with; the last is None while it is not back.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.round = 0
        self.gone: set[int] = set()
        self.waiting: set[int] = set()
        self._entering: dict[int, int] = {}
        self._incarnations = dict.fromkeys(ranks, 0)
        self._called = False
        self.absent: dict[int, list[list[int | None]]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nobody of the group is there."""
        return self.gone.issuperset(self.ranks) and not self._entering

    @property
    def is_complete(self) -> bool:
        """Whether all who are there wait for the next formation."""
        staying = [rank for rank in self.ranks if rank not in self.gone]
        return bool(self.waiting or self._entering) and self.waiting.issuperset(staying)

    def may_enter(self, rank: int) -> bool:
        """Whether a rank can be that of a successor: who had it before is lost."""
        return rank in self.gone or rank not in self.ranks

    def hear(self, rank: int, round_: int) -> None:
        """Notes that a member has broken a step off; what it said of an earlier formation counts no more."""
        if round_ == self.round and rank in self.ranks and rank not in self.gone:
            self.waiting.add(rank)

    def enter(self, rank: int, incarnation: int) -> None:
        """Notes that a successor wants to take part."""
        self._entering[rank] = incarnation

    def lose(self, rank: int) -> None:
        """Strikes a rank off."""
        self._entering.pop(rank, None)
        self.waiting.discard(rank)
        self.gone.add(rank)

    def to_call(self) -> int | None:
        """Gives who must be told, once a formation, that somebody waits to be let in; None if nobody must be."""
        speaker = self.ranks[0]
        if not self._entering or self._called or speaker in self.gone | self.waiting:
            return None
        self._called = True
        return speaker

    def form(self, steps: int) -> Formation:
        """Makes the next formation of all who wait: first those who have been there, in their order.

        Args:
            steps: that the group has done.
        """
        staying = [rank for rank in self.ranks if rank not in self.gone]
        self._incarnations |= self._entering
        self.ranks = (*staying, *sorted(self._entering))
        self.round += 1
        self._note_absent(steps)
        self._begin()
        return Formation(self.round, self.ranks, tuple(self._incarnations[rank] for rank in self.ranks))

    def dismiss(self) -> list[int]:
        """Gives those who wait, for whom there will be no formation."""
        waiting = sorted(self.waiting | set(self._entering))
        self.waiting.clear()
        self._entering.clear()
        return waiting

    def _note_absent(self, steps: int) -> None:
        for rank in self._incarnations:
            stretches = self.absent.setdefault(rank, [])
            is_open = bool(stretches) and stretches[-1][1] is None
            if rank in self.ranks and is_open:
                stretches[-1][1] = steps
            elif rank not in self.ranks and not is_open:
                stretches.append([steps, None])

    def _begin(self) -> None:
        self.waiting.clear()
        self._entering.clear()
        self.gone.clear()
        self._called = False
