"""How a worker that does not lead comes to the next formation: by asking the leader, or whoever leads after it.

worker                          leader     its successor
  BROKEN ────────────────────────▶ dies
  waits: no word of the old one is answered
  ◀──────────────────────────────────────── LEAD
  BROKEN, with the formation that broke ───▶ musters
"""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.errors import PeerLost
from polyrhythm.roles.line import Line
from polyrhythm.roles.regrouping.formation import NOTHING, TAG, Broken, Formation


class MemberSide:
    """One worker's.

    Args:
        line: to whoever leads.
        incarnation: how many have had this worker's number before it.
    """

    def __init__(self, line: Line, incarnation: int) -> None:
        self._line = line
        self._newcomer = Broken(round=0, done=NOTHING, incarnation=incarnation)

    def breaks_off(self, round_: int, step: int, *, wait: bool) -> bool:
        """Whether the leader has called all to regroup before this step."""
        call = self._line.call
        return call is not None and call[0] == round_ and step >= call[1]

    def first_formation(self) -> Formation:
        """Waits for a successor's first one; that it is there has been said, and is said again to another leader."""
        return self._answer() or self.next_formation(self._newcomer)

    def next_formation(self, word: Broken) -> Formation:
        """Tells the leader, and waits for its word."""
        while True:
            self._line.await_leader()
            known = word.formation is None or word.formation.leader == self._line.leader
            self._line.answer((replace(word, formation=None) if known else word).message())
            if (formation := self._answer()) is not None:
                return formation

    def _answer(self) -> Formation | None:
        """Waits for the leader's word; None: it is lost."""
        if self._line.away:
            return None
        try:
            return Formation.of(self._line.receive(TAG))
        except PeerLost:
            if not self._line.bears:
                raise
            return None
