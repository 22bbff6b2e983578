"""A server of replicated shards: it has a copy of its own, and one of the shard of the server before it.

    worker ── PUSH ──▶ server k ── RELAY, PUSH ──▶ server k+1    takes the same entry, withholds its answers
           ◀─ answer ─         ◀───── PUSH ───────               acknowledges it, by its kind

Answers of server k leave when server k+1 has the entry (primary and backup; the answers alone wait, not the
server). So an update that any worker has received is on both. When server k is lost, k+1 continues with its
shard: every worker detects the loss by itself, and asks there for open answers; requests that had been taken
already are answered, and not taken again. When k+1 is lost, k releases all answers, and does without.

    replacement of k ─ JOIN ─▶ server k+1    sends shard k as it is between two entries; later entries
                   ◀─ STATE ─                are relayed: the replacement follows, and k+1 leads
                   ── JOIN ──▶ server k-1    the same of shard k-1

One of the two copies of a shard leads, and the other follows (`ShardCopy`):

    pushers ── ask ──▶ copy that leads ── RELAY, entry ──▶ copy that follows
            ◀─ answer ─               ◀── entry's kind ───

The leading copy takes the pushers' requests, and releases its answers when the other has the entry too. When
it is lost, the other leads. A replacement of the lost server receives the copy as it is then, in one message,
and follows: so either may be lost later, as long as the other is whole. `Requests` has every pusher's last
request, so that a repeated request is answered, and not executed twice. Pushes that are not answered are
repeated from the last one that an answer to a fetch has confirmed.

An entry of a shard's log is a message of a pusher, or the notice of its loss, and what became of it. Both
servers of a shard take the same entries in the same order. A server is nothing but what it makes of them, so
both hold the same numbers, bit for bit: parameters, optimizer, clocks, and what every pusher has read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import (
    Kind,
    Message,
    Reason,
    RefusedMessage,
    pack_tensors,
    unpack_tensors,
)
from polyrhythm.errors import PeerLost, RequestError
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare, payload
from polyrhythm.strategies.parameter_server.serving.own_model import FreeLink
from polyrhythm.strategies.parameter_server.serving.parts import PushParts
from polyrhythm.strategies.parameter_server.serving.push_pull import OverlappedPushPull, PushPull, ServerLink
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.server_part import ServerSetting, ServerStats
from polyrhythm.strategies.state import OF_SERVER, Part, State, StateField, Stateful
from polyrhythm.strategies.worker_part import WorkerSetting

KEPT, GREETING = 1, 2
"""Tags of answers about the previous server's shard, and of a replacement's announcement to workers."""


class ReplicatedServer(Stateful):
    """One server; see `ServerPart` and `KeepingPart`.

    Args:
        pushers: ranks that push gradients, in their order.
        make: factory of the server of a shard, given its number.
    """

    fields = (StateField("", Part, OF_SERVER, at="_own.part"),)  # of its own shard

    def __init__(
        self, setting: ServerSetting, pushers: tuple[int, ...], make: Callable[[int], ServerSession]
    ) -> None:
        servers, index = setting.roles.servers, setting.index
        before, after = (index - 1) % len(servers), (index + 1) % len(servers)
        self._pushers = pushers
        self._latest: Counter[int] = Counter()
        self._own = ShardCopy(Log(index, make(index)), servers[after], 0, pushers, leads=True)
        kept = ShardCopy(Log(before, make(before)), servers[before], KEPT, pushers, leads=False)
        self._copies = [self._own, kept]
        self._announced: dict[int, tuple[ShardCopy, int, Relay]] = {}

    @property
    def parts(self) -> list[ServerSession]:
        """The servers of the shards that workers ask for here."""
        return [copy.part for copy in self._copies if copy.leads]

    @property
    def steps(self) -> dict[int, int]:
        """Number of gradients of each pusher that need not be pushed again."""
        return {rank: min(copy.part.steps[rank] for copy in self._copies) for rank in self._pushers}

    def stats(self) -> ServerStats:
        """Return the counters of all shards served here; the version is that of its own shard."""
        counted = [part.stats() for part in self.parts]
        left_out: dict[int, list[list[int]]] = {}
        for stats in counted:
            for rank, stretches in stats.left_out.items():
                left_out.setdefault(rank, []).extend(stretches)
        return ServerStats(
            dict(sum((Counter(stats.staleness) for stats in counted), Counter())),
            self._own.part.version,
            self.steps,
            sum(stats.not_finite for stats in counted),
            sum(stats.ejected for stats in counted),
            sum(stats.dropped for stats in counted),
            left_out,
        )

    @property
    def done(self) -> bool:
        """Whether both shards are over, and all that was relayed has been acknowledged."""
        return all(copy.done for copy in self._copies)

    @property
    def whole(self) -> bool:
        """Whether it has all of both shards, so that either holder of the others may be lost."""
        return all(copy.whole for copy in self._copies)

    def watch(self, observer: Observer) -> None:
        """Report every entry of both shards that can be lost no more; some of them from both servers."""
        for copy in self._copies:
            copy.log.observer = observer

    def rejoin(self, generation: int) -> list[Reply]:
        """Begin as the replacement of this generation: greet workers, request both shards from the neighbors."""
        greetings = [(rank, Message(Kind.JOIN, tag=GREETING)) for rank in self._pushers]
        return greetings + [copy.begin_empty(generation) for copy in self._copies]

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Handle a message from a pusher or another server; raise `RefusedMessage` if no rank sends it now."""
        if source in self._announced:
            copy, pusher, relay = self._announced.pop(source)
            if source == pusher:
                return copy.ask_after_loss(pusher, message, relay.losses)
            return copy.follow(pusher, message, again=relay.again)
        if message.kind is Kind.RELAY:
            self._announce(source, message)
            return []
        if source in self._pushers:
            return self._own.ask(source, message)
        return self._handle_server(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Continue without a server, or without a pusher until a replacement of it pulls."""
        return self.on_losses(rank, self._latest[rank] + 1)

    def on_losses(self, rank: int, losses: int) -> list[Reply]:
        """Handle `losses` successive failures of `rank`."""
        self._latest[rank] = losses
        self._announced.pop(rank, None)
        replies: list[Reply] = []
        for copy in self._copies:
            if rank in self._pushers:
                replies += copy.lose_pusher(rank, losses)
            elif rank == copy.other:
                replies += copy.lose_other()
        return replies

    def state_of(self, shard: int) -> State:
        """Return all that a resumed server of a shard needs; raise `RefusedMessage` if there is none here."""
        return self.part_of(shard).state()

    def load_state_of(self, shard: int, state: State) -> None:
        """Take back what `state_of` gave, for one of its two shards."""
        self.part_of(shard).load_state(state)

    def part_of(self, shard: int) -> ServerSession:
        """Return the session of a shard; raise `RefusedMessage` if it is none of its two."""
        for copy in self._copies:
            if copy.log.shard == shard:
                return copy.part
        raise RefusedMessage(Reason.NUMBERS, f"shard {shard} is not here")

    def _copy(self, source: int, shard: int, kind: Kind) -> ShardCopy:
        for copy in self._copies:
            if (copy.other, copy.log.shard) == (source, shard):
                return copy
        text = f"rank {source} sends nothing about shard {shard} here ({kind.name})"
        raise RefusedMessage(Reason.SENDER, text)

    def _handle_server(self, source: int, message: Message) -> list[Reply]:
        if message.kind is Kind.STATE:
            handover = Handover.of(message)
            self._copy(source, handover.shard, message.kind).take_over(handover)
            return []
        about = AboutShard.of(message)
        copy = self._copy(source, about.shard, about.kind)
        admit_bare(message._replace(version=0))
        return copy.transfer() if about.kind is Kind.JOIN else copy.acknowledged(about)

    def _announce(self, source: int, message: Message) -> None:
        """Note the pusher of a server's next entry, or the lost server's shard that a worker's is for."""
        relay = Relay.of(source, message)
        if not 0 <= relay.pusher < len(self._pushers):
            raise RefusedMessage(Reason.SENDER, f"rank {source} relayed for pusher {relay.pusher}")
        pusher = self._pushers[relay.pusher]
        if source not in self._pushers:
            self._announced[source] = self._copy(source, relay.shard, message.kind), pusher, relay
            return
        copies = [copy for copy in self._copies if copy.log.shard == relay.shard]
        if pusher != source or relay.again or not copies:
            text = f"rank {source} relayed for pusher {relay.pusher}, of shard {relay.shard}"
            raise RefusedMessage(Reason.SENDER, text)
        self._announced[source] = copies[0], pusher, relay


@dataclass(frozen=True)
class Relay:
    """Subject of its sender's next message: a pusher's entry in a shard's log, or a shard of a lost server.

    Attributes:
        shard: number of the shard.
        pusher: number of the pusher.
        losses: number of losses of the other copy, as the pusher knows, where it is the sender.
        again: whether it is no entry, but a repeated answer to the pusher.
    """

    shard: int
    pusher: int
    losses: int = 1
    again: bool = False

    def message(self) -> Message:
        """Pack it to be sent."""
        weight = float(self.losses)
        return Message(Kind.RELAY, step=self.pusher, version=self.shard, weight=weight, stop=self.again)

    @classmethod
    def of(cls, source: int, message: Message) -> Relay:
        """Read the result of `message`; raise `RefusedMessage` for an impossible number of losses."""
        if not 0 <= message.weight < inf:
            raise RefusedMessage(Reason.SENDER, f"rank {source} relayed after {message.weight} losses")
        return cls(message.version, message.step, int(message.weight), message.stop)


class AboutShard(NamedTuple):
    """A word between the two servers of a shard that needs nothing but its number.

    Attributes:
        kind: JOIN asks for the shard; else it acknowledges an entry of this kind.
        shard: number of the shard.
    """

    kind: Kind
    shard: int

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(self.kind, version=self.shard)

    @classmethod
    def of(cls, message: Message) -> AboutShard:
        """Unpack the result of `message`."""
        return cls(message.kind, message.version)


class Handover(NamedTuple):
    """A whole copy of a shard, for the replacement of the server that had the other.

    Attributes:
        shard: number of the shard.
        generation: generation of the server that gives it: how many servers it succeeds.
        copy: packed by `packed`; None if it is missing.
    """

    shard: int
    generation: int
    copy: Tensor | None

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(Kind.STATE, self.copy, version=self.shard, step=self.generation)

    @classmethod
    def of(cls, message: Message) -> Handover:
        """Unpack the result of `message`."""
        return cls(message.version, message.step, message.tensor)


class PusherLost(NamedTuple):
    """An entry in the log of a shard: successive losses of a pusher's rank, instead of a message of it.

    Attributes:
        losses: number of losses.
    """

    losses: int

    def message(self) -> Message:
        """Pack it to be sent: as the pusher's last message, with a wish to stop, which no pusher's own has."""
        return Message(Kind.LEAVE, version=self.losses, stop=True)

    @classmethod
    def of(cls, message: Message) -> PusherLost | None:
        """Unpack the result of `message`; None for an entry that is a pusher's own message."""
        return cls(message.version) if message.kind is Kind.LEAVE and message.stop else None


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
        if kind is Kind.JOIN:  # a pusher's; one of a server requests a shard
            kind = Kind.PULL
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
        return self.other, AboutShard(Kind.JOIN, self.log.shard).message()

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


@dataclass(frozen=True)
class Entry:
    """One entry.

    Attributes:
        shard: number of the shard.
        number: number of the entry, from 0; unanswered entries may be lost with a server, and others then
            have their numbers.
        source: the pusher's rank.
        message: message that it sent; None: it has failed or left.
        replies: replies that it set free.
        version_before: updates before.
        version: updates now.
        applied: gradients that it counted, by staleness.
        digest: digest of the server's whole state then; computed only if it is observed.
    """

    shard: int
    number: int
    source: int
    message: Message | None
    replies: list[Reply]
    version_before: int = 0
    version: int = 0
    applied: Counter[int] = field(default_factory=Counter)
    digest: str = ""


def _digest(part: ServerSession) -> str:
    if not len(part.values):
        return ""
    tensors, facts = part.exact_state()
    found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


Observer = Callable[[Entry], None]


class Log:
    """Log of one shard's replica: a server, and the number of messages that it has processed.

    Attributes:
        shard: number of the shard.
        part: server that processes the messages.
        observer: observer of every entry; None: not observed.
        length: number of processed messages.
    """

    def __init__(self, shard: int, part: ServerSession) -> None:
        self.shard = shard
        self.part = part
        self.observer: Observer | None = None
        self.length = 0

    def take(self, source: int, message: Message | None) -> Entry:
        """Let the server take an entry; raise `RefusedMessage`, with nothing changed, if it is none."""
        part, observed = self.part, self.observer is not None
        version, staleness = part.version, Counter(part.staleness) if observed else Counter()
        replies = part.on_loss(source) if message is None else part.on_message(source, message)
        self.length += 1
        number = self.length - 1
        if not observed:
            return Entry(self.shard, number, source, message, replies)
        applied = Counter(part.staleness) - staleness
        return Entry(
            self.shard, number, source, message, replies, version, part.version, applied, _digest(part)
        )

    def report(self, entry: Entry) -> None:
        """Return that an entry can be lost no more."""
        if self.observer is not None:
            self.observer(entry)


def packed(log: Log, requests: Any, losses: Counter[int]) -> Tensor:
    """Pack a copy, `(n,)`, uint8; a vector that several pushers have read is in it once."""
    tensors, facts = log.part.exact_state()
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    same = {name: known for name, known in names.items() if known != name}
    once = {name: tensor for name, tensor in tensors.items() if name not in same}
    stated = {str(pusher): count for pusher, count in losses.items()}
    record = {"server": facts, "same": same, "requests": requests, "losses": stated, "entries": log.length}
    return pack_tensors(once, record)


def unpacked(log: Log, payload: Tensor) -> tuple[Any, Counter[int]]:
    """Put what `packed` gave into the log of an empty copy; return `requests` and `losses`."""
    tensors, facts = unpack_tensors(payload)
    try:
        tensors |= {name: tensors[known] for name, known in facts["same"].items()}
        log.part.load_exact_state((tensors, facts["server"]))
        log.length = facts["entries"]
        return facts["requests"], Counter({int(key): count for key, count in facts["losses"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
        raise RefusedMessage(Reason.MALFORMED, f"a shard that was handed over is none: {error!r}") from None


_PATIENCE_S, _PAUSE_S = 3.0, 0.01
"""Seconds that a shard may be without a server: a rank that was away while servers changed is notified of all
changes at once, and of the present ones last.
"""


class ReplicatedLink(ServerLink):
    """Part of a link with shards on two servers: where one is lost, it is that with the one that has kept its shard."""

    def __init__(self, setting: WorkerSetting, *more: Any, **options: Any) -> None:
        super().__init__(setting, *more, **options)
        self._own = setting.workers.rank
        self._with_keeper = [False] * len(self._servers)
        self._announces = [False] * len(self._servers)
        self._open: list[Message | None] = [None] * len(self._servers)
        self._sending: dict[int, list[Handle]] = {}
        self._initializing = False
        self._losses: Counter[int] = Counter()

    def initialize(self) -> None:
        """Give every server its shard; the shard of a server that is lost in the meantime goes to its keeper."""
        self._initializing = True
        for position in range(len(self._servers)):
            for message in self._beginning(position):
                self._send(position, message)
                self._wait(position)

    def check_losses(self) -> None:
        for position in range(len(self._servers)):
            try:
                while self._network.poll(self._address(position)[0], GREETING) is not None:
                    pass
            except PeerLost as loss:
                self._move(position, loss)
        for server in self._servers:  # also those without an open request
            self._note_loss(server)

    def leave(self) -> None:
        """Notify all servers that no push follows, and wait until both of each shard know it."""
        for position in range(len(self._servers)):
            self._ask(position, Message(Kind.LEAVE))
            self._wait(position)
        for position in range(len(self._servers)):
            self._answer(position)

    def _ask(self, position: int, message: Message) -> Handle:
        self._open[position] = message
        self._send(position, message)
        return _Sent(self._sending.setdefault(position, []))

    def _wait(self, position: int) -> None:
        _Sent(self._sending.setdefault(position, [])).wait()

    def _answer(self, position: int) -> Message:
        while True:
            server, tag = self._address(position)
            try:
                _, answer = self._network.receive(server, tag)
            except PeerLost as loss:
                self._move(position, loss)
                continue
            if answer.kind is Kind.RELAY:  # a replacement of the server, which only follows
                self._ask_other(position)
                continue
            self._open[position] = None
            self._initializing &= any(self._open)
            return answer

    def _address(self, position: int) -> tuple[int, int]:
        if self._with_keeper[position]:
            return self._servers[(position + 1) % len(self._servers)], KEPT
        return self._servers[position], 0

    def _send(self, position: int, message: Message) -> None:
        try:
            self._send_to_server(position, message)
        except PeerLost as loss:
            self._move(position, loss, also=message)

    def _send_to_server(self, position: int, message: Message) -> None:
        """Send to the server of a shard; one that is asked because another is lost is notified of that before."""
        server = self._address(position)[0]
        if not self._announces[position]:
            self._sending.setdefault(position, []).append(self._network.start_send(server, message))
            return
        for other in range(len(self._servers)):  # the two messages must arrive next to each other
            if self._address(other)[0] == server:
                for sending in self._sending.get(other, ()):
                    sending.wait()
        losses = self._losses[self._other(position)]
        self._network.send(server, Relay(position, self._own, losses).message())
        self._network.send(server, message)

    def _other(self, position: int) -> int:
        return self._servers[(position + (not self._with_keeper[position])) % len(self._servers)]

    def _move(self, position: int, loss: PeerLost, also: Message | None = None) -> None:
        """Ask others for all that a lost server had, and what is open once more.

        One of them may be the replacement of a server that was lost before, and has its shards again. `also` is
        a message
        that could not be sent. Raise `PeerLost` if both servers of a shard are lost, and no replacement is known.
        """
        moved, losses = self._leave_server(position, loss), 1
        clock = self._network.clock
        given_up_at = clock.now() + _PATIENCE_S
        while moved:
            asked = moved[0]
            try:
                self._ask_again(asked, also if asked == position else None)
                moved = moved[1:]
            except PeerLost as again:
                losses += 1
                if losses > 2 * len(self._servers):
                    if clock.now() >= given_up_at:
                        raise
                    clock.sleep(_PAUSE_S)
                moved = sorted({*moved, *self._leave_server(asked, again)})

    def _leave_server(self, position: int, loss: PeerLost) -> list[int]:
        """Return all shards that were asked for where this one was; from now on they are asked for elsewhere."""
        lost = self._address(position)[0]
        self._losses[lost] = max(self._losses[lost], loss.losses)
        self._note_loss(lost)
        moved = [each for each in range(len(self._servers)) if self._address(each)[0] == lost]
        for each in moved:
            self._turn(each)
        return moved

    def _ask_other(self, position: int) -> None:
        self._turn(position)
        try:
            self._ask_again(position)
        except PeerLost as loss:
            self._move(position, loss)

    def _turn(self, position: int) -> None:
        self._with_keeper[position] = not self._with_keeper[position]
        self._announces[position] = True
        self._sending[position] = []  # messages in transit to the lost one

    def _ask_again(self, position: int, also: Message | None = None) -> None:
        again = self._beginning(position) if self._initializing else []
        pending = self._pending(position)
        for message in [*again, *pending]:
            self._send_to_server(position, message)
        if also is not None and not again and not any(also is each for each in pending):
            self._send_to_server(position, also)

    def _pending(self, position: int) -> list[Message]:
        """Return the messages that one of both servers may lack, in their order."""
        open_ = self._open[position]
        return [] if open_ is None else [open_]

    def _note_loss(self, server: int) -> None:
        """Take note that a server is lost, and of a replacement's greeting: else nothing could be sent to that one."""
        try:
            while self._network.poll(server, GREETING) is not None:
                pass
        except PeerLost as loss:
            self._losses[server] = max(self._losses[server], loss.losses)


class _Sent:
    """All that is being sent about a shard; what is lost with its receiver has been sent to another."""

    def __init__(self, sending: list[Handle]) -> None:
        self._sending = sending

    def done(self) -> bool:
        """Return whether everything has left."""
        return all(sending.done() for sending in self._sending)

    def wait(self) -> None:
        """Wait until everything has left."""
        while self._sending:
            with suppress(PeerLost):
                self._sending.pop().wait()


class ReplicatedPushPull(ReplicatedLink, PushPull):
    """Exchanges a worker's flat vectors with servers, as `PushPull` does."""


class ReplicatedFreeLink(ReplicatedLink, FreeLink):
    """As `FreeLink`; a push is kept until an answer states that both servers have it."""

    def __init__(self, setting: WorkerSetting, *more: Any, **options: Any) -> None:
        super().__init__(setting, *more, **options)
        self._unconfirmed: list[list[Message]] = [[] for _ in self._servers]

    def _ask(self, position: int, message: Message) -> Handle:
        if message.kind is not Kind.PUSH:
            return super()._ask(position, message)
        kept = message._replace(tensor=payload(message).clone())
        self._unconfirmed[position].append(kept)
        self._send(position, kept)
        return _Sent(self._sending.setdefault(position, []))

    def _answer(self, position: int) -> Message:
        answer = super()._answer(position)
        if answer.kind is Kind.PARAMETERS:
            unconfirmed = self._unconfirmed[position]
            unconfirmed[:] = [push for push in unconfirmed if push.step >= answer.step]
        return answer

    def _pending(self, position: int) -> list[Message]:
        return [*self._unconfirmed[position], *super()._pending(position)]


class OverlappedReplicatedPushPull(OverlappedPushPull, ReplicatedPushPull):
    """Pushes and pulls in parts, of shards that are on two servers.

    If the server of a shard is lost during a push to it, the whole push goes to the other one, in one piece;
    if it is lost during its answer, the other one answers again.
    """

    def _ask(self, position: int, message: Message) -> Handle:
        kind, tensor = message.kind, message.tensor
        if kind not in (Kind.PART, Kind.PUSH):
            return super()._ask(position, message)
        if kind is Kind.PUSH and tensor is not None and len(tensor) < self._sizes[position]:
            gradients = self._flat.gradients[self._shards[position]]
            self._open[position] = message._replace(tensor=gradients)
        elif kind is Kind.PUSH:
            self._open[position] = message
        try:
            self._send_to_server(position, message)
        except PeerLost as loss:
            self._move(position, loss)
        return _Sent(self._sending.setdefault(position, []))

    def _answer(self, position: int) -> Message:
        asked = self._open[position]
        answer = super()._answer(position)
        self._request_until_complete(position, asked)
        return answer

    def _take_part(self, position: int) -> None:
        asked = self._open[position]
        super()._take_part(position)
        self._request_until_complete(position, asked)

    def _request_until_complete(self, position: int, asked: Message | None) -> None:
        """Repeat a request if its server is lost while parts of the answer are missing."""
        if asked is not None and self._awaited[position]:  # both servers have the gradient
            self._open[position] = asked._replace(tensor=payload(asked)[:0])

    def _turn(self, position: int) -> None:
        super()._turn(position)
        if 0 <= self._unpushed[position] < self._sizes[position]:
            self._unpushed[position] = self._sizes[position]
            self._cuts[position] = []
            self._in_one_piece.add(position)
