"""What a server says of itself now and then."""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.events import ServerProgress
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.world import World
from polyrhythm.strategies.server_part import ServerPart

REPORT_EVERY_S = 0.5
AT_ONCE_S = 1e-4
"""A message that is there within this time is taken to have been waiting."""


class Reporter:
    """Says now and then what a server has done since it last said so.

    Args:
        index: of the server.
        part: of the server.
        world: where it is.

    Attributes:
        said_at_s: when it last did.
        updating_s: for how long its part has handled messages since then.
    """

    def __init__(self, index: int, part: ServerPart, world: World) -> None:
        self._index = index
        self._part = part
        self._now = world.clock.now
        self._started_at = self.said_at_s = self._now()
        # Parts that may have thousands of pushers count themselves what is new, instead of comparing thousands of ages.
        self._latest_staleness = getattr(part, "latest_staleness", None) or _Difference(part)
        self._begun = False
        self._wait_s = 0.0
        self._taken = 0
        self._waits = 0
        self.updating_s = 0.0

    def took(self, looked_at_s: float, now_s: float) -> None:
        """Counts a message that has just come, and how long the server has waited for it.

        Args:
            looked_at_s: when it began to wait.
            now_s: the present time.
        """
        if not self._begun:  # training starts with the first step; event times count from there
            self._begun = True
            self._started_at = self.said_at_s = now_s
            self.updating_s = 0.0
        waited_s = now_s - looked_at_s
        self._taken += 1
        if waited_s > AT_ONCE_S:
            self._waits += 1
            self._wait_s += waited_s

    def tell(self, channel: LeaderChannel) -> None:
        """Tells the leader."""
        channel.send(Message(Kind.EVENT, pack_json(self._event().to_json())))

    def tell_the_rest(self, channel: LeaderChannel) -> None:
        """Tells the leader, if there is something left to be said."""
        if self._taken:
            self.tell(channel)

    def _event(self) -> ServerProgress:
        """Gives what has been done since the last call, and starts anew."""
        now = self._now()
        seconds = now - self.said_at_s
        idle_s = min(self._wait_s, seconds)  # the wait for the first message began before
        event = ServerProgress(
            time_s=now - self._started_at,
            server=self._index,
            version=self._part.version,
            staleness=self._latest_staleness(),
            seconds=seconds,
            busy_share=1 - idle_s / seconds if seconds > 0 else 0.0,
            queue=self._taken / max(1, self._waits),
            dropped=getattr(self._part, "dropped", 0),  # only some drop any
            updating_s=self.updating_s,
        )
        self.said_at_s = now
        self._wait_s, self._taken, self._waits, self.updating_s = 0.0, 0, 0, 0.0
        return event


class _Difference:
    """What a part's counts of staleness have gained since they were last asked for."""

    def __init__(self, part: ServerPart) -> None:
        self._part = part
        self._said = Counter(part.staleness)

    def __call__(self) -> dict[int, int]:
        said, self._said = self._said, Counter(self._part.staleness)
        return dict(self._said - said)
