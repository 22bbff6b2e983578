"""The sender's end of a link between two ranks of a host, and the handles of the messages that leave on it."""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
from array import array
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, encode_header
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.shared_memory.slots import (
    CHUNK_BYTES,
    GOODBYE,
    IN_CHUNKS,
    IN_PACKET,
    MOST_INLINE_BYTES,
    Card,
    LendingSlots,
    Slot,
    encode_hello,
    encode_place,
)
from polyrhythm.communication.transports.sockets import PacketSocket
from polyrhythm.errors import PeerLost, RunError


class Sent:
    """The handle of a message that has left."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Return at once."""


@dataclass(slots=True)
class Parcel:
    """A message as it leaves.

    Attributes:
        header: of the message.
        payload: `(n,)`, None if there is none or if it is in `slot`.
        slot: holds the payload.
    """

    header: bytes
    payload: Tensor | None
    slot: Slot | None


class Pending:
    """The handle of a message that could not leave at once.

    Args:
        parcel: what is to be sent.
        to: the receiver.
    """

    def __init__(self, parcel: Parcel, to: int) -> None:
        self.parcel = parcel
        self._to = to
        self._broken = False
        self._left = threading.Event()

    def end(self, broken: bool) -> None:
        """Note that it has left, or never will."""
        self.parcel.payload, self._broken = None, broken
        self._left.set()

    def done(self) -> bool:
        """Return whether it has left, or never will."""
        return self._left.is_set()

    def wait(self, patience_s: float | None = None) -> None:
        """Block until the message has left.

        Raises:
            PeerLost: the receiver is gone, or takes longer than `patience_s`.
        """
        if not self._left.wait(patience_s) or self._broken:
            raise PeerLost(self._to, "sending to it")


MOST_SHARED_BYTES = 1 << 30
"""Of one link. What does not fit, because the receiver holds all of it, goes through the socket in chunks."""

_OPENING_PATIENCE_S = 30
_log = logging.getLogger(__name__)


class OutgoingMemoryLink:
    """The sender's end. A message leaves at once if it can; else a thread sends it and whatever comes after it.

    Args:
        card: of the receiver.
        source: this rank.
        to: the receiver.
        membership: informed if the link breaks.

    Attributes:
        incarnation: of the receiver.

    Raises:
        PeerLost: the receiver is gone.
        RunError: this process may open no more files.
    """

    def __init__(self, card: Card, source: Peer, to: Peer, membership: Membership) -> None:
        self._to = to.rank
        self.incarnation = to.incarnation
        self._slots = LendingSlots(MOST_SHARED_BYTES)
        self._warned = False
        self._sending = threading.Lock()  # messages leave in the order in which they take it
        self._collecting = threading.Lock()
        self._waiting: deque[Pending] = deque()
        self._said_goodbye = False
        self._socket = _connect(card, to.rank)
        try:
            self._socket.send(encode_hello(card.token, source))
        except OSError:
            raise PeerLost(to.rank, "opening a link to it") from None
        self._watcher = threading.Thread(
            target=self._watch, args=(membership,), name=f"watch {to.rank}", daemon=True
        )
        self._watcher.start()

    def start_send(self, message: Message, context: int) -> Handle:
        """Start to send a message; its tensor must be on the CPU and contiguous."""
        return self._start(message, context) or Sent()

    def close(self, patience_s: float) -> None:
        """Tell the receiver that nothing more will come, and wait for its goodbye."""
        with suppress(PeerLost):  # a process that is gone need not be informed
            pending = self._start(Message(Kind.CLOSE), 0)
            if pending is not None:
                pending.wait(patience_s)
        self._watcher.join(patience_s)
        self._slots.close()

    def _start(self, message: Message, context: int) -> Pending | None:
        """Return what is still to be sent, if anything."""
        parcel = self._pack(message, context)
        with self._sending:
            if not self._waiting and self._sent_at_once(parcel):
                return None
            pending = Pending(parcel, self._to)
            self._waiting.append(pending)
            if len(self._waiting) == 1:
                name = f"sending to {self._to}"
                threading.Thread(target=self._send_waiting, name=name, daemon=True).start()
        return pending

    def _pack(self, message: Message, context: int) -> Parcel:
        header = encode_header(message, context)
        if message.tensor is None or message.tensor.numel() == 0:
            return Parcel(header, None, None)
        payload = message.tensor.detach()
        if payload.dim() != 1 or not payload.is_contiguous():
            payload = payload.reshape(-1).contiguous()
        if payload.nbytes <= MOST_INLINE_BYTES:
            return Parcel(header, payload, None)
        slot = self._lend(payload)
        return Parcel(header, payload if slot is None else None, slot)

    def _lend(self, payload: Tensor) -> Slot | None:
        self._collect()
        slot = self._slots.lend(payload.nbytes)
        if slot is not None:
            slot.fill(payload)
        elif self._slots.refused is not None and not self._warned:
            self._warned = True
            _log.warning(
                "no shared memory for messages to rank %d (%s): they go through a socket, more slowly",
                self._to,
                self._slots.refused,
            )
        return slot

    def _sent_at_once(self, parcel: Parcel) -> bool:
        if parcel.payload is not None and parcel.payload.nbytes > MOST_INLINE_BYTES:
            return False
        try:
            self._send_frame(parcel, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            raise PeerLost(self._to, "sending to it") from None
        return True

    def _send_waiting(self) -> None:
        """Send until nothing waits: one thread at a time, and nobody else sends meanwhile."""
        while True:
            pending = self._waiting[0]
            try:
                self._send(pending.parcel)
            except OSError:
                break
            pending.end(broken=False)
            with self._sending:
                self._waiting.popleft()
                if not self._waiting:
                    return
        with self._sending:
            for pending in self._waiting:
                pending.end(broken=True)
            self._waiting.clear()

    def _send(self, parcel: Parcel) -> None:
        payload = parcel.payload
        if payload is None or payload.nbytes <= MOST_INLINE_BYTES:
            self._send_frame(parcel, 0)
            return
        parcel.slot = self._lend(payload)  # some may have come back meanwhile
        self._send_frame(parcel, 0)
        if parcel.slot is None:
            raw = _raw(payload)
            for start in range(0, len(raw), CHUNK_BYTES):
                self._socket.send(raw[start : start + CHUNK_BYTES])

    def _send_frame(self, parcel: Parcel, flags: int) -> None:
        forgotten, slot = self._slots.forgotten, parcel.slot
        inside = slot is None and (parcel.payload is None or parcel.payload.nbytes <= MOST_INLINE_BYTES)
        place = slot.number if slot is not None else IN_PACKET if inside else IN_CHUNKS
        packet: list[bytes | memoryview] = [parcel.header, encode_place(place, forgotten)]
        if inside and parcel.payload is not None:
            packet.append(_raw(parcel.payload))
        files = []
        if slot is not None and slot.descriptor >= 0:
            files.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [slot.descriptor])))
        self._socket.sendmsg(packet, files, flags)
        self._slots.told(forgotten)
        if slot is not None:
            slot.close_descriptor()

    def _collect(self) -> None:
        """Collect what the receiver has given back, without waiting."""
        with self._collecting:
            while True:
                try:
                    numbers = self._socket.recv(1, socket.MSG_DONTWAIT)
                except OSError:  # nothing there, or nobody
                    return
                if not numbers:
                    return
                if numbers[0] == GOODBYE:
                    self._said_goodbye = True
                else:
                    self._slots.take_back(numbers[0])

    def _watch(self, membership: Membership) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)  # slots that come back wake nobody
        poll.poll()
        self._collect()
        if not self._said_goodbye:
            membership.lose_receiver(Peer(self._to, self.incarnation))


def _connect(card: Card, to: int) -> PacketSocket:
    try:
        connection = PacketSocket()
    except OSError as error:
        raise RunError(
            f"no link to rank {to} can be opened ({error.strerror}): raise the limit, for instance with ulimit -n"
        ) from None
    # Not `settimeout`, with which a connection would fail at once if many others wait to be accepted.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _OPENING_PATIENCE_S, 0))
    try:
        connection.connect(f"\0{card.address}")
    except OSError:
        raise PeerLost(to, "opening a link to it") from None
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    return connection


def _raw(payload: Tensor) -> memoryview:
    return payload.view(torch.uint8).numpy().data
