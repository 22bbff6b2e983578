"""What travels through the door: a challenge, then JSON objects that carry a proof each.

    door                                         visitor
      greeting, nonce d  ──────────────────────▶
      ◀────────────────────── nonce v, proof("visitor", d, v)
      verdict, proof("door", v, d) ────────────▶              a door that does not know the token is no door of ours
      ◀───── length | proof(direction, number) | JSON ─────▶   at most `MOST_BYTES` each, numbered from 0

Nothing of a visitor is looked at before its proof is right. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

from polyrhythm.communication.secret import NONCE_BYTES, PROOF_BYTES, nonce, prove, proves
from polyrhythm.errors import RequestError

GREETING = b"polyrhythm door 1\n"
MOST_BYTES = 1 << 18
_KNOWN, _STRANGE = b"+", b"-"
_LENGTH = struct.Struct(">I")
_DOOR, _VISITOR = "door", "visitor"


class NotAdmitted(Exception):
    """The other side of the door is none of ours, or no more.

    Attributes:
        reason: in one word, for counting.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Channel:
    """A connection whose other side has proved that it knows the token.

    Args:
        reader: from the other side.
        writer: to it.
        session: key of this connection.
        at_door: whether this side is the door.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: bytes, *, at_door: bool
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._session = session
        self._own, self._other = (_DOOR, _VISITOR) if at_door else (_VISITOR, _DOOR)
        self._sent = 0
        self._heard = 0

    async def say(self, value: dict[str, Any]) -> None:
        """Sends an object."""
        payload = json.dumps(value).encode()
        proof = prove(self._session, self._own, self._sent.to_bytes(8, "big"), payload)
        self._sent += 1
        self.writer.write(_LENGTH.pack(len(payload)) + proof + payload)
        await self.writer.drain()

    async def hear(self) -> dict[str, Any]:
        """Waits for an object.

        Raises:
            NotAdmitted: what came is too large, not the other side's, or no object.
            asyncio.IncompleteReadError: the other side has gone.
        """
        (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
        if length > MOST_BYTES:
            raise NotAdmitted("oversized", f"it announced {length} bytes, where {MOST_BYTES} are the most")
        proof = await self.reader.readexactly(PROOF_BYTES)
        payload = await self.reader.readexactly(length)
        if not proves(proof, self._session, self._other, self._heard.to_bytes(8, "big"), payload):
            raise NotAdmitted("proof", "what it sent was changed on the way")
        self._heard += 1
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise NotAdmitted("malformed", "what it sent is no object")
        return value


async def challenge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> Channel:
    """The door's side: lets nobody on who does not know the key.

    Raises:
        NotAdmitted: the visitor does not.
    """
    ours = nonce()
    writer.write(GREETING + ours)
    await writer.drain()
    try:
        theirs = await reader.readexactly(NONCE_BYTES)
        proof = await reader.readexactly(PROOF_BYTES)
    except asyncio.IncompleteReadError:
        raise NotAdmitted("silent", "it left without a proof that it knows the token") from None
    if not proves(proof, key, _VISITOR, ours, theirs):
        writer.write(_STRANGE)
        await writer.drain()
        raise NotAdmitted("token", "it does not know the token")
    writer.write(_KNOWN + prove(key, _DOOR, theirs, ours))
    await writer.drain()
    return Channel(reader, writer, _session(key, ours, theirs), at_door=True)


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, address: str
) -> Channel:
    """The visitor's side.

    Raises:
        RequestError: there is no door of ours, or its token is another.
    """
    try:
        if await reader.readexactly(len(GREETING)) != GREETING:
            raise RequestError(
                f"{address} is no run of ours: name the address that `polyrhythm train --listen` says"
            )
        theirs = await reader.readexactly(NONCE_BYTES)
        ours = nonce()
        writer.write(ours + prove(key, _VISITOR, theirs, ours))
        await writer.drain()
        verdict = await reader.readexactly(1)
        proof = await reader.readexactly(PROOF_BYTES) if verdict == _KNOWN else b""
    except asyncio.IncompleteReadError:
        raise RequestError(
            f"{address} hung up: is it the address that `polyrhythm train --listen` says?"
        ) from None
    if verdict != _KNOWN:
        raise RequestError(f"the run at {address} has another token: give its own")
    if not proves(proof, key, _DOOR, ours, theirs):
        raise RequestError(f"what listens at {address} does not know the token, and is not to be trusted")
    return Channel(reader, writer, _session(key, theirs, ours), at_door=False)


def _session(key: bytes, door: bytes, visitor: bytes) -> bytes:
    return prove(key, "session", door, visitor)
