"""Workers that came through the door, as the launcher knows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.launch.joining.door import Door, News

FAREWELL_S = 5.0
"""How long the launcher keeps the store for guests, once all its own ranks have left."""


class Guests:
    """Keeps the launcher's list of guests in step with the news of the door.

    Args:
        door: of the run.
        name: names a rank for people.
        say: tells people.
        tell_of_loss: tells every rank that a process is gone.
        welcome: tells who has come of those that are gone.
    """

    def __init__(
        self,
        door: Door,
        name: Callable[[int], str],
        say: Callable[[str], None],
        tell_of_loss: Callable[[Peer], None],
        welcome: Callable[[Peer], None],
    ) -> None:
        self.door = door
        self.present: set[Peer] = set()
        self._name = name
        self._say = say
        self._tell_of_loss = tell_of_loss
        self._welcome = welcome
        self._said: set[str] = set()
        self._over = False

    def look(self) -> None:
        """Takes the door's news."""
        for news in self.door.news():
            self._take(news)

    def see_off(self, wait: Callable[[list[Any], float], Any]) -> None:
        """Gives guests a moment to leave, once the run is over.

        Args:
            wait: until one of these is readable, or for so many seconds.
        """
        self._over = True
        self.door.end()
        deadline = time.monotonic() + FAREWELL_S
        self.look()
        while self.present and (left_s := deadline - time.monotonic()) > 0:
            wait([self.door], left_s)
            self.look()

    def sum_up(self) -> None:
        """Says how many visitors were refused; the run is about to say that it has ended, which is its last word."""
        self.look()
        if refused := self.door.refused.total():
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.door.refused.most_common())
            self._say(f"the door refused {refused} {'visitor' if refused == 1 else 'visitors'}: {reasons}")
        self._over = True
        self.door.end()

    def _take(self, news: News) -> None:
        if news.what == "refused":
            if news.reason not in self._said and not self._over:  # the first of each reason; all are counted
                self._said.add(news.reason)
                self._say(f"the door refused {news.who} ({news.reason}): {news.why}")
            return
        name = self._name(news.peer.rank)
        if news.what == "came":
            self.present.add(news.peer)
            self._welcome(news.peer)
            if self._over:
                return
            self._say(f"{news.who} takes the place of {name}")
            return
        self.present.discard(news.peer)
        if news.what == "went" and not self._over:
            self._tell_of_loss(news.peer)
            self._say(f"{name}, which came from {news.who}, {news.why}; its place is vacant")
