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
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.regrouping.formation import NOTHING, TAG, Broken, Formation


class RemoteFormations:
    """Gets one worker's formations from the leader; see `FormationSource`.

    Args:
        channel: to whoever leads.
        incarnation: how many have had this worker's number before it.
    """

    def __init__(self, channel: LeaderChannel, incarnation: int) -> None:
        self._channel = channel
        self._newcomer = Broken(round=0, done=NOTHING, incarnation=incarnation)

    def breaks_off(self, round_: int, step: int, *, wait: bool) -> bool:
        """Whether the leader has asked all to regroup before this step."""
        call = self._channel.call
        return call is not None and call[0] == round_ and step >= call[1]

    def first_formation(self) -> Formation:
        """Waits for a successor's first formation; asks again if the leader that it has asked is lost."""
        return self._answer() or self.next_formation(self._newcomer)

    def next_formation(self, word: Broken) -> Formation:
        """Tells the leader how far this worker has come, and waits for the formation."""
        while True:
            self._channel.await_leader()
            known = word.formation is None or word.formation.leader == self._channel.leader
            self._channel.answer((replace(word, formation=None) if known else word).message())
            if (formation := self._answer()) is not None:
                return formation

    def _answer(self) -> Formation | None:
        """Waits for the leader's answer; None where the leader is lost."""
        if self._channel.leader_lost:
            return None
        try:
            return Formation.of(self._channel.receive(TAG))
        except PeerLost:
            if not self._channel.survives_leader:
                raise
            return None
