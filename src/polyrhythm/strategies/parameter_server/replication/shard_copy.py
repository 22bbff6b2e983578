"""One server's copy of a shard: of the two copies one leads, and the other follows.

    pushers ── ask ──▶ copy that leads ── RELAY, entry ──▶ copy that follows
            ◀─ answer ─               ◀── entry's kind ───

What leads takes what pushers ask, and lets its answers go when the other has the entry too. When it is lost, the
other leads. A successor of the lost server is handed the copy as it is then, between two entries, and follows: so
either may be lost later, as long as the other is whole.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.parameter_server.replication.entry import Entry, Log
from polyrhythm.strategies.parameter_server.replication.handover import packed, unpacked
from polyrhythm.strategies.parameter_server.replication.requests import Requests
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.shard_server import Reply, ShardServer

_BEGINNING = (Kind.CONFIGURE, Kind.PARAMETERS)


@dataclass(frozen=True)
class Place:
    """Where a copy is.

    Attributes:
        other: rank of the server that has the other copy.
        tag: of answers about it: a pusher may ask the same server for another shard as well.
        pushers: ranks that push gradients, in their order.
    """

    other: int
    tag: int
    pushers: tuple[int, ...]


class ShardCopy:
    """A copy.

    Args:
        log: of the shard.
        place: where the copy is.
        leads: whether it leads at the beginning.

    Attributes:
        log: of the shard.
        leads: whether pushers are answered here.
        whole: whether it has all of the shard; a successor's has nothing until it is handed the other's.
        followed: whether the other copy is there.
    """

    def __init__(self, log: Log, place: Place, *, leads: bool) -> None:
        self.log = log
        self.leads = leads
        self.whole = True
        self.followed = True
        self._place = place
        self._requests = Requests()
        self._asking = set(place.pushers) if leads else set()
        self._waiting: list[tuple[int, Message]] = []
        self._unacknowledged: deque[tuple[Entry | None, list[Reply]]] = deque()
        self._awaited = False
        self._incarnation = self._succeeded = 0
        self._heard: Counter[int] = Counter()
        self._entered: Counter[int] = Counter()

    @property
    def part(self) -> ShardServer:
        """The server of the shard."""
        return self.log.part

    @property
    def other(self) -> int:
        """Rank of the server that has the other copy."""
        return self._place.other

    @property
    def done(self) -> bool:
        """Whether the shard is over, and all that was relayed has been acknowledged."""
        return self.part.done and not self._unacknowledged

    def ask(self, pusher: int, message: Message) -> list[Reply]:
        """A pusher asks here, without having asked the other before; who should ask there is told so."""
        if not self.leads:
            return [(pusher, Message(Kind.RELAY, tag=self._place.tag))]
        self._asking.add(pusher)
        return self._enter(pusher, message)

    def ask_after_loss(self, pusher: int, message: Message, losses: int) -> list[Reply]:
        """A pusher asks here, since the other is lost as it knows; what had been asked there maybe once more.

        Args:
            pusher: its rank.
            message: that it asks.
            losses: how many that had the other copy are lost, as it knows; of a successor of those it may not know yet.
        """
        if not self.leads and losses <= self._succeeded:
            return self.ask(pusher, message)
        if not self.leads:
            self._waiting.append((pusher, message))
            return []
        self._asking.add(pusher)
        if message.kind in _BEGINNING and len(self.part.values):  # the other had them before it was lost
            return []
        repeated = self._requests.is_repeated(pusher, message)
        return self._repeat(pusher, message.kind) if repeated else self._enter(pusher, message)

    def follow(self, pusher: int, message: Message, *, again: bool) -> list[Reply]:
        """Takes an entry that the other, which leads, has taken; a LEAVE that stops says how many of a pusher are lost.

        Args:
            pusher: whose entry it is.
            message: the entry.
            again: whether it is none, but the pusher has been answered once more.

        Raises:
            RefusedMessage: it is no entry, or this copy leads.
        """
        if self.leads or not self.whole:
            raise RefusedMessage(Reason.ORDER, f"a {message.kind.name} came to be followed, and none is due")
        kind = message.kind
        if again:
            self.part.answer_again(pusher)
        elif kind is Kind.LEAVE and message.stop:
            self._entered[pusher] = message.version
            self._note(self._taken(pusher, None))
        else:
            self._note(self._taken(pusher, message))
        if kind is Kind.JOIN:  # of a pusher; one of a server asks for a shard
            kind = Kind.PULL
        return [(self.other, Message(kind, version=self.log.shard))]

    def acknowledged(self, message: Message) -> list[Reply]:
        """The other has one more entry; it says so by the entry's kind, so that bytes of steps are told from others.

        Raises:
            RefusedMessage: none is waited for.
        """
        if not self._unacknowledged:
            text = f"a server acknowledged a {message.kind.name} that is not there"
            raise RefusedMessage(Reason.ORDER, text)
        return self._release()

    def lose_pusher(self, pusher: int, losses: int) -> list[Reply]:
        """A pusher is gone, as this server has heard: so many that had its rank."""
        self._waiting = [entry for entry in self._waiting if entry[0] != pusher]
        self._asking.discard(pusher)
        for _, owed in self._unacknowledged:  # what is owed to the lost one is not for its successor
            owed[:] = [reply for reply in owed if reply[0] != pusher]
        self._heard[pusher] = max(self._heard[pusher], losses)
        return self._enter_loss(pusher) if self.leads else []

    def lose_other(self) -> list[Reply]:
        """The other copy is lost: this one leads from now on.

        Raises:
            PeerLost: it has not been handed the shard yet.
        """
        self.followed = self._awaited = False
        if not self.whole:
            raise PeerLost(self.other, f"taking over shard {self.log.shard}, which nobody has any more")
        replies: list[Reply] = []
        while self._unacknowledged:
            replies += self._release()
        if self.leads:
            return replies
        self.leads = True
        for pusher in self._place.pushers:  # of these losses the other had not told
            replies += self._enter_loss(pusher)
        waiting, self._waiting = self._waiting, []
        for pusher, message in waiting:
            with suppress(RefusedMessage):
                replies += self.ask_after_loss(pusher, message, self._succeeded)
        return replies

    def begin_empty(self, incarnation: int) -> Reply:
        """This is the copy of the successor of so many: gives what asks the other for the shard."""
        self._incarnation = incarnation
        self.leads = self.whole = False
        self._asking.clear()
        return self.other, Message(Kind.JOIN, version=self.log.shard)

    def hand_over(self) -> list[Reply]:
        """A successor of the other server is there: gives it all of the shard, as soon as there are parameters.

        Raises:
            RefusedMessage: there is none to be given here.
        """
        if not self.leads or self.followed:
            raise RefusedMessage(Reason.ORDER, f"shard {self.log.shard} was asked for out of turn")
        self._awaited = not len(self.part.values)
        if self._awaited:
            return []
        self.followed = True
        state = packed(self.log, self._requests.facts(), self._entered)
        return [(self.other, Message(Kind.STATE, state, version=self.log.shard, step=self._incarnation))]

    def take_over(self, message: Message) -> None:
        """Takes what `hand_over` gave.

        Raises:
            RefusedMessage: it was not asked for, or is something else.
        """
        if self.whole:
            raise RefusedMessage(Reason.ORDER, f"shard {self.log.shard} came although it is here")
        requests, self._entered = unpacked(self.log, payload(message))
        self._requests.take_facts(requests)
        self._succeeded = message.step
        self.whole = True

    def _repeat(self, pusher: int, kind: Kind) -> list[Reply]:
        """Answers with the parameters as they are now; the other notes as well that the pusher has read those."""
        if kind is Kind.LEAVE:
            return self._behind_all([(pusher, Message(Kind.LEAVE, tag=self._place.tag))])
        if not self._requests.is_answered(pusher):
            return []  # it will be, when its turn comes
        owed = [(to, self._tagged(reply)) for to, reply in self.part.answer_again(pusher)]
        if not self.followed:
            return owed
        self._unacknowledged.append((None, owed))
        return [self._announcement(pusher, again=True), (self.other, Message(kind))]

    def _enter_loss(self, pusher: int) -> list[Reply]:
        if self._heard[pusher] <= self._entered[pusher]:
            return []
        self._entered[pusher] = self._heard[pusher]
        return [] if self.part.done else self._enter(pusher, None)

    def _enter(self, pusher: int, message: Message | None) -> list[Reply]:
        """Takes an entry; its answers wait until the other copy has it as well."""
        if message is not None and self.part.done:
            # The other may be through, and acknowledges nothing any more.
            return [(to, self._tagged(reply)) for to, reply in self.part.on_message(pusher, message)]
        relayed = message
        if message is None:
            relayed = Message(Kind.LEAVE, version=self._entered[pusher], stop=True)
        elif message.kind is Kind.PARAMETERS:  # which this copy changes in place from now on
            relayed = message.received()
        entry = self.log.take(pusher, message)  # before it is noted: it may be refused
        self._note(entry)
        owed = [(to, self._tagged(reply)) for to, reply in entry.replies if to in self._asking]
        if message is not None and message.kind is Kind.LEAVE:
            # Otherwise nobody knew that both have it.
            owed.append((pusher, Message(Kind.LEAVE, tag=self._place.tag)))
        self._unacknowledged.append((entry, owed))
        if not self.followed:
            return self._release() + (self.hand_over() if self._awaited else [])
        assert relayed is not None, "every entry is a message to the other copy"
        return [self._announcement(pusher), (self.other, relayed)]

    def _announcement(self, pusher: int, *, again: bool = False) -> Reply:
        """Tells the other copy whose entry comes next, or whose question that has been answered again."""
        number = self._place.pushers.index(pusher)
        return self.other, Message(Kind.RELAY, step=number, version=self.log.shard, stop=again)

    def _taken(self, pusher: int, message: Message | None) -> Entry:
        entry = self.log.take(pusher, message)
        self.log.tell(entry)
        return entry

    def _note(self, entry: Entry) -> None:
        if entry.message is None:
            self._requests.forget(entry.source)
        else:
            self._requests.note(entry.source, entry.message)
        for to, _ in entry.replies:
            self._requests.answer(to)

    def _behind_all(self, replies: list[Reply]) -> list[Reply]:
        """Keeps replies back until the other copy has all that they may tell of."""
        if not self._unacknowledged:
            return replies
        self._unacknowledged[-1][1].extend(replies)
        return []

    def _release(self) -> list[Reply]:
        entry, owed = self._unacknowledged.popleft()
        if entry is not None:
            self.log.tell(entry)
        return owed

    def _tagged(self, reply: Message) -> Message:
        return reply._replace(tag=self._place.tag) if self._place.tag else reply
