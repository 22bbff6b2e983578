"""A rank of a run: what has arrived, which ranks are there, which are lost, and the links to and from them.

Links go through shared memory inside a host, and over TCP otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.activity import Activity
from polyrhythm.communication.communicator import Clock, Handle
from polyrhythm.communication.message import UNBOUNDED_BYTES, Kind, Message, Reason, RefusedMessage
from polyrhythm.communication.transports.inbox import EarlyMessages, Inbox, Target, Want
from polyrhythm.communication.transports.member_collectives import (
    REVOKED,
    CollectiveBroken,
)
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.shared_memory.lent_memory import LentSegments
from polyrhythm.communication.transports.shared_memory.links import (
    Card,
    IncomingMemoryLinks,
    OutgoingMemoryLink,
)
from polyrhythm.communication.transports.shared_memory.meeting import host_key
from polyrhythm.communication.transports.tcp.handshake import TcpCard, is_reachable
from polyrhythm.communication.transports.tcp.incoming_links import IncomingTcpLinks
from polyrhythm.communication.transports.tcp.outgoing_link import OutgoingTcpLink
from polyrhythm.communication.transports.torch_distributed.collectives import RankCollectives, Standing
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    Cards,
    Groups,
    LossListener,
    Rendezvous,
    await_joined,
    join,
    joined_peers,
)
from polyrhythm.communication.transports.torch_distributed.shared_vectors import KeptVectors
from polyrhythm.errors import PeerLost, RequestError, RunError

_log = logging.getLogger(__name__)

LINK_PATIENCE_S = 60.0
CLOSING_PATIENCE_S = 30.0
"""Time for the others to receive a leaving rank's last messages: longer than a network outage may last before
a rank is declared lost (13.5 s), and TCP's pause after it. Failed ranks are not waited for.
"""
_MOST_TOLD = 100
_MOST_THREADS = 1024
"""Limit of background threads, made one by one when all others are busy: with few, works could deadlock."""


class WallClock(Clock):
    """Real time; starts at 0 when made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def sleep(self, seconds: float, what: str = "") -> None:
        time.sleep(seconds)


class FutureHandle(Handle):
    """Background work of a rank."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Any:
        return self._future.result()


class Rank(Membership):
    """State of one real rank, shared by its communicators.

    Args:
        shared_memory: whether to use it between ranks of one host; sockets for all messages and collectives if not.

    Attributes:
        activity: current activity.
        collectives: collectives of its communicators, on the CPU.
        lent: memory that it lends to ranks of its host; None without shared memory.
        bytes_sent: bytes sent by this rank, through all its communicators.
        bytes_inside: always 0, since they are not counted by host.
        most_bytes: largest payload of a message to this rank.
        patience_s: seconds for which another host may be unreachable before its ranks count as lost.
        refused: links and bytes that no rank of this run sends, by reason.
        notify: function that prints the first refusal of each peer and reason for users.
        vectors: vectors that it shares with others of its host.
    """

    def __init__(self, rendezvous: Rendezvous, shared_memory: bool = True) -> None:
        self.rendezvous = rendezvous
        self.clock = WallClock()
        self.activity = Activity(self.clock)
        self.bytes_sent = self.bytes_inside = 0
        self.most_bytes = UNBOUNDED_BYTES
        self.patience_s = LINK_PATIENCE_S
        self.refused: Counter[str] = Counter()
        self.notify: Callable[[str], None] = _log.warning
        self._has_seat = False
        self._reported: set[tuple[Peer, Reason]] = set()
        self._linked: set[Peer] = set()
        self.groups = Groups(rendezvous)
        self._inbox = Inbox()
        self._early = EarlyMessages()
        self._news = threading.Condition()
        self.background = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="background")
        # A rank may send to itself. Earlier losses do not concern a late one.
        self._generations = {**rendezvous.met, rendezvous.rank: rendezvous.generation}
        standing = Standing(self.is_lost, self.check, lambda: self.patience_s)
        self.collectives = RankCollectives(rendezvous, self.groups, standing, shared_memory)
        self.vectors = KeptVectors(rendezvous, shared_memory, self.is_lost, self._inbox.losses)
        self.lent = LentSegments() if shared_memory else None
        self._links = Links(rendezvous, self.groups, self, self.lent)
        self._links.join()

    def start_send(self, to: int, message: Message, context: int) -> Handle:
        """Start to send to a global rank, opening the link if this is the first message."""
        with self._news:
            if self._inbox.is_lost_to(context, to):
                raise PeerLost(to, "sending to it")
        link = self._links.to(to)
        # Under the lock, since works in the background send as well.
        with self._news:
            self.bytes_sent += message.nbytes
        return link.start_send(message, context)

    def take(self, want: Want, reason: str, memory: Tensor | None = None) -> tuple[int, Message]:
        """Receive, blocking until the message is there.

        Args:
            want: criteria of the receive.
            reason: current activity, for reports.
            memory: memory for the payload, `(n,)`; see `Communicator.receive_into`. Only with a source.
        """
        target: Target | None = None
        with self._news:
            try:
                while True:
                    self.check(want.lineage)
                    if target is not None and target.message is not None and want.source is not None:
                        return want.source, target.message
                    found = self._inbox.take(want)
                    if found is not None:
                        return found
                    self._raise_if_lost(want, reason)
                    if memory is not None and target is None:
                        target = self._inbox.offer(want, memory)
                    with self.activity.doing(reason):
                        self._news.wait()
            finally:
                if target is not None:
                    self._withdraw(target)

    def _withdraw(self, target: Target) -> None:
        """Return once no link writes to the memory of a receive; the lock is held before and after."""
        self._inbox.withdraw(target)
        if (
            target.interrupt is not None
        ):  # the receive fails while its message arrives, which will be sent again
            target.interrupt()
            self._news.wait_for(lambda: target.interrupt is None)

    def target(
        self, context: int, source: Peer, message: Message, interrupt: Callable[[], None]
    ) -> Target | None:
        with self._news:
            if source.generation != self.generation(source.rank):
                return None
            target = self._inbox.target(context, source.rank, message)
            if target is not None:
                target.interrupt = interrupt
            return target

    def release(self, target: Target) -> None:
        with self._news:
            target.interrupt = None
            self._news.notify_all()

    def take_now(self, want: Want) -> tuple[int, Message] | None:
        """Receive if the message is there."""
        inbox = self._inbox
        with self._news:
            if (
                inbox.quiet and not inbox.arrived
            ):  # nearly always: the leader looks for control messages every step
                return None
            self.check(want.lineage)
            found = inbox.take(want)
            if found is None:
                self._raise_if_lost(want, "looking for a message")
            return found

    def make(self, context: int) -> None:
        """Note that this rank has made a communicator, and will receive on it."""
        with self._news:
            self._early.make(context)

    def know_losses(self, context: int, generations: Mapping[int, int]) -> None:
        """Note the generations of a communicator's ranks."""
        with self._news:
            self._inbox.know_losses(context, generations)

    def revoke(self, context: int) -> None:
        """End the use of a communicator on this rank, and of all that are parts of it."""
        with self._news:
            news = self._inbox.revoke(context)
            if news and self._early.is_early(context):  # a message for it will never be taken
                self._inbox.drop(context)
                self._early.drop(context)
            self._news.notify_all()
        if news:
            self.collectives.revoke(context, self.background.submit)

    def need(self, context: int, peer: Peer) -> None:
        """Revokes a communicator on this rank once a peer is lost."""
        with self._news:
            self._inbox.need(context, *peer)
        self._revoke_useless()

    def _revoke_useless(self) -> None:
        with self._news:
            useless = self._inbox.useless()
        for context in useless:
            self.revoke(context)

    def computes_on(self, device: torch.device) -> None:
        """Publish this rank's device: GPUs add up by themselves only if all ranks have one."""
        if not self._has_seat:
            self.collectives.take_seat(self.rendezvous.own, device)
            self._has_seat = True

    def check_reachable(self) -> None:
        """Check that this process can open a connection to every rank that has joined.

        Raises:
            RequestError: one of them cannot be reached.
        """
        self._links.check_reachable()

    def close(self) -> None:
        """Leave the run in good order; every rank calls it when it has nothing more to send or receive."""
        # In this order: this rank's messages leave, then the others' arrive, and works in the background have
        # nothing more to wait for.
        deadline = self.clock.now() + CLOSING_PATIENCE_S
        self._links.close_outgoing(CLOSING_PATIENCE_S)
        with suppress(RuntimeError):  # without the store there is no receiver
            self._wait_to_leave(deadline)
        self._links.close_incoming(CLOSING_PATIENCE_S)
        self.background.shutdown(wait=True)
        self.collectives.close()
        self.vectors.close()
        if self.lent is not None:
            self.lent.close()

    def _wait_to_leave(self, deadline: float) -> None:
        store = self.rendezvous.store
        store.add("closed", 1)
        if self.rendezvous.keeper:  # the process that hosts the store leaves last
            while store.add("closed", 0) < self._present() and self.clock.now() < deadline:
                self.clock.sleep(0.01)

    def _present(self) -> int:
        return sum(not self._inbox.is_lost(rank) for rank in range(self.rendezvous.size))

    def check(self, lineage: tuple[int, ...]) -> None:
        """Check that a communicator may be used.

        Args:
            lineage: context of the communicator, and of those that it is a part of.

        Raises:
            CollectiveBroken: one of them has been revoked.
        """
        if self._inbox.is_revoked(lineage):
            raise CollectiveBroken(REVOKED)

    def _raise_if_lost(self, want: Want, reason: str) -> None:
        lost = self._inbox.unreported_loss(want)
        if lost is not None:
            raise PeerLost(lost, reason, self._inbox.losses(lost))

    def generation(self, rank: int) -> int:
        return self._generations.get(rank, 0)

    def is_lost(self, rank: int) -> bool:
        return self._inbox.is_lost(rank)

    def admit(self, peer: Peer) -> None:
        with self._news:
            if not 0 <= peer.rank < self.rendezvous.size or peer.generation < 0:
                raise RefusedMessage(Reason.SENDER, f"there is no rank {peer.rank} in this run")
            if peer in self._linked:
                raise RefusedMessage(Reason.SENDER, "it has a link already, so this one is a stranger's")
            self._linked.add(peer)

    def refuse(self, peer: Peer, refusal: RefusedMessage) -> None:
        with self._news:
            self.refused[refusal.reason.value] += 1
            first = (peer, refusal.reason) not in self._reported and len(self._reported) < _MOST_TOLD
            self._reported |= {(peer, refusal.reason)} if first else set()
        if first:
            own = self.rendezvous.rank
            self.notify(f"rank {own} refused a link of rank {peer.rank} ({refusal.reason}): {refusal}")

    def greet(self, peer: Peer) -> None:
        with self._news:
            if peer.generation > self.generation(peer.rank):
                self._generations[peer.rank] = peer.generation
                if self._inbox.losses(peer.rank) <= peer.generation:  # else it is gone as well
                    self._inbox.regain(*peer)
                self._early.forget(peer.rank)
                self._news.notify_all()
        self._revoke_useless()

    def deliver(self, context: int, source: Peer, message: Message, target: Target | None = None) -> None:
        if message.kind is Kind.REVOKE:
            self.revoke(context)
        with self._news:
            if target is not None:
                target.interrupt = None
                self._news.notify_all()
            if source.generation != self.generation(source.rank):  # its replacement is there already
                return
            if target is not None:
                if self._inbox.is_offered(target):
                    target.message = message
                    return
                message = message.received()  # its receive has failed, and gets its memory back
            revokes = message.kind is Kind.REVOKE
            if not revokes and self._early.is_early(context) and self._inbox.is_revoked((context,)):
                return  # it will never be taken
            self._early.count(context, source.rank, message.nbytes, self.most_bytes)
            if not revokes:
                self._inbox.put(context, source.rank, message)
                self._news.notify_all()

    def lose_receiver(self, peer: Peer) -> None:
        self._links.wait_for_deliveries(peer)
        self.lose(peer)

    def lose(self, peer: Peer) -> None:
        self._links.give_up(peer)
        with self._news:
            if peer.generation < self.generation(peer.rank):
                return
            self._inbox.lose(*peer)
            self._news.notify_all()
        self._revoke_useless()
        self.collectives.lose(peer)


_LAST_WORDS_PATIENCE_S = 0.5
_REACH_PATIENCE_S = 10.0

OutgoingLink = OutgoingMemoryLink | OutgoingTcpLink


class Links:
    """The links of one rank; a link to another is opened when it is first asked for.

    Args:
        lent: memory that this rank lends to others of its host; None: it shares no memory with them.

    Raises:
        RunError: this rank cannot listen at its address.
    """

    def __init__(
        self, rendezvous: Rendezvous, groups: Groups, membership: Membership, lent: LentSegments | None
    ) -> None:
        self._rendezvous = rendezvous
        self._groups = groups
        self._membership = membership
        self._outgoing: dict[int, OutgoingLink] = {}
        # A lock a link: one that hangs holds up no other.
        self._opening: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._tcp = self._listen()
        self._lent = lent
        self._memory = self._listen_on_host() if lent is not None else None
        memory_card = "" if self._memory is None else self._memory.card.to_text()
        self._cards = Cards(memory_card, self._tcp.identity.card.to_text())

    def join(self) -> None:
        """Let others open links, and listen for losses; news of one may be waiting already."""
        self._words = LossListener(self._rendezvous, self._membership)
        join(self._rendezvous, self._cards)

    def to(self, rank: int) -> OutgoingLink:
        """Return the link to the newest process of a rank; raise `PeerLost` if it is lost."""
        with self._opening[rank]:
            link = self._outgoing.get(rank)
            if link is None or link.generation < self._membership.generation(rank):
                if isinstance(link, OutgoingTcpLink):  # to a predecessor
                    link.give_up()
                link = self._outgoing[rank] = self._open(rank)
        return link

    def check_reachable(self) -> None:
        """Check that this process can open a connection to every rank that has joined.

        Raises:
            RequestError: one of them cannot be reached.
        """
        own, known = self._rendezvous, self._membership
        cards = {
            peer: TcpCard.from_text(found.tcp)
            for peer, found in joined_peers(own.store, own.size).items()
            if peer.rank != own.rank and not self._shares_memory(found)
        }

        def is_open(peer: Peer) -> bool:
            return is_reachable(
                cards[peer],
                _REACH_PATIENCE_S,
                lambda: known.is_lost(peer.rank) or known.generation(peer.rank) > peer.generation,
            )

        with ThreadPoolExecutor(max(1, len(cards))) as threads:
            found = dict(zip(cards, threads.map(is_open, cards), strict=True))
        for peer, reached in found.items():
            if not reached:
                card = cards[peer]
                raise RequestError(
                    f"this host ({own.address}) cannot reach rank {peer.rank} of the run at {card.address}:"
                    f"{card.port}, and ranks send to each other directly: open the firewalls between them, or join "
                    "from another host"
                )

    def _shares_memory(self, cards: Cards) -> bool:
        card = Card.from_text(cards.memory)
        return card is not None and self._memory is not None and card.host == self._memory.card.host

    def wait_for_deliveries(self, peer: Peer) -> None:
        """Return when all that a peer sent before it left has been delivered, if that is soon."""
        self._tcp.wait_for_deliveries(peer, _LAST_WORDS_PATIENCE_S)
        if self._memory is not None:
            self._memory.wait_for_deliveries(peer, _LAST_WORDS_PATIENCE_S)

    def give_up(self, peer: Peer) -> None:
        """End the links with a peer: without waiting for a host that is cut off."""
        self._tcp.give_up(peer)
        link = self._outgoing.get(peer.rank)
        if isinstance(link, OutgoingTcpLink) and link.generation == peer.generation:
            link.give_up()

    def close_outgoing(self, patience_s: float) -> None:
        """Notify all receivers that nothing more follows."""
        deadline_s = time.monotonic() + patience_s
        for link in list(self._outgoing.values()):
            link.close(max(0.0, deadline_s - time.monotonic()))

    def close_incoming(self, patience_s: float) -> None:
        """Wait for the last words of all senders; nothing can be received any more."""
        self._words.close(patience_s)
        self._tcp.close(patience_s)
        if self._memory is not None:
            self._memory.close(patience_s)

    def _listen(self) -> IncomingTcpLinks:
        own = self._rendezvous
        try:
            return IncomingTcpLinks(own.own, own.address, own.key, self._membership)
        except OSError as error:
            raise RunError(
                f"rank {own.rank} cannot listen at {own.address} ({error.strerror or error}): is it an address of this "
                "host?"
            ) from None

    def _listen_on_host(self) -> IncomingMemoryLinks | None:
        try:
            return IncomingMemoryLinks(host_key(self._rendezvous.address), self._membership)
        except OSError as error:
            _log.warning("no shared memory for messages on this host (%s): they go over TCP", error)
            return None

    def _open(self, rank: int) -> OutgoingLink:
        peer = Peer(rank, self._membership.generation(rank))
        cards = await_joined(self._groups, peer, self._membership)
        card = Card.from_text(cards.memory)
        if card is None or not self._shares_memory(cards):
            return OutgoingTcpLink(self._tcp.identity, TcpCard.from_text(cards.tcp), peer, self._membership)
        return OutgoingMemoryLink(card, self._rendezvous.own, peer, self._membership, self._lent)
