"""The sender's end of a link.

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
from contextlib import suppress
from datetime import timedelta

import torch

from polyrhythm.communication.message import Kind, Message, RefusedMessage, encode_header
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.torch_distributed.challenge import answer
from polyrhythm.communication.transports.torch_distributed.groups import FOREVER, Groups
from polyrhythm.communication.transports.torch_distributed.link_words import (
    accepted,
    await_word,
    invitations,
    link_name,
)
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.communication.transports.torch_distributed.send_handle import SendHandle
from polyrhythm.errors import PeerLost

SENDER, RECEIVER = 0, 1
HEADER_TAG, PAYLOAD_TAG, GOODBYE_TAG = 1, 2, 3

OPENING_PATIENCE = timedelta(seconds=30)
"""A rank that has joined accepts a link within milliseconds, whatever it computes; one that does not is gone."""


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
            self._group = groups.gloo(name, SENDER, 2, OPENING_PATIENCE)
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
            name = link_name(rendezvous.rank, to.rank, number)
            store.queue_push(invitations(to), f"{rendezvous.rank} {rendezvous.incarnation} {number}".encode())
            await_word(store, accepted(name), to.rank, membership, OPENING_PATIENCE)
        return name

    def start_send(self, message: Message, context: int) -> SendHandle:
        """Starts to send a message; its tensor must be on the CPU and contiguous."""
        header = torch.frombuffer(bytearray(encode_header(message, context)), dtype=torch.uint8)
        try:
            with self._lock:  # a header and its payload must leave in the same order on every thread
                works = [self._group.send([header], RECEIVER, HEADER_TAG)]
                if message.tensor is not None and message.tensor.numel():
                    works.append(self._group.send([message.tensor], RECEIVER, PAYLOAD_TAG))
        except RuntimeError:
            raise PeerLost(self._to, "sending to it") from None
        return SendHandle(works, (header, message.tensor), self._to)

    def close(self, patience_s: float) -> None:
        """Tells the receiver that nothing more will come, and waits for its goodbye."""
        with suppress(PeerLost):  # who is gone needs not be told
            self.start_send(Message(Kind.CLOSE), 0).wait(timedelta(seconds=patience_s))
        self._watcher.join(patience_s)

    def _watch(self, membership: Membership) -> None:
        try:
            goodbye = torch.empty(1, dtype=torch.uint8)
            self._group.recv([goodbye], RECEIVER, GOODBYE_TAG).wait(FOREVER)
        except RuntimeError:
            membership.lose_receiver(Peer(self._to, self.incarnation))
