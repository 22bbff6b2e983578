"""A server of replicated shards: it has a copy of its own, and one of the shard of the server before it.

    worker ── PUSH ──▶ server k ── RELAY, PUSH ──▶ server k+1    takes the same entry, withholds its answers
           ◀─ answer ─         ◀───── PUSH ───────               acknowledges it, by its kind

Answers of server k leave when server k+1 has the entry (primary and backup; the answers alone wait, not the
server). So an update of which any worker has heard is on both. When server k is lost, k+1 continues with its
shard: every worker finds out by itself, and asks there what was not answered; what had been taken already is
answered, and not taken again. When k+1 is lost, k releases all answers, and does without.

    successor of k ── JOIN ──▶ server k+1    hands over shard k as it is between two entries; what it takes
                   ◀─ STATE ─                from now on is relayed: the successor follows, and k+1 leads
                   ── JOIN ──▶ server k-1    the same of shard k-1

Of the two copies of a shard one leads, and the other follows (`ShardCopy`):

    pushers ── ask ──▶ copy that leads ── RELAY, entry ──▶ copy that follows
            ◀─ answer ─               ◀── entry's kind ───

The leading copy takes what pushers ask, and releases its answers when the other has the entry too. When it is
lost, the other leads. A successor of the lost server is handed the copy as it is then, in one message, and
follows: so either may be lost later, as long as the other is whole. `Requests` has what every pusher has
asked last, so that a request that comes again is answered, and not carried out twice.

An entry of a shard's log is a message of a pusher, or the news that it is gone, and what became of it. Both
servers of a shard take the same entries in the same order. A server is nothing but what it makes of them, so
both hold the same numbers, bit for bit: parameters, optimiser, clocks, and what every pusher has read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor

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
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.server_part import ServerSetting, ServerStats
from polyrhythm.strategies.state import State

KEPT, GREETING = 1, 2
"""Tags of answers about the shard of the server before, and of a successor's word to workers that it is there."""


class ReplicatedServer:
    """One server; see `ServerPart` and `KeepingPart`.

    Args:
        setting: this server's.
        pushers: ranks that push gradients, in their order.
        make: makes the server of a shard, given its number.
    """

    def __init__(
        self, setting: ServerSetting, pushers: tuple[int, ...], make: Callable[[int], ServerSession]
    ) -> None:
        servers, index = setting.cast.servers, setting.index
        before, after = (index - 1) % len(servers), (index + 1) % len(servers)
        self._pushers = pushers
        self._heard: Counter[int] = Counter()
        self._own = ShardCopy(Log(index, make(index)), Place(servers[after], 0, pushers), leads=True)
        kept = Place(servers[before], KEPT, pushers)
        self._copies = [self._own, ShardCopy(Log(before, make(before)), kept, leads=False)]
        self._announced: dict[int, tuple[ShardCopy, int, Message]] = {}

    @property
    def parts(self) -> list[ServerSession]:
        """The servers of the shards that workers ask for here."""
        return [copy.part for copy in self._copies if copy.leads]

    @property
    def version(self) -> int:
        """Updates of its own shard."""
        return self._own.part.version

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were applied at which staleness, on all shards that workers ask for here."""
        return sum((part.staleness for part in self.parts), Counter())

    @property
    def dropped(self) -> int:
        """Gradients that came too late."""
        return sum(part.dropped for part in self.parts)

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each pusher need not be pushed again."""
        return {rank: min(copy.part.steps[rank] for copy in self._copies) for rank in self._pushers}

    def stats(self) -> ServerStats:
        """Return what it has counted, of all shards asked for here; the version is that of its own."""
        left_out: dict[int, list[list[int]]] = {}
        for part in self.parts:
            for rank, stretches in part.left_out.items():
                left_out.setdefault(rank, []).extend(stretches)
        return ServerStats(
            dict(self.staleness),
            self.version,
            self.steps,
            sum(part.not_finite for part in self.parts),
            sum(part.ejected for part in self.parts),
            self.dropped,
            left_out,
        )

    @property
    def done(self) -> bool:
        """Whether both shards are over, and all that was relayed has been acknowledged."""
        return all(copy.done for copy in self._copies)

    @property
    def whole(self) -> bool:
        """Whether it has all of both shards, so that either of those who have the others may be lost."""
        return all(copy.whole for copy in self._copies)

    def watch(self, told: Told) -> None:
        """Lets somebody hear of every entry of both shards that can be lost no more; of some, from both servers."""
        for copy in self._copies:
            copy.log.told = told

    def rejoin(self, incarnation: int) -> list[Reply]:
        """Begins as the successor of so many lost servers: greets workers, and asks its neighbours for both shards."""
        greetings = [(rank, Message(Kind.JOIN, tag=GREETING)) for rank in self._pushers]
        return greetings + [copy.begin_empty(incarnation) for copy in self._copies]

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a pusher, or from another server, and gives the replies.

        Raises:
            RefusedMessage: a message that nobody of ours sends now.
        """
        if source in self._announced:
            copy, pusher, announcement = self._announced.pop(source)
            if source == pusher:
                return copy.ask_after_loss(pusher, message, int(announcement.weight))
            return copy.follow(pusher, message, again=announcement.stop)
        if message.kind is Kind.RELAY:
            self._announce(source, message)
            return []
        if source in self._pushers:
            return self._own.ask(source, message)
        return self._hear_server(self._copy(source, message), message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Goes on without a server, or without a pusher until a successor of it pulls."""
        return self.on_losses(rank, self._heard[rank] + 1)

    def on_losses(self, rank: int, losses: int) -> list[Reply]:
        """Goes on without so many that had a rank."""
        self._heard[rank] = losses
        self._announced.pop(rank, None)
        replies: list[Reply] = []
        for copy in self._copies:
            if rank in self._pushers:
                replies += copy.lose_pusher(rank, losses)
            elif rank == copy.other:
                replies += copy.lose_other()
        return replies

    def state_of(self, shard: int) -> State:
        """Gives all that a resumed server of a shard needs.

        Raises:
            RefusedMessage: it is none of its two, or there are no parameters yet.
        """
        return self._part_of(shard).state()

    def load_state_of(self, shard: int, state: State) -> None:
        """Takes back what `state_of` gave, for one of its two shards."""
        self._part_of(shard).load_state(state)

    def state(self) -> State:
        """Gives the state of its own shard."""
        return self._own.part.state()

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        self._own.part.load_state(state)

    def _part_of(self, shard: int) -> ServerSession:
        for copy in self._copies:
            if copy.log.shard == shard:
                return copy.part
        raise RefusedMessage(Reason.NUMBERS, f"shard {shard} is not here")

    def _copy(self, source: int, message: Message) -> ShardCopy:
        """Gives the copy that another server speaks of."""
        for copy in self._copies:
            if (copy.other, copy.log.shard) == (source, message.version):
                return copy
        text = f"rank {source} has nothing to say of shard {message.version} here ({message.kind.name})"
        raise RefusedMessage(Reason.SENDER, text)

    def _hear_server(self, copy: ShardCopy, message: Message) -> list[Reply]:
        if message.kind is Kind.STATE:
            copy.take_over(message)
            return []
        admit_bare(message._replace(version=0))
        return copy.hand_over() if message.kind is Kind.JOIN else copy.acknowledged(message)

    def _announce(self, source: int, message: Message) -> None:
        """Notes whose entry the next message of a server is, or of which shard a worker's, whose server is lost."""
        if not 0 <= message.step < len(self._pushers):
            raise RefusedMessage(Reason.SENDER, f"rank {source} relayed for pusher {message.step}")
        pusher = self._pushers[message.step]
        if source not in self._pushers:
            self._announced[source] = self._copy(source, message), pusher, message
            return
        copies = [copy for copy in self._copies if copy.log.shard == message.version]
        if pusher != source or message.stop or not copies or not 0 <= message.weight < inf:
            text = f"rank {source} relayed for pusher {message.step}, of shard {message.version}"
            raise RefusedMessage(Reason.SENDER, text)
        self._announced[source] = copies[0], pusher, message


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
    def part(self) -> ServerSession:
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
        """A pusher is gone."""
        self._last.pop(rank, None)
        self._answered.discard(rank)

    def facts(self) -> dict[str, Any]:
        """Gives the list, JSON-able."""
        return {
            "last": {str(rank): list(name) for rank, name in self._last.items()},
            "answered": sorted(self._answered),
        }

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Takes the list that `facts` gave."""
        self._last = {
            int(rank): (Kind(kind), step, final) for rank, (kind, step, final) in facts["last"].items()
        }
        self._answered = set(facts["answered"])

    def is_repeated(self, rank: int, message: Message) -> bool:
        """Whether a request is the pusher's last one once more."""
        return self._last.get(rank) == _name(message)

    def is_answered(self, rank: int) -> bool:
        """Whether the pusher's last request has been answered."""
        return rank in self._answered


def _name(message: Message) -> _Name:
    """Gives what tells a request of a pusher from its others: it has one at a time, and takes steps in order."""
    return message.kind, message.step, message.kind is Kind.PULL and message.stop


@dataclass(frozen=True)
class Entry:
    """One entry.

    Attributes:
        shard: its number.
        number: of the entry, from 0; entries that nobody was told of may be lost with a server, and others then have
            their numbers.
        source: the pusher's rank.
        message: that it sent; None: it is gone.
        replies: that it set free.
        version_before: updates before.
        version: updates now.
        applied: gradients that it counted, by staleness.
        digest: of all that the server holds then; made where somebody watches.
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


Told = Callable[[Entry], None]


class Log:
    """A server of one shard, and how many entries it has taken.

    Args:
        shard: its number.
        part: takes them.

    Attributes:
        shard: its number.
        part: takes them.
        told: hears of every entry, where somebody watches.
        length: entries that have been taken.
    """

    def __init__(self, shard: int, part: ServerSession) -> None:
        self.shard = shard
        self.part = part
        self.told: Told | None = None
        self.length = 0

    def take(self, source: int, message: Message | None) -> Entry:
        """Lets the server take an entry.

        Raises:
            RefusedMessage: it is none; nothing has been changed.
        """
        part, told = self.part, self.told is not None
        version, staleness = part.version, Counter(part.staleness) if told else Counter()
        replies = part.on_loss(source) if message is None else part.on_message(source, message)
        self.length += 1
        number = self.length - 1
        if not told:
            return Entry(self.shard, number, source, message, replies)
        applied = part.staleness - staleness
        return Entry(
            self.shard, number, source, message, replies, version, part.version, applied, _digest(part)
        )

    def tell(self, entry: Entry) -> None:
        """Says that an entry can be lost no more."""
        if self.told is not None:
            self.told(entry)


def packed(log: Log, requests: Any, losses: Counter[int]) -> Tensor:
    """Packs a copy.

    Args:
        log: of the shard.
        requests: `Requests.facts`.
        losses: of each pusher that have been entered in the log.

    Returns:
        A payload of bytes, `(n,)`, uint8. What several pushers have read, though it is one vector, is there once.
    """
    tensors, facts = log.part.exact_state()
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    same = {name: known for name, known in names.items() if known != name}
    once = {name: tensor for name, tensor in tensors.items() if name not in same}
    told = {str(pusher): count for pusher, count in losses.items()}
    record = {"server": facts, "same": same, "requests": requests, "losses": told, "entries": log.length}
    return pack_tensors(once, record)


def unpacked(log: Log, payload: Tensor) -> tuple[Any, Counter[int]]:
    """Puts what `packed` gave into the log of a copy that has nothing; gives `requests` and `losses`.

    Raises:
        RefusedMessage: the payload is something else.
    """
    tensors, facts = unpack_tensors(payload)
    try:
        tensors |= {name: tensors[known] for name, known in facts["same"].items()}
        log.part.load_exact_state((tensors, facts["server"]))
        log.length = facts["entries"]
        return facts["requests"], Counter({int(key): count for key, count in facts["losses"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
        raise RefusedMessage(Reason.MALFORMED, f"a shard that was handed over is none: {error!r}") from None
