"""Links: one-directional connections between two ranks, opened by the sender when it first has something to say.

    sender                     store                        receiver
    open_link ── invitation ──▶ queue of the receiver ──▶ acceptor thread
        ├───────────── gloo group of the two ─────────────────┐ └─▶ reader thread ─▶ inbox
    watcher thread ◀──────────── goodbye ─────────────────────┘

Each link is a gloo group of two, so a rank that dies breaks its own links and no others, and a newcomer needs
nobody's leave to open one. A successor of a dead rank has the same number and another incarnation: its queue of
invitations and its links are its own, so nothing that was meant for the dead one reaches it. Header and payload travel
under different tags of the same pair, in order. The only thing that travels back is the receiver's goodbye: a link
that breaks without one tells the sender, who may be waiting for an answer, that the receiver is gone. Whoever knows
better of a death (a launcher) leaves word in the queues of the others.

Where ranks have a key, a link begins with a challenge (see `challenge.py`), before anything else is taken from it.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from polyrhythm.communication.message import (
    HEADER_BYTES,
    Kind,
    MalformedMessage,
    Message,
    RefusedMessage,
    decode_header,
    encode_header,
)
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.torch_distributed.challenge import answer, challenge
from polyrhythm.communication.transports.torch_distributed.groups import FOREVER, Groups
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import PeerLost

_SENDER, _RECEIVER = 0, 1
_HEADER_TAG, _PAYLOAD_TAG, _GOODBYE_TAG = 1, 2, 3
_CLOSE, _LOST = "close", "lost"

OPENING_PATIENCE = timedelta(seconds=30)
"""A rank that has joined accepts a link within milliseconds, whatever it computes; one that does not is gone."""

_GOODBYE_PATIENCE = timedelta(seconds=1)
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.05


class SendHandle:
    """A message that is leaving; keeps its bytes alive until then.

    Args:
        works: the library's, one for the header and one for the payload. Each can be waited for only once.
        kept: what the library reads from.
        to: the receiver.
    """

    def __init__(self, works: list[Any], kept: tuple[torch.Tensor | None, ...], to: int) -> None:
        self._works = works
        self._kept = kept
        self._to = to
        self._ended = False
        self._broken = False
        self._ending = threading.Lock()
        self._waiter: threading.Thread | None = None

    def done(self) -> bool:
        """Whether the message has left. The library's sends cannot be asked, so who asks gets a thread that waits."""
        if not self._ended and self._waiter is None:
            self._waiter = threading.Thread(target=self._end, name=f"sending to {self._to}", daemon=True)
            self._waiter.start()
        return self._ended

    def wait(self, patience: timedelta = FOREVER) -> None:
        """Blocks until the message has left.

        Raises:
            PeerLost: the receiver is gone, or takes longer than `patience`; the link is of no use then.
        """
        self._end(patience)
        if self._broken:
            raise PeerLost(self._to, "sending to it")

    def _end(self, patience: timedelta = FOREVER) -> None:
        with self._ending:
            if self._ended:
                return
            try:
                for work in self._works:
                    work.wait(patience)
            except RuntimeError:
                self._broken = True
            self._works, self._kept, self._ended = [], (), True


class OutgoingLink:
    """The sender's end.

    Args:
        groups: makes the link's group.
        rendezvous: where invitations are left.
        to: the receiver; it has joined.
        membership: is told if the link breaks.

    Attributes:
        incarnation: of the receiver.

    Raises:
        PeerLost: the receiver is gone, or has joined but does not answer.
    """

    def __init__(self, groups: Groups, rendezvous: Rendezvous, to: int, membership: Membership) -> None:
        self._to = to
        self._lock = threading.Lock()
        self.incarnation = membership.incarnation(to)
        name = self._invite(groups, rendezvous, membership)
        try:
            self._group = groups.gloo(name, _SENDER, 2, OPENING_PATIENCE)
            if rendezvous.key:
                answer(self._group, rendezvous.key, name, OPENING_PATIENCE)
        except (RuntimeError, RefusedMessage):
            raise PeerLost(to, "opening a link to it") from None
        self._watcher = threading.Thread(
            target=self._watch, args=(membership,), name=f"watch {to}", daemon=True
        )
        self._watcher.start()

    def _invite(self, groups: Groups, rendezvous: Rendezvous, membership: Membership) -> str:
        """Leaves an invitation and waits until it is accepted; gives the name of the link's group."""
        to = Peer(self._to, self.incarnation)
        with groups.connection() as store:
            number = store.add(f"links/{to.rank}", 1)
            name = _link(rendezvous.rank, to.rank, number)
            store.queue_push(
                _invitations(to), f"{rendezvous.rank} {rendezvous.incarnation} {number}".encode()
            )
            _await(store, _accepted(name), to.rank, membership, OPENING_PATIENCE)
        return name

    def start_send(self, message: Message, context: int) -> SendHandle:
        """Starts to send a message; its tensor must be on the CPU and contiguous."""
        header = torch.frombuffer(bytearray(encode_header(message, context)), dtype=torch.uint8)
        try:
            with self._lock:  # a header and its payload must leave in the same order on every thread
                works = [self._group.send([header], _RECEIVER, _HEADER_TAG)]
                if message.tensor is not None and message.tensor.numel():
                    works.append(self._group.send([message.tensor], _RECEIVER, _PAYLOAD_TAG))
        except RuntimeError:
            raise PeerLost(self._to, "sending to it") from None
        return SendHandle(works, (header, message.tensor), self._to)

    def close(self, patience_s: float) -> None:
        """Tells the receiver that nothing more will come, and waits for its goodbye."""
        with suppress(PeerLost):  # who is gone needs not be told
            self.start_send(Message(Kind.CLOSE), 0).wait(timedelta(seconds=patience_s))
        self._watcher.join(patience_s)

    def give_up(self) -> None:
        """Ends all sends that are under way, to a receiver that may still be there and takes nothing."""
        self._group.abort()

    def _watch(self, membership: Membership) -> None:
        try:
            goodbye = torch.empty(1, dtype=torch.uint8)
            self._group.recv([goodbye], _RECEIVER, _GOODBYE_TAG).wait(FOREVER)
        except RuntimeError:
            membership.lose_receiver(Peer(self._to, self.incarnation))


class IncomingLinks:
    """The receiver's end of all links to one rank: an acceptor thread, and a reader thread a link.

    Args:
        groups: makes the links' groups.
        rendezvous: where invitations arrive.
        membership: is told what happens on the links.
    """

    def __init__(self, groups: Groups, rendezvous: Rendezvous, membership: Membership) -> None:
        self._groups = groups
        self._own = rendezvous.own
        self._key = rendezvous.key
        self._store = rendezvous.store.clone()
        self._store.set_timeout(FOREVER)
        self._closing_store = rendezvous.store
        self._membership = membership
        self._readers: set[threading.Thread] = set()
        self._open: dict[int, Any] = {}
        self._acceptor = threading.Thread(target=self._accept, name="acceptor", daemon=True)

    def start(self) -> None:
        """Accepts links from now on; word of a loss may be waiting already."""
        self._acceptor.start()

    def close(self, patience_s: float) -> None:
        """Stops accepting, says goodbye and waits for the senders' last words."""
        deadline = time.monotonic() + patience_s
        with suppress(RuntimeError):  # the store is gone, and so the acceptor has stopped
            self._closing_store.queue_push(_invitations(self._own), _CLOSE.encode())
        self._acceptor.join(patience_s)
        for number in list(self._open):
            self._say_goodbye(number)
        for reader in list(self._readers):
            reader.join(max(0.0, deadline - time.monotonic()))

    def wait_for_last_words(self, source: Peer, patience_s: float) -> None:
        """Returns when all that a sender sent before it left has been delivered, if that is soon."""
        deadline = time.monotonic() + patience_s
        for reader in list(self._readers):
            if reader.name == _reader_name(source):
                reader.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                invitation = self._store.queue_pop(_invitations(self._own), True).decode()
            except (RuntimeError, dist.DistError):
                return  # the store is gone, and with it the run
            if invitation == _CLOSE:
                return
            if invitation.startswith(_LOST):
                self._hear_of_loss(Peer(*map(int, invitation.split()[1:])))
                continue
            rank, incarnation, number = map(int, invitation.split())
            source = Peer(rank, incarnation)
            reader = threading.Thread(
                target=self._read, args=(source, number), name=_reader_name(source), daemon=True
            )
            self._readers.add(reader)
            reader.start()

    def _hear_of_loss(self, peer: Peer) -> None:
        # On a thread of its own: it waits for the peer's last words, and must not keep newcomers out.
        threading.Thread(target=self._membership.lose_receiver, args=(peer,), daemon=True).start()

    def _read(self, source: Peer, number: int) -> None:
        name = _link(source.rank, self._own.rank, number)
        try:
            # Here and not in the acceptor: a sender that dies while it opens a link must not keep others out.
            with self._groups.connection() as store:
                store.set(_accepted(name), "")
            group = self._groups.gloo(name, _RECEIVER, 2, OPENING_PATIENCE)
            if not self._is_ours(group, source, name):
                return
            self._open[number] = group
            self._membership.greet(source)
            self._receive(group, source)
            self._say_goodbye(number)
        except MalformedMessage as refusal:
            self._membership.refuse(source, refusal)
            self._membership.lose(source)
        except RuntimeError:
            self._membership.lose(source)
        finally:
            self._open.pop(number, None)
            self._readers.discard(threading.current_thread())

    def _is_ours(self, group: Any, source: Peer, name: str) -> bool:
        """Whether a new link is what it is said to be. One that is not says nothing about that peer."""
        try:
            if self._key:
                challenge(group, self._key, name, OPENING_PATIENCE)
            self._membership.admit(source)
        except RefusedMessage as refusal:
            self._membership.refuse(source, refusal)
            return False
        return True

    def _receive(self, group: Any, source: Peer) -> None:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        while True:
            group.recv([header], _SENDER, _HEADER_TAG).wait(FOREVER)
            context, message = decode_header(header.numpy().tobytes(), most_bytes=self._membership.most_bytes)
            if message.kind is Kind.CLOSE:
                return
            if message.tensor is not None and message.tensor.numel():
                group.recv([message.tensor], _SENDER, _PAYLOAD_TAG).wait(FOREVER)
            self._membership.deliver(context, source, message)

    def _say_goodbye(self, number: int) -> None:
        group = self._open.pop(number, None)
        if group is not None:  # else it has been said
            with suppress(RuntimeError):
                goodbye = torch.zeros(1, dtype=torch.uint8)
                group.send([goodbye], _SENDER, _GOODBYE_TAG).wait(_GOODBYE_PATIENCE)


def tell_of_loss(store: Any, lost: Peer, to: Peer) -> None:
    """Leaves word for a rank that another is gone; who has seen a process die need not wait until links break.

    Args:
        store: where the ranks meet.
        lost: who is gone.
        to: who is told.
    """
    store.queue_push(_invitations(to), f"{_LOST} {lost.rank} {lost.incarnation}".encode())


def _reader_name(source: Peer) -> str:
    return f"from {source.rank}, incarnation {source.incarnation}"


def join(rendezvous: Rendezvous, card: str) -> None:
    """Says that links to this rank may be opened from now on.

    Args:
        rendezvous: where to say it.
        card: how ranks of the same host reach this one; empty if they have no way of their own.
    """
    rendezvous.store.set(_card(rendezvous.own), card)
    rendezvous.store.set(_joined(rendezvous.rank), str(rendezvous.incarnation))


def await_joined(groups: Groups, peer: Peer, membership: Membership) -> str:
    """Waits until a peer has joined, and gives its card.

    Raises:
        PeerLost: it is gone.
    """
    with groups.connection() as store:
        _await(store, _joined(peer.rank), peer.rank, membership, FOREVER)
        if int(store.get(_joined(peer.rank))) > peer.incarnation:  # it has a successor already
            membership.lose_receiver(peer)
            raise PeerLost(peer.rank, "opening a link to it")
        return str(store.get(_card(peer)).decode())


def _await(store: Any, key: str, to: int, membership: Membership, patience: timedelta) -> None:
    give_up_at, pause_s = time.monotonic() + patience.total_seconds(), _SHORTEST_PAUSE_S
    while not store.check([key]):
        if membership.is_lost(to) or time.monotonic() > give_up_at:
            raise PeerLost(to, "opening a link to it")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _card(peer: Peer) -> str:
    return f"card/{peer.rank}/{peer.incarnation}"


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _invitations(to: Peer) -> str:
    return f"invitations/{to.rank}/{to.incarnation}"


def _accepted(link: str) -> str:
    return f"accepted/{link}"


def _link(source: int, to: int, number: int) -> str:
    return f"link/{source}-{to}/{number}"
