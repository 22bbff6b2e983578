"""Where the ranks of one launcher meet: what it tells each of them first."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK


@dataclass(frozen=True)
class MeetingPoint:
    """Where ranks meet.

    Attributes:
        port: of the store, on the loopback interface.
        address: of this host, under which its ranks are reached by the others.
        key: that links between ranks prove to know.
    """

    port: int
    address: str = LOOPBACK
    key: bytes = field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """Packs it for a pipe."""
        return json.dumps({"port": self.port, "address": self.address, "key": self.key.hex()}).encode()

    @classmethod
    def from_bytes(cls, packed: bytes) -> MeetingPoint:
        """Reads what `to_bytes` gave."""
        told = json.loads(packed)
        return cls(told["port"], told["address"], bytes.fromhex(told["key"]))
