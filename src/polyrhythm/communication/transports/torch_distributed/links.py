"""Links: one-directional connections between two ranks, opened by the sender when it first has something to say.

    sender                     store                        receiver
    open_link ── invitation ──▶ queue of the receiver ──▶ acceptor thread
        └───────────── gloo group of the two ─────────────────┘ └─▶ reader thread ─▶ inbox

Each link is a gloo group of two, so a rank that dies breaks its own links and no others, and a newcomer needs
nobody's leave to open one. Header and payload travel under different tags of the same pair, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from polyrhythm.communication.message import HEADER_BYTES, Kind, MalformedMessage, Message, decode_header, encode_header
from polyrhythm.communication.transports.torch_distributed.groups import FOREVER, Groups
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import PeerLost

_SENDER, _RECEIVER = 0, 1
_HEADER_TAG, _PAYLOAD_TAG = 1, 2
_CLOSE = "close"


class SendHandle:
    """A message that is leaving; keeps its bytes alive until then."""

    def __init__(self, works: list[Any], kept: tuple[torch.Tensor | None, ...], to: int) -> None:
        self._works = works
        self._kept = kept
        self._to = to

    def done(self) -> bool:
        """Whether the message has left."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Blocks until the message has left."""
        try:
            for work in self._works:
                work.wait(FOREVER)
        except RuntimeError:
            raise PeerLost(self._to, "sending to it") from None


class OutgoingLink:
    """The sender's end."""

    def __init__(self, groups: Groups, store: dist.Store, source: int, to: int) -> None:
        number = store.add(f"links/{to}", 1)
        store.queue_push(f"invitations/{to}", f"{source} {number}".encode())
        self._group = groups.gloo(f"link/{source}-{to}/{number}", _SENDER, 2)
        self._to = to
        self._lock = threading.Lock()

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

    def close(self) -> None:
        """Tells the receiver that nothing more will come."""
        self.start_send(Message(Kind.CLOSE), 0).wait()


class IncomingLinks:
    """The receiver's end of all links to one rank: an acceptor thread, and a reader thread a link.

    Args:
        groups: makes the links' groups.
        rendezvous: where invitations arrive.
        deliver: called by reader threads with the context, the sender and its message.
        lose: called with a sender whose link broke.
    """

    def __init__(
        self,
        groups: Groups,
        rendezvous: Rendezvous,
        deliver: Callable[[int, int, Message], None],
        lose: Callable[[int], None],
    ) -> None:
        self._groups = groups
        self._rank = rendezvous.rank
        self._store = rendezvous.store.clone()
        self._store.set_timeout(FOREVER)
        self._closing_store = rendezvous.store
        self._deliver = deliver
        self._lose = lose
        self._readers: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="acceptor", daemon=True)
        self._acceptor.start()

    def close(self, patience_s: float) -> None:
        """Stops accepting and waits for the senders' last words."""
        self._closing_store.queue_push(f"invitations/{self._rank}", _CLOSE.encode())
        for thread in [self._acceptor, *self._readers]:
            thread.join(patience_s)

    def _accept(self) -> None:
        while True:
            try:
                invitation = self._store.queue_pop(f"invitations/{self._rank}", True).decode()
            except (RuntimeError, dist.DistError):
                return  # the store is gone, and with it the run
            if invitation == _CLOSE:
                return
            source, number = map(int, invitation.split())
            group = self._groups.gloo(f"link/{source}-{self._rank}/{number}", _RECEIVER, 2)
            reader = threading.Thread(target=self._read, args=(group, source), name=f"from {source}", daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, group: Any, source: int) -> None:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        try:
            while True:
                group.recv([header], _SENDER, _HEADER_TAG).wait(FOREVER)
                context, message = decode_header(header.numpy().tobytes())
                if message.kind is Kind.CLOSE:
                    return
                if message.tensor is not None and message.tensor.numel():
                    group.recv([message.tensor], _SENDER, _PAYLOAD_TAG).wait(FOREVER)
                self._deliver(context, source, message)
        except (RuntimeError, MalformedMessage):
            self._lose(source)
