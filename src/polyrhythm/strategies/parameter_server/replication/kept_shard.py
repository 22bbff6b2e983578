"""A shard that a server keeps for another: it follows that one, and goes on with the shard when that one is lost."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from polyrhythm.communication.message import Kind, Message, RefusedMessage
from polyrhythm.strategies.parameter_server.replication.entry import Entry, Log
from polyrhythm.strategies.parameter_server.replication.requests import Requests
from polyrhythm.strategies.parameter_server.serving.shard_server import Reply, ShardServer

KEPT = 1
"""Tag of the answers for a kept shard: a worker may ask the same server for its own as well."""

_BEGINNING = (Kind.CONFIGURE, Kind.PARAMETERS)


class KeptShard:
    """One server's.

    Until the primary is lost, its entries come in order, and what workers ask for here waits: the news of the loss is
    behind all that the primary had sent. From then on this server decides alone.

    Args:
        log: of the shard.
        pushers: ranks that push gradients.

    Attributes:
        log: of the shard.
        serves: whether workers ask for it here.
    """

    def __init__(self, log: Log, pushers: tuple[int, ...]) -> None:
        self.log = log
        self.serves = False
        self._pushers = pushers
        self._requests = Requests()
        self._waiting: list[tuple[int, Message]] = []
        self._moved: set[int] = set()
        self._heard: Counter[int] = Counter()
        self._followed: Counter[int] = Counter()

    @property
    def part(self) -> ShardServer:
        """The server of the shard."""
        return self.log.part

    def follow(self, pusher: int, message: Message | None) -> None:
        """Takes an entry that the primary has taken; a pusher that is gone has no message."""
        if message is None:
            self._followed[pusher] += 1
        self._note(pusher, message)
        self._keep_back(self._taken(pusher, message))

    def ask(self, pusher: int, message: Message) -> list[Reply]:
        """A pusher asks here, since the primary is lost; gives the replies to those who do so."""
        if not self.serves:
            self._waiting.append((pusher, message))
            return []
        self._moved.add(pusher)
        if message.kind in _BEGINNING and len(self.part.values):  # the primary had them before it was lost
            return []
        if not self._requests.is_repeated(pusher, message):
            entry = self._taken(pusher, message)  # before it is noted: it may be refused
            self._note(pusher, message)
            return self._let_go(entry)
        if message.kind is Kind.LEAVE:
            return [(pusher, Message(Kind.LEAVE, tag=KEPT))]
        if not self._requests.is_answered(pusher):
            return []  # it will be, when its turn comes
        return [(to, reply._replace(tag=KEPT)) for to, reply in self.part.answer_again(pusher)]

    def lose(self, pusher: int) -> list[Reply]:
        """A pusher is gone, as this server itself has heard."""
        self._waiting = [entry for entry in self._waiting if entry[0] != pusher]
        self._moved.discard(pusher)
        if not self.serves:
            self._heard[pusher] += 1
            return []
        self._note(pusher, None)
        return self._let_go(self._taken(pusher, None))

    def promote(self) -> list[Reply]:
        """The primary is lost: from now on workers ask here."""
        self.serves = True
        replies: list[Reply] = []
        for pusher in self._pushers:
            if self._heard[pusher] > self._followed[pusher]:  # of this loss the primary had not told
                replies += self.lose(pusher)
        waiting, self._waiting = self._waiting, []
        for pusher, message in waiting:
            with suppress(RefusedMessage):
                replies += self.ask(pusher, message)
        return replies

    def _taken(self, pusher: int, message: Message | None) -> Entry:
        entry = self.log.take(pusher, message)
        self.log.tell(entry)
        return entry

    def _note(self, pusher: int, message: Message | None) -> None:
        if message is None:
            self._requests.forget(pusher)
        else:
            self._requests.note(pusher, message)

    def _keep_back(self, entry: Entry) -> None:
        for to, _ in entry.replies:
            self._requests.answer(to)

    def _let_go(self, entry: Entry) -> list[Reply]:
        """Gives the replies to those who ask here; the others are answered again when they do."""
        self._keep_back(entry)
        if entry.message is not None and entry.message.kind is Kind.LEAVE:
            entry.replies.append((entry.source, Message(Kind.LEAVE)))
        return [(to, reply._replace(tag=KEPT)) for to, reply in entry.replies if to in self._moved]
