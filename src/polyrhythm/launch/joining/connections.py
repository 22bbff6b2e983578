"""Connections between the join server and its clients: addresses, authenticated frames, event loop, relay.

`Address` is HOST:PORT, as people write it. A connection opens with a challenge, and then carries JSON objects
with a proof each:

    server                                       client
      greeting, nonce d  ──────────────────────▶
      ◀────────────────────── nonce v, proof("visitor", d, v)
      verdict, proof("door", v, d) ────────────▶              a server that does not know the token is not the run's
      ◀───── length | proof(direction, number) | JSON ─────▶   at most `MOST_BYTES` each, numbered from 0

Nothing that a client sends is looked at before its proof is right. Nothing is unpickled. `EventLoop` is a
thread of its own for what waits on sockets, next to a program that computes; `relay` carries bytes between two
connections until both sides have sent all. The keys of the proofs follow from the run token.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import stat
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.communication.secret import NONCE_BYTES, PROOF_BYTES, nonce, prove, proves
from polyrhythm.errors import RequestError
from polyrhythm.escaping import shell
from polyrhythm.user_files import check_is_file

LOOPBACK = "127.0.0.1"
_MOST_PORT = 65535


class Address(NamedTuple):
    """Address of a join server.

    Attributes:
        host: name or number of the host.
        port: 0 for any that is free.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address of `HOST:PORT`, or a port alone, which is one of the loopback interface.

    Raises:
        RequestError: it is something else.
    """
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdecimal() and int(port) <= _MOST_PORT):
        raise RequestError(
            f"cannot read the address {text!r}: write HOST:PORT, such as 10.0.0.5:4711, or PORT"
        )
    return Address(host, int(port))


def listener_at(address: Address) -> socket.socket:
    """Return a socket that listens at an address of this host that others reach.

    Raises:
        RequestError: it is none, or in use.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        if target[0] in ("0.0.0.0", "::"):
            raise RequestError(
                f"--listen {address} names no interface: give the address under which others reach this host"
            )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(
            f"--listen {address}: {error.strerror or error}; give an address of this host"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen()
    except OSError as error:
        listener.close()
        raise RequestError(
            f"--listen {address} cannot be used ({error.strerror}): give another port, or an address of this host"
        ) from None
    return listener


GREETING = b"polyrhythm door 1\n"
MOST_BYTES = 1 << 18
_KNOWN, _STRANGE, CROWDED = b"+", b"-", b"~"
"""Verdicts: the client knows the token, or not; or it was sent away before, as too many were there."""
_LENGTH = struct.Struct(">I")
_DOOR, _VISITOR = "door", "visitor"


class Crowded(Exception):
    """Too many strangers are at the join server: it may be tried again."""


class NotAdmitted(Exception):
    """The other side of a connection does not belong to the run, or no longer.

    Attributes:
        reason: reason in one word, for counting.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Channel:
    """A connection to a peer that has proved to know the token.

    Args:
        reader: reader from the other side.
        writer: writer to it.
        session: key of this connection.
        at_door: whether this side is the server.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: bytes, *, at_door: bool
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._session = session
        self._own, self._other = (_DOOR, _VISITOR) if at_door else (_VISITOR, _DOOR)
        self._sent = 0
        self._received = 0

    async def send(self, value: dict[str, Any]) -> None:
        """Send an object."""
        payload = json.dumps(value).encode()
        proof = prove(self._session, self._own, self._sent.to_bytes(8, "big"), payload)
        self._sent += 1
        self.writer.write(_LENGTH.pack(len(payload)) + proof + payload)
        await self.writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Wait for an object, and return it.

        Raises:
            NotAdmitted: the message is too large, not the other side's, or no object.
            asyncio.IncompleteReadError: the other side has gone.
        """
        (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
        if length > MOST_BYTES:
            raise NotAdmitted("oversized", f"it announced {length} bytes, where {MOST_BYTES} are the most")
        proof = await self.reader.readexactly(PROOF_BYTES)
        payload = await self.reader.readexactly(length)
        if not proves(proof, self._session, self._other, self._received.to_bytes(8, "big"), payload):
            raise NotAdmitted("proof", "what it sent was changed on the way")
        self._received += 1
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise NotAdmitted("malformed", "what it sent is no object")
        return value


async def challenge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> Channel:
    """Return the server's channel to a client that knows the key.

    Raises:
        NotAdmitted: the client does not.
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
    """Return the client's channel to the server.

    Raises:
        RequestError: no join server is there, or its token is another.
        Crowded: it has sent this client away.
    """
    try:
        if await reader.readexactly(len(GREETING)) != GREETING:
            raise RequestError(
                f"{address} is no run of ours: name the address that `polyrhythm train --listen` prints"
            )
        theirs = await reader.readexactly(NONCE_BYTES)
        ours = nonce()
        writer.write(ours + prove(key, _VISITOR, theirs, ours))
        await writer.drain()
        verdict = await reader.readexactly(1)
        proof = await reader.readexactly(PROOF_BYTES) if verdict == _KNOWN else b""
    except asyncio.IncompleteReadError:
        raise RequestError(
            f"{address} hung up: is it the address that `polyrhythm train --listen` prints?"
        ) from None
    if verdict == CROWDED:
        raise Crowded
    if verdict != _KNOWN:
        raise RequestError(f"the run at {address} has another token: give its own")
    if not proves(proof, key, _DOOR, ours, theirs):
        raise RequestError(f"what listens at {address} does not know the token, and is not to be trusted")
    return Channel(reader, writer, _session(key, theirs, ours), at_door=False)


def _session(key: bytes, door: bytes, visitor: bytes) -> bytes:
    return prove(key, "session", door, visitor)


_Result = TypeVar("_Result")


class EventLoop:
    """An event loop on a thread of this name; made and ended by the main one."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, _Result], patience_s: float | None = None) -> _Result:
        """Run a coroutine on the thread, and return its result; TimeoutError after `patience_s`."""
        return self.start(work).result(patience_s)

    def start(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Start a coroutine on the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, act: Callable[[], None]) -> None:
        """Call a function on the thread, soon."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        """Cancel what is in progress, and end the thread."""
        with suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(2):  # closed connections are removed a turn of the loop later
        await asyncio.sleep(0)


class Descriptors:
    """Files of this process that a forked child must not keep open: its copies would hide that they are closed."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def add(self, descriptor: int) -> None:
        """Add one."""
        self._open.add(descriptor)

    def remove(self, descriptor: int) -> None:
        """Remove one that is about to be closed."""
        self._open.discard(descriptor)

    def close(self) -> None:
        """Close them all; in a forked child, which has copies of its own."""
        for descriptor in self._open:
            with suppress(OSError):
                os.close(descriptor)
        self._open.clear()


DESCRIPTORS = Descriptors()
os.register_at_fork(after_in_child=DESCRIPTORS.close)


_PIECE_BYTES = 1 << 16


async def relay(
    first: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    second: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Forward data between two connections; return when one of them has broken, or both have ended."""
    ways = [
        asyncio.create_task(_carry(first[0], second[1])),
        asyncio.create_task(_carry(second[0], first[1])),
    ]
    try:
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (first, second):
            hang_up(writer)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof()


def hang_up(writer: asyncio.StreamWriter) -> None:
    """End a connection; the other side hears of it even where a forked process has a copy of the socket."""
    with suppress(OSError, RuntimeError):
        writer.write_eof()
    writer.close()


# The run token: the secret that a worker must know to join a run.

TOKEN_VARIABLE = "POLYRHYTHM_TOKEN"
"""In the environment: the token itself."""

TOKEN_FILE = "join-token"
"""File in the run folder with the token of a run started without one, readable by its owner alone."""

LEAST_CHARACTERS = 16
_MOST_TOKEN_CHARACTERS = 1 << 16
_DRAWN_BYTES = 32
_PRIVATE = 0o600


def read_token(file: str | Path | None) -> str | None:
    """Return the token that the user has given in a file, else in the environment; None where neither is given.

    Raises:
        RequestError: the file cannot be read, or can be read by other users, or the token is too short to be
            safe.
    """
    where = f"the environment's {TOKEN_VARIABLE}" if file is None else str(file)
    if file is None:
        text = os.environ.get(TOKEN_VARIABLE)
        if text is None:
            return None
    else:
        check_is_file(Path(file), "the token file")
        try:
            with Path(file).open(encoding="utf-8") as opened:
                if os.fstat(opened.fileno()).st_mode & stat.S_IROTH:
                    raise RequestError(
                        f"the token file {file} can be read by every user of this host: chmod 600 {shell(file)}"
                    )
                text = opened.read(_MOST_TOKEN_CHARACTERS)
        except RequestError:
            raise
        except OSError as error:
            raise RequestError(f"cannot read the token file {file}: {error.strerror}") from None
        except ValueError:
            raise RequestError(f"cannot read the token file {file}: it holds no text") from None
    token = text.strip()
    if len(token) < LEAST_CHARACTERS:
        raise RequestError(
            f"the token of {where} has {len(token)} characters: make one of {LEAST_CHARACTERS} or more, with "
            "`openssl rand -hex 32` for example"
        )
    return token


def draw_token(folder: Path, claim: Unclaimed = UNCLAIMED) -> tuple[str, Path]:
    """Draw a token and write it into the run folder, readable by the user alone; return it and the file.

    Raises:
        Superseded: the folder is another's.
    """
    token, path = secrets.token_hex(_DRAWN_BYTES), folder / TOKEN_FILE
    draft = claim.draft(path)
    draft.unlink(missing_ok=True)  # one of an earlier session may be open to others
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "w", encoding="utf-8") as file:
        file.write(f"{token}\n")
    claim.publish(path)
    return token, path


def door_key(token: str) -> bytes:
    """Return the key that clients of the join server prove to know."""
    return prove(token.encode(), "polyrhythm door")


def link_key(token: str) -> bytes:
    """Return the key of links between ranks; a proof of one key reveals nothing about the other."""
    return prove(token.encode(), "polyrhythm links")
