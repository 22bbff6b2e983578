"""The receiver's end of all links to one rank; see `outgoing_link.py` for what a link is."""

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
    RefusedMessage,
    decode_header,
)
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.torch_distributed.challenge import challenge
from polyrhythm.communication.transports.torch_distributed.groups import FOREVER, Groups
from polyrhythm.communication.transports.torch_distributed.link_words import (
    CLOSE,
    LOST,
    accepted,
    invitations,
    link_name,
)
from polyrhythm.communication.transports.torch_distributed.outgoing_link import (
    GOODBYE_TAG,
    HEADER_TAG,
    OPENING_PATIENCE,
    PAYLOAD_TAG,
    RECEIVER,
    SENDER,
)
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous

_GOODBYE_PATIENCE = timedelta(seconds=1)


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
            self._closing_store.queue_push(invitations(self._own), CLOSE.encode())
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
                invitation = self._store.queue_pop(invitations(self._own), True).decode()
            except (RuntimeError, dist.DistError):
                return  # the store is gone, and with it the run
            if invitation == CLOSE:
                return
            if invitation.startswith(LOST):
                self._hear_of_loss(Peer(*map(int, invitation.split()[1:])))
                continue
            rank, incarnation, number = map(int, invitation.split())
            source = Peer(rank, incarnation)
            reader = threading.Thread(
                target=self._read, args=(source, number), name=_reader_name(source), daemon=True
            )
            self._readers -= {ended for ended in self._readers if not ended.is_alive()}
            self._readers.add(reader)
            reader.start()

    def _hear_of_loss(self, peer: Peer) -> None:
        # On a thread of its own: it waits for the peer's last words, and must not keep newcomers out.
        threading.Thread(target=self._membership.lose_receiver, args=(peer,), daemon=True).start()

    def _read(self, source: Peer, number: int) -> None:
        name = link_name(source.rank, self._own.rank, number)
        try:
            # Here and not in the acceptor: a sender that dies while it opens a link must not keep others out.
            with self._groups.connection() as store:
                store.set(accepted(name), "")
            group = self._groups.gloo(name, RECEIVER, 2, OPENING_PATIENCE)
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
            group.recv([header], SENDER, HEADER_TAG).wait(FOREVER)
            context, message = decode_header(header.numpy().tobytes(), most_bytes=self._membership.most_bytes)
            if message.kind is Kind.CLOSE:
                return
            if message.tensor is not None and message.tensor.numel():
                group.recv([message.tensor], SENDER, PAYLOAD_TAG).wait(FOREVER)
            self._membership.deliver(context, source, message)

    def _say_goodbye(self, number: int) -> None:
        group = self._open.pop(number, None)
        if group is not None:  # else it has been said
            with suppress(RuntimeError):
                goodbye = torch.zeros(1, dtype=torch.uint8)
                group.send([goodbye], SENDER, GOODBYE_TAG).wait(_GOODBYE_PATIENCE)


def _reader_name(source: Peer) -> str:
    return f"from {source.rank}, incarnation {source.incarnation}"
