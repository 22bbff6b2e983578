"""A rank of a run: its links, what has arrived, its collectives, and who is lost."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyrhythm.communication.activity import Activity
from polyrhythm.communication.clock import WallClock
from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import UNBOUNDED_BYTES, Kind, Message, Reason, RefusedMessage
from polyrhythm.communication.transports.collective_broken import REVOKED, CollectiveBroken
from polyrhythm.communication.transports.inbox import Inbox, Want
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.shared_memory.collectives import SharedMemoryCollectives
from polyrhythm.communication.transports.shared_memory.frames import Card
from polyrhythm.communication.transports.shared_memory.host import host_key
from polyrhythm.communication.transports.shared_memory.incoming import IncomingMemoryLinks
from polyrhythm.communication.transports.shared_memory.meeting import Introduction
from polyrhythm.communication.transports.shared_memory.outgoing import OutgoingMemoryLink
from polyrhythm.communication.transports.shared_memory.vector import share_vector
from polyrhythm.communication.transports.torch_distributed.collectives import (
    GlooCollectives,
)
from polyrhythm.communication.transports.torch_distributed.groups import Groups
from polyrhythm.communication.transports.torch_distributed.incoming_links import IncomingLinks
from polyrhythm.communication.transports.torch_distributed.link_words import await_joined, join
from polyrhythm.communication.transports.torch_distributed.outgoing_link import OutgoingLink
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.communication.transports.two_level import Acquaintance, TwoLevelCollectives, make_shared
from polyrhythm.errors import PeerLost

_log = logging.getLogger(__name__)

_CLOSING_PATIENCE_S = 10.0
_LAST_WORDS_PATIENCE_S = 0.5
_FIRST_MEETING_INTERVAL_S, _MEETING_INTERVAL_S = 0.0005, 0.02
_MOST_TOLD = 100
_MOST_THREADS = 1024
"""Of the background, made one by one when all others are busy: with few, works could wait for each other for ever."""


AnyCollectives = GlooCollectives | SharedMemoryCollectives | TwoLevelCollectives


class FutureHandle:
    """Background work of a rank."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether the work has ended."""
        return self._future.done()

    def wait(self) -> Any:
        """Blocks until the work has ended; gives its result."""
        return self._future.result()


class Rank:
    """What one real rank has, whichever of its communicators is used.

    Args:
        rendezvous: how to meet the others.
        shared_memory: whether to use it between ranks of one host; gloo for all messages and collectives if not.

    Attributes:
        activity: what it is doing.
        bytes_sent: by this rank, through all its communicators.
        most_bytes: that the payload of a message to this rank may have.
        refused: links and bytes that nobody of ours sends, by reason.
        tell: tells people of the first of each peer and reason.
    """

    def __init__(self, rendezvous: Rendezvous, shared_memory: bool = True) -> None:
        self.rendezvous = rendezvous
        self.clock = WallClock()
        self.activity = Activity()
        self.bytes_sent = 0
        self.most_bytes = UNBOUNDED_BYTES
        self.refused: Counter[str] = Counter()
        self.tell: Callable[[str], None] = _log.warning
        self._told: set[tuple[Peer, Reason]] = set()
        self._linked: set[Peer] = set()
        self.groups = Groups(rendezvous)
        self._inbox = Inbox()
        self._news = threading.Condition()
        self._outgoing: dict[int, OutgoingLink | OutgoingMemoryLink] = {}
        self._opening = threading.Lock()
        self.background = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="background")
        self._incarnations = {rendezvous.rank: rendezvous.incarnation}  # a rank may send to itself
        self._incoming = IncomingLinks(self.groups, rendezvous, self)
        self._shares_memory = shared_memory
        self._collectives: list[_Collectives] = []
        self._incoming_memory = self._listen_on_host() if shared_memory else None
        self._incoming.start()
        join(rendezvous, "" if self._incoming_memory is None else self._incoming_memory.card.to_text())

    def start_send(self, to: int, message: Message, context: int) -> Handle:
        """Starts to send to a global rank, opening the link if this is the first message."""
        with self._news:
            if self._inbox.is_lost_to(context, to):
                raise PeerLost(to, "sending to it")
        with self._opening:
            link = self._outgoing.get(to)
            if link is None or link.incarnation < self.incarnation(to):
                link = self._outgoing[to] = self._open(to)
            self.bytes_sent += message.nbytes
        return link.start_send(message, context)

    def take(self, want: Want, reason: str) -> tuple[int, Message]:
        """Receives, blocking until the message is there."""
        with self._news:
            while True:
                self.check(want.lineage)
                found = self._inbox.take(want)
                if found is not None:
                    return found
                self._tell_loss(want, reason)
                with self.activity.doing(reason):
                    self._news.wait()

    def take_now(self, want: Want) -> tuple[int, Message] | None:
        """Receives if the message is there."""
        with self._news:
            self.check(want.lineage)
            found = self._inbox.take(want)
            if found is None:
                self._tell_loss(want, "looking for a message")
            return found

    def know_losses(self, context: int, incarnations: Mapping[int, int]) -> None:
        """Notes of which incarnations of which ranks a communicator is."""
        with self._news:
            self._inbox.know_losses(context, incarnations)

    def meet(
        self, name: str, members: tuple[int, ...], word: str = "", lineage: tuple[int, ...] = ()
    ) -> list[str]:
        """Returns when all members have called it with this name, however late; gives everyone's word.

        Raises:
            PeerLost: one of them is known to be gone, or a communicator of the lineage has been revoked.
        """
        store = self.rendezvous.store
        store.set(f"{name}/met/{self.rendezvous.rank}", word)
        keys = [f"{name}/met/{member}" for member in members]
        pause_s = _FIRST_MEETING_INTERVAL_S
        while not store.check(keys):
            self.check(lineage)
            for member in members:
                if self._inbox.is_lost(member):
                    raise PeerLost(member, "waiting for all ranks to start a collective")
            self.clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _MEETING_INTERVAL_S)
        return [value.decode() for value in store.multi_get(keys)]

    def collectives(self, name: str, members: tuple[int, ...], lineage: tuple[int, ...]) -> AnyCollectives:
        """Makes the collectives of some ranks on the CPU: through shared memory where they share a host.

        Raises:
            PeerLost: one of them is known to be gone, or they have been given up meanwhile.
        """
        made = self._make_collectives(name, members, lineage)
        with self._news:
            self._collectives.append(_Collectives(made, members, lineage))
            useless = self._inbox.is_revoked(lineage) or any(map(self._inbox.is_lost, members))
        if useless:
            made.give_up(CollectiveBroken(REVOKED))
        return made

    def revoke(self, context: int) -> None:
        """Ends the use of a communicator on this rank, and of all that are parts of it."""
        with self._news:
            news = self._inbox.revoke(context)
            ended = [entry for entry in self._collectives if context in entry.lineage]
            self._collectives = [entry for entry in self._collectives if entry not in ended]
            self._news.notify_all()
        for entry in ended if news else ():
            entry.made.give_up(CollectiveBroken(REVOKED))
            if not isinstance(entry.made, GlooCollectives):
                self.background.submit(entry.made.close)

    def _make_collectives(
        self, name: str, members: tuple[int, ...], lineage: tuple[int, ...]
    ) -> AnyCollectives:
        member = members.index(self.rendezvous.rank)
        introduction = Introduction.own(self.rendezvous.address, self._shares_memory).to_json()
        introductions = self.meet(name, members, introduction, lineage)

        def meet(who: Sequence[int], subject: str, word: str) -> list[str]:
            return self.meet(f"{name}/{subject}", tuple(members[each] for each in who), word, lineage)

        def gloo(subject: str, number: int, size: int) -> GlooCollectives:
            return GlooCollectives(self.groups.gloo(f"{name}{subject}", number, size))

        found = make_shared(Acquaintance(member, members, introductions), meet, gloo)
        return found or gloo("", member, len(members))

    def shared_vector(self, name: str, members: tuple[int, ...], like: Tensor) -> Tensor:
        """Makes a vector that some ranks share, if all of them are on this host."""
        own = self.rendezvous.rank
        introduction = Introduction.own(self.rendezvous.address, self._shares_memory).to_json()
        introductions = self.meet(name, members, introduction)

        def tell_all(subject: str, word: str) -> list[str]:
            return self.meet(f"{name}/{subject}", members, word)

        return share_vector(members.index(own), introductions, like, tell_all)

    def close(self) -> None:
        """Leaves the run in good order; every rank calls it when it has nothing more to send or receive."""
        deadline = self.clock.now() + _CLOSING_PATIENCE_S
        for link in self._outgoing.values():
            link.close(max(0.0, deadline - self.clock.now()))
        with suppress(RuntimeError):  # a store that is gone has nobody left to tell
            self._wait_to_leave(deadline)
        self._incoming.close(_CLOSING_PATIENCE_S)
        if self._incoming_memory is not None:
            self._incoming_memory.close(_CLOSING_PATIENCE_S)
        self.background.shutdown(wait=True)
        for entry in self._collectives:
            if not isinstance(entry.made, GlooCollectives):
                entry.made.close()

    def _listen_on_host(self) -> IncomingMemoryLinks | None:
        try:
            return IncomingMemoryLinks(host_key(self.rendezvous.address), self)
        except OSError as error:
            _log.warning("no shared memory for messages on this host (%s): they go over gloo links", error)
            return None

    def _open(self, to: int) -> OutgoingLink | OutgoingMemoryLink:
        peer = Peer(to, self.incarnation(to))
        card = Card.from_text(await_joined(self.groups, peer, self))
        ours = None if self._incoming_memory is None else self._incoming_memory.card
        if card is None or ours is None or card.host != ours.host:
            return OutgoingLink(self.groups, self.rendezvous, to, self)
        return OutgoingMemoryLink(card, self.rendezvous.own, peer, self)

    def _wait_to_leave(self, deadline: float) -> None:
        store = self.rendezvous.store
        store.add("closed", 1)
        if self.rendezvous.keeper:  # whoever hosts the store leaves last
            while store.add("closed", 0) < self._present() and self.clock.now() < deadline:
                self.clock.sleep(0.01)

    def _present(self) -> int:
        return sum(not self._inbox.is_lost(rank) for rank in range(self.rendezvous.size))

    def check(self, lineage: tuple[int, ...]) -> None:
        """Checks that a communicator may be used.

        Args:
            lineage: its own context, and those of the communicators that it is a part of.

        Raises:
            CollectiveBroken: one of them has been revoked.
        """
        if self._inbox.is_revoked(lineage):
            raise CollectiveBroken(REVOKED)

    def _tell_loss(self, want: Want, reason: str) -> None:
        lost = self._inbox.news_of_loss(want)
        if lost is not None:
            raise PeerLost(lost, reason)

    def incarnation(self, rank: int) -> int:
        """The newest incarnation of a rank that has opened a link to this one; 0 before any has."""
        return self._incarnations.get(rank, 0)

    def is_lost(self, rank: int) -> bool:
        """Whether a rank is known to be gone, and no successor has come."""
        return self._inbox.is_lost(rank)

    def admit(self, peer: Peer) -> None:
        """A peer asks for a link; every process opens one, so a second is another's.

        Raises:
            RefusedMessage: there is no such rank, or it has a link already.
        """
        with self._news:
            if not 0 <= peer.rank < self.rendezvous.size or peer.incarnation < 0:
                raise RefusedMessage(Reason.SENDER, f"there is no rank {peer.rank} in this run")
            if peer in self._linked:
                raise RefusedMessage(Reason.SENDER, "it has a link already, so this one is somebody else's")
            self._linked.add(peer)

    def refuse(self, peer: Peer, refusal: RefusedMessage) -> None:
        """A link that is said to be a peer's brought something that nobody of ours sends: it is counted, and told."""
        with self._news:
            self.refused[refusal.reason.value] += 1
            first = (peer, refusal.reason) not in self._told and len(self._told) < _MOST_TOLD
            self._told |= {(peer, refusal.reason)} if first else set()
        if first:
            own = self.rendezvous.rank
            self.tell(f"rank {own} refused a link of rank {peer.rank} ({refusal.reason}): {refusal}")

    def greet(self, peer: Peer) -> None:
        """A link from a peer is open; if it is a successor, nothing of its predecessor is heard any more."""
        with self._news:
            if peer.incarnation > self.incarnation(peer.rank):
                self._incarnations[peer.rank] = peer.incarnation
                self._inbox.regain(*peer)
                self._news.notify_all()

    def deliver(self, context: int, source: Peer, message: Message) -> None:
        """A message has come over a link."""
        if message.kind is Kind.REVOKE:
            self.revoke(context)
            return
        with self._news:
            if source.incarnation == self.incarnation(source.rank):  # else its successor is there already
                self._inbox.put(context, source.rank, message)
                self._news.notify_all()

    def lose_receiver(self, peer: Peer) -> None:
        """A peer takes nothing any more. What it sent before comes first; but it may never leave."""
        self._incoming.wait_for_last_words(peer, _LAST_WORDS_PATIENCE_S)
        if self._incoming_memory is not None:
            self._incoming_memory.wait_for_last_words(peer, _LAST_WORDS_PATIENCE_S)
        self.lose(peer)

    def lose(self, peer: Peer) -> None:
        """A peer is gone."""
        with self._news:
            if peer.incarnation < self.incarnation(peer.rank):
                return
            self._inbox.lose(*peer)
            broken = [entry.made for entry in self._collectives if peer.rank in entry.members]
            self._news.notify_all()
        for made in broken:
            made.give_up(CollectiveBroken(f"rank {peer.rank} is gone", peer.rank))


@dataclass(frozen=True)
class _Collectives:
    """Collectives in use.

    Attributes:
        made: the collectives.
        members: global ranks that take part.
        lineage: contexts of the communicators that they are a part of.
    """

    made: AnyCollectives
    members: tuple[int, ...]
    lineage: tuple[int, ...]
