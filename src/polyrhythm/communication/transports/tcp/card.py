"""Where a rank listens for links, and what it proves who it is with."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field

from polyrhythm.communication.transports.membership import Peer

NAME_BYTES = 16


@dataclass(frozen=True)
class TcpCard:
    """Where a rank listens; left in the store for the others.

    Attributes:
        address: of its host.
        port: of its listener.
        name: hexadecimal, of the listener: drawn at random, so another process that gets the port later is told apart.
        token: hexadecimal; whoever opens a link must know it.
    """

    address: str
    port: int
    name: str
    token: str = field(repr=False)

    @classmethod
    def draw(cls, address: str, port: int) -> TcpCard:
        """Makes the card of a new listener."""
        return cls(address, port, secrets.token_hex(NAME_BYTES), secrets.token_hex(NAME_BYTES))

    def to_text(self) -> str:
        """Gives it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> TcpCard:
        """Reads what `to_text` gave."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Identity:
    """Who this process is, as its links say it.

    Attributes:
        own: its number.
        card: where it listens.
        key: of the run; may be empty.
    """

    own: Peer
    card: TcpCard
    key: bytes = field(default=b"", repr=False)
