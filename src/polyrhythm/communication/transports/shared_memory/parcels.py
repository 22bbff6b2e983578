"""Messages on their way over a link inside a host, and the handles of their senders."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from polyrhythm.communication.transports.shared_memory.slots import Slot
from polyrhythm.errors import PeerLost


class Sent:
    """The handle of a message that has left."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Returns at once."""


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
        """Notes that it has left, or never will."""
        self.parcel.payload, self._broken = None, broken
        self._left.set()

    def done(self) -> bool:
        """Whether it has left, or never will."""
        return self._left.is_set()

    def wait(self, patience_s: float | None = None) -> None:
        """Blocks until the message has left.

        Raises:
            PeerLost: the receiver is gone, or takes longer than `patience_s`.
        """
        if not self._left.wait(patience_s) or self._broken:
            raise PeerLost(self._to, "sending to it")
