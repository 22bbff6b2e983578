"""Where the ranks of one launcher meet, and what has happened there: what it tells each of them first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK
from polyrhythm.roles.ledger import Ledger


@dataclass(frozen=True)
class MeetingPoint:
    """Where ranks meet.

    Attributes:
        port: of the store, on the loopback interface.
        address: of this host, under which its ranks are reached by the others.
        key: that links between ranks prove to know.
        met: the incarnations of the ranks that are there, for one that comes late.
        ledger: of the run so far, for a successor of the leader.
    """

    port: int
    address: str = LOOPBACK
    key: bytes = field(default=b"", repr=False)
    met: Mapping[int, int] = field(default_factory=dict)
    ledger: Ledger | None = None

    def to_bytes(self) -> bytes:
        """Packs it for a pipe."""
        told = {"port": self.port, "address": self.address, "key": self.key.hex(), "met": dict(self.met)}
        ledger = None if self.ledger is None else self.ledger.to_json()
        return json.dumps(told | {"ledger": ledger}).encode()

    @classmethod
    def from_bytes(cls, packed: bytes) -> MeetingPoint:
        """Reads what `to_bytes` gave."""
        told = json.loads(packed)
        met = {int(rank): incarnation for rank, incarnation in told["met"].items()}
        ledger = None if told["ledger"] is None else Ledger.from_json(told["ledger"])
        return cls(told["port"], told["address"], bytes.fromhex(told["key"]), met, ledger)
