"""One of the two copies of a shard: it leads, or follows the other one.

    pushers ── ask ──▶ copy that leads ── RELAY, entry ──▶ copy that follows
            ◀─ answer ─               ◀── entry's kind ───

The leading copy takes the pushers' requests, and releases its answers when the other has the entry too. When
it is lost, the other leads. A replacement of the lost server receives the copy as it is then, in one message,
and follows: so either may be lost later, as long as the other is whole. `Requests` has every pusher's last
request, so that a repeated request is answered, and not executed twice. Pushes that are not answered are
repeated from the last one that an answer to a fetch has confirmed.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from typing import Any

from polyrhythm.communication.message import (
    Kind,
    Message,
    Reason,
    RefusedMessage,
)
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.parameter_server.replication.messages import (
    AboutShard,
    Handover,
    PusherLost,
    Relay,
)
from polyrhythm.strategies.parameter_server.replication.shard_log import Entry, Log, packed, unpacked
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.parts import PushParts
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from polyrhythm.strategies.parameter_server.serving.session import ServerSession

_BEGINNING = (Kind.CONFIGURE, Kind.PARAMETERS)


class ShardCopy:
    """A copy of a shard.

    Args:
        tag: tag of answers about it: a pusher may ask the same server for another shard as well.
        pushers: ranks that push gradients, in their order.

    Attributes:
        log: log of the shard.
        other: rank of the server that has the other copy.
        leads: whether pushers are answered here.
        whole: whether it has all of the shard; a replacement's has nothing until it is handed the other's.
        followed: whether the other copy is there.
    """

    def __init__(self, log: Log, other: int, tag: int, pushers: tuple[int, ...], *, leads: bool) -> None:
        self.log = log
        self.leads = leads
        self.whole = True
        self.followed = True
        self.other = other
        self._tag = tag
        self._pushers = pushers
        self._requests = Requests()
        self._asking = set(pushers) if leads else set()
        self._waiting: list[tuple[int, Message]] = []
        self._unacknowledged: deque[tuple[Entry | None, list[Reply]]] = deque()
        self._awaited = False
        self._parts = PushParts()
        self._relayed: set[int] = set()
        """Pushers with a push in progress that both copies have in full."""
        self._missed: dict[int, int] = {}
        """Steps of pushers with parts that arrived before this copy led."""
        self._dropped: dict[int, int] = {}
        """Pushers with a push that was dropped before this copy led, and the losses that they knew of."""
        self._generation = self._succeeded = 0
        self._latest: Counter[int] = Counter()
        self._entered: Counter[int] = Counter()

    @property
    def part(self) -> ServerSession:
        """The server of the shard."""
        return self.log.part

    @property
    def done(self) -> bool:
        """Whether the shard is over, and all that was relayed has been acknowledged."""
        return self.part.done and not self._unacknowledged

    def ask(self, pusher: int, message: Message, losses: int = 0) -> list[Reply]:
        """Handle a pusher's first request; redirect it if it should ask the other copy.

        A push that is not answered is dropped then, with all that follows, until the pusher repeats it after a later
        loss: it learns of that by its next request with an answer.
        """
        if self.leads and pusher not in self._dropped:
            self._asking.add(pusher)
            return self._enter(pusher, message)
        if message.kind is Kind.PART:  # its push will be sent back
            self._missed[pusher] = message.step
            return []
        if message.kind is Kind.PUSH and not self.part.answers_pushes:
            self._dropped.setdefault(pusher, losses)
            return []
        return [(pusher, Message(Kind.RELAY, tag=self._tag))]

    def ask_after_loss(self, pusher: int, message: Message, losses: int) -> list[Reply]:
        """Answer a pusher that has lost the other copy; its requests there may be repeated.

        `losses` are those of the other copy that the pusher knows of; it may not know of a replacement yet.
        """
        if losses > self._dropped.get(pusher, losses):
            del self._dropped[pusher]
        if pusher in self._dropped or (not self.leads and losses <= self._succeeded):
            return self.ask(pusher, message, losses)
        if not self.leads:
            self._waiting.append((pusher, message))
            return []
        self._asking.add(pusher)
        if message.kind in _BEGINNING and len(self.part.values):  # the other had them before it was lost
            return []
        repeated = self._requests.is_repeated(pusher, message)
        return self._repeat(pusher, message.kind) if repeated else self._enter(pusher, message)

    def follow(self, pusher: int, message: Message, *, again: bool) -> list[Reply]:
        """Take an entry that the other, which leads, has taken; `again`: the pusher has only been answered once more.

        Raise `RefusedMessage` if this copy leads.
        """
        if self.leads or not self.whole:
            raise RefusedMessage(
                Reason.ORDER, f"a {message.kind.name} arrived for replication, and none is due"
            )
        kind = message.kind
        if again:
            self.part.answer_again(pusher)
        elif kind is Kind.PART:
            self._parts.take(pusher, message, self.part.values)
            return []
        elif (lost := PusherLost.of(message)) is not None:
            self._entered[pusher] = lost.losses
            self._parts.forget(pusher)
            self._note(self._taken(pusher, None))
        else:
            entry = self._taken(pusher, self._joined(pusher, message))
            self._note(entry)
            self._parts.cut(entry.replies)  # the copy that leads answers
        return [(self.other, AboutShard(kind, self.log.shard).message())]

    def acknowledged(self, word: AboutShard) -> list[Reply]:
        """Release the answers to the oldest entry, which the other has too; raise `RefusedMessage` if there is none."""
        if not self._unacknowledged:
            text = f"a server acknowledged a {word.kind.name} that is not there"
            raise RefusedMessage(Reason.ORDER, text)
        return self._release()

    def lose_pusher(self, pusher: int, losses: int) -> list[Reply]:
        """Handle the loss of a pusher that this server has detected, as a number of losses of its rank."""
        self._waiting = [entry for entry in self._waiting if entry[0] != pusher]
        self._asking.discard(pusher)
        self._dropped.pop(pusher, None)
        for _, owed in self._unacknowledged:  # the lost one's answers are not for its replacement
            owed[:] = [reply for reply in owed if reply[0] != pusher]
        self._latest[pusher] = max(self._latest[pusher], losses)
        return self._enter_loss(pusher) if self.leads else []

    def lose_other(self) -> list[Reply]:
        """Lead from now on, since the other copy is lost; raise `PeerLost` if this one has nothing yet."""
        self.followed = self._awaited = False
        self._relayed.clear()
        if not self.whole:
            raise PeerLost(self.other, f"taking over shard {self.log.shard}, which no server has any more")
        replies: list[Reply] = []
        while self._unacknowledged:
            replies += self._release()
        if self.leads:
            return replies
        self.leads = True
        self._parts.forget_unfinished()  # pushers begin again
        for pusher in self._pushers:  # the other had not reported these losses
            replies += self._enter_loss(pusher)
        waiting, self._waiting = self._waiting, []
        for pusher, message in waiting:
            with suppress(RefusedMessage):
                replies += self.ask_after_loss(pusher, message, self._succeeded)
        return replies

    def begin_empty(self, generation: int) -> Reply:
        """Begin as the copy of a replacement of generation `generation`: return the request for the shard."""
        self._generation = generation
        self.leads = self.whole = False
        self._asking.clear()
        return self.other, AboutShard(Kind.COPY, self.log.shard).message()

    def transfer(self) -> list[Reply]:
        """Give a replacement of the other server all of the shard, as soon as there are parameters."""
        if not self.leads or self.followed:
            raise RefusedMessage(Reason.ORDER, f"shard {self.log.shard} was asked for out of turn")
        self._awaited = not len(self.part.values)
        if self._awaited:
            return []
        self.followed = True
        self._relayed.clear()
        state = packed(self.log, self._requests.facts(), self._entered)
        return [(self.other, Handover(self.log.shard, self._generation, state).message())]

    def take_over(self, handover: Handover) -> None:
        """Accept the result of `transfer`; raise `RefusedMessage` if it was not requested or is malformed."""
        if self.whole:
            raise RefusedMessage(Reason.ORDER, f"shard {self.log.shard} arrived although it is here")
        requests, self._entered = unpacked(self.log, payload(handover.message()))
        self._requests.take_facts(requests)
        self._succeeded = handover.generation
        self.whole = True

    def _repeat(self, pusher: int, kind: Kind) -> list[Reply]:
        """Answer with the parameters as they are now; the other notes as well that the pusher has read those."""
        if kind is Kind.LEAVE:
            return self._behind_all([(pusher, Message(Kind.LEAVE, tag=self._tag))])
        if not self._requests.is_answered(pusher):
            return []  # it will be answered in its turn
        owed = [(to, self._tagged(reply)) for to, reply in self.part.answer_again(pusher)]
        if not self.followed:
            return owed
        self._unacknowledged.append((None, owed))
        return [self._announcement(pusher, again=True), (self.other, Message(kind))]

    def _enter_loss(self, pusher: int) -> list[Reply]:
        if self._latest[pusher] <= self._entered[pusher]:
            return []
        self._entered[pusher] = self._latest[pusher]
        return [] if self.part.done else self._enter(pusher, None)

    def _enter(self, pusher: int, message: Message | None) -> list[Reply]:
        """Take an entry; its answers wait until the other copy has it as well."""
        if message is not None and message.kind is Kind.PART:
            return self._take_part(pusher, message)
        if message is not None and self.part.done:
            # The other may be through, and acknowledges nothing any more.
            return [(to, self._tagged(reply)) for to, reply in self.part.on_message(pusher, message)]
        relayed = message
        if message is None:
            relayed = PusherLost(self._entered[pusher]).message()
            self._parts.forget(pusher)
        elif message.kind is Kind.PUSH and self._lacks_parts(pusher, message):
            return [(pusher, Message(Kind.RELAY, tag=self._tag))]
        elif message.kind is Kind.PARAMETERS:  # which this copy changes in place from now on
            relayed = message.received()
        if message is not None:
            message = self._joined(pusher, message)
            if pusher not in self._relayed and message.kind is Kind.PUSH:
                relayed = message
        self._relayed.discard(pusher)
        entry = self.log.take(pusher, message)  # before it is noted: it may be refused
        self._note(entry)
        cut = self._parts.cut(entry.replies)
        owed = [(to, self._tagged(reply)) for to, reply in cut if to in self._asking]
        if message is not None and message.kind is Kind.LEAVE:
            # Otherwise it would not be known that both have it.
            owed.append((pusher, Message(Kind.LEAVE, tag=self._tag)))
        self._unacknowledged.append((entry, owed))
        if not self.followed:
            return self._release() + (self.transfer() if self._awaited else [])
        assert relayed is not None, "every entry is a message to the other copy"
        return [self._announcement(pusher), (self.other, relayed)]

    def _take_part(self, pusher: int, message: Message) -> list[Reply]:
        """Keep a part of a push, and pass it on: nothing has happened until the whole is there, on either server."""
        if self._missed.get(pusher) == message.step:
            return []
        values = self.part.values
        if not len(values):
            raise RefusedMessage(Reason.ORDER, "a gradient arrived before the parameters")
        self._parts.take(pusher, message, values)
        if (
            message.version + payload(message).numel() == len(values) and self.followed
        ):  # the first of its push
            self._relayed.add(pusher)
        if pusher not in self._relayed:
            return []
        return [self._announcement(pusher), (self.other, message)]

    def _lacks_parts(self, pusher: int, message: Message) -> bool:
        """Return whether a push has parts from before this copy led, so that it must be repeated in one piece."""
        missed = self._missed.pop(pusher, None) == message.step
        return missed and payload(message).numel() < len(self.part.values)

    def _joined(self, pusher: int, message: Message) -> Message:
        if message.kind is Kind.PUSH:
            return self._parts.join(pusher, message)
        self._parts.forget(pusher)
        return message

    def _announcement(self, pusher: int, *, again: bool = False) -> Reply:
        """Announce to the other copy the pusher of the next entry, or of a repeated answer."""
        number = self._pushers.index(pusher)
        return self.other, Relay(self.log.shard, number, again=again).message()

    def _taken(self, pusher: int, message: Message | None) -> Entry:
        entry = self.log.take(pusher, message)
        self.log.report(entry)
        return entry

    def _note(self, entry: Entry) -> None:
        if entry.message is None:
            self._requests.forget(entry.source)
        else:
            self._requests.note(entry.source, entry.message)
        for to, _ in entry.replies:
            self._requests.answer(to)

    def _behind_all(self, replies: list[Reply]) -> list[Reply]:
        """Hold replies until the other copy has all entries that they may contain."""
        if not self._unacknowledged:
            return replies
        self._unacknowledged[-1][1].extend(replies)
        return []

    def _release(self) -> list[Reply]:
        entry, owed = self._unacknowledged.popleft()
        if entry is not None:
            self.log.report(entry)
        return owed

    def _tagged(self, reply: Message) -> Message:
        return reply._replace(tag=self._tag) if self._tag else reply


_Name = tuple[Kind, int, bool]


class Requests:
    """One replica's list: of every pusher its last request, and whether that has been answered."""

    def __init__(self) -> None:
        self._last: dict[int, _Name] = {}
        self._answered: set[int] = set()

    def note(self, rank: int, message: Message) -> None:
        """A pusher asks something new."""
        self._last[rank] = _name(message)
        self._answered.discard(rank)

    def answer(self, rank: int) -> None:
        """A pusher's request is answered."""
        self._answered.add(rank)

    def forget(self, rank: int) -> None:
        """Handle the loss of a pusher."""
        self._last.pop(rank, None)
        self._answered.discard(rank)

    def facts(self) -> dict[str, Any]:
        """Return the list, JSON-able."""
        return {
            "last": {str(rank): list(name) for rank, name in self._last.items()},
            "answered": sorted(self._answered),
        }

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Take the list that `facts` gave."""
        self._last = {
            int(rank): (Kind(kind), step, final) for rank, (kind, step, final) in facts["last"].items()
        }
        self._answered = set(facts["answered"])

    def is_repeated(self, rank: int, message: Message) -> bool:
        """Return whether a request is the pusher's last one once more."""
        return self._last.get(rank) == _name(message)

    def is_answered(self, rank: int) -> bool:
        """Return whether the pusher's last request has been answered."""
        return rank in self._answered


def _name(message: Message) -> _Name:
    """Return a key that identifies a pusher's request: it has one at a time, and takes steps in order."""
    return message.kind, message.step, message.kind is Kind.PULL and message.stop
