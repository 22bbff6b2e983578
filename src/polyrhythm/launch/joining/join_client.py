"""The client's side of joining a run, and its way to the run's store.

A listener of the client's own leads to the store; its connections are carried through the join server:

this process                       join server                store
  a connection to 127.0.0.1 ──▶ challenge, store? ──▶ a connection to 127.0.0.1 of the run's host
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch.joining.connections import (
    LOOPBACK,
    Address,
    Channel,
    Crowded,
    EventLoop,
    NotAdmitted,
    answer,
    hang_up,
    relay,
)
from polyrhythm.launch.joining.join_server import PATIENCE_S
from polyrhythm.strategies.role_assignment import RoleAssignment

_BACKLOG = 128
_REPLY_PATIENCE_S = 30.0
_CROWDED_PATIENCE_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 0.05, 1.0


@dataclass(frozen=True)
class Assignment:
    """A guest's place in a run.

    Attributes:
        peer: the rank, and the number of its previous processes.
        parameters: parameters that the run trains.
        roles: roles of the run.
        prefix: prefix of the run's keys in its store.
    """

    peer: Peer
    parameters: int
    roles: RoleAssignment
    prefix: str = ""


class JoinClient:
    """A guest's connection to the join server, from the challenge until it leaves.

    Args:
        address: address of the join server.
        key: key that it proves to know.

    Attributes:
        store_port: port of the forwarded store, on loopback.

    Raises:
        RequestError: no server is there, or the token differs.
    """

    def __init__(self, address: Address, key: bytes) -> None:
        self._address = address
        self._key = key
        self._left = False
        self._channel: Channel | None = None
        self._loop = EventLoop("joining")
        self._listener = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
        self.store_port = int(self._listener.getsockname()[1])
        try:
            self._channel = self._loop.call(self._enter())
            self._loop.call(asyncio.start_server(self._carry, sock=self._listener))
        except BaseException:
            self.close()
            raise

    def job(self, version: str) -> dict[str, Any]:
        """Return the job description: the recipe, and the shapes of its data and model.

        Raises:
            RequestError: the run refuses, with the reason.
        """
        return self._ask({"ask": "job", "version": version})

    def take_place(self) -> Assignment:
        """Return the place that the run gives, as soon as it has begun.

        Raises:
            RequestError: there is none, or the run is over.
        """
        answer = self._ask({"ask": "place"}, patience_s=None)
        return Assignment(
            Peer(int(answer["rank"]), int(answer["generation"])),
            int(answer["parameters"]),
            RoleAssignment(tuple(answer["workers"]), tuple(answer["servers"])),
            str(answer["prefix"]),
        )

    def listen(self, stop: Callable[[], None], over: Callable[[str], None]) -> None:
        """Call `stop` when the run is asked to stop; `over`, with which, when it is over or its launcher gone."""
        self._loop.start(self._listen(stop, over))

    def leave(self, why: str | None) -> None:
        """Notify the server that this process leaves, and why; None: it has taken all its steps."""
        self._left = True
        word = {"done": True} if why is None else {"done": False, "why": why}
        with suppress(OSError, TimeoutError):  # the run has ended already
            self._loop.call(self._own_channel.send(word), PATIENCE_S)

    def close(self) -> None:
        """Close all connections."""
        if self._channel is not None:
            self._loop.soon(partial(hang_up, self._channel.writer))
        self._loop.close()
        self._listener.close()

    def _ask(self, question: dict[str, Any], patience_s: float | None = _REPLY_PATIENCE_S) -> dict[str, Any]:
        try:
            reply = self._loop.call(self._receive_reply(question), patience_s)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, NotAdmitted):
            raise RunError(f"the run at {self._address} does not answer any more") from None
        if "refused" in reply:
            raise RequestError(f"the run at {self._address} refuses: {reply['refused']}")
        return reply

    async def _receive_reply(self, question: dict[str, Any]) -> dict[str, Any]:
        await self._own_channel.send(question)
        return await self._own_channel.receive()

    @property
    def _own_channel(self) -> Channel:
        assert self._channel is not None, "made with the client"
        return self._channel

    async def _enter(self) -> Channel:
        """Connect; again and again, after pauses that are drawn, while the join server is crowded."""
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + _CROWDED_PATIENCE_S, _FIRST_PAUSE_S
        while loop.time() < deadline_s:
            try:
                return await self._enter_once()
            except (Crowded, ConnectionResetError):  # a reset may overtake the word that sends it away
                await asyncio.sleep(pause_s * (0.5 + random.random()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise RequestError(
            f"{self._address} is crowded: too many connections that do not know its token keep it busy; try again, or "
            "find out which process opens them"
        )

    async def _enter_once(self) -> Channel:
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection(*self._address)
                try:
                    return await answer(reader, writer, self._key, str(self._address))
                except BaseException:
                    hang_up(writer)
                    raise
        except TimeoutError:
            raise RequestError(
                f"{self._address} does not answer: is it the address that `polyrhythm train --listen` prints?"
            ) from None
        except ConnectionResetError:
            raise
        except OSError as error:
            # asyncio's message on a refusal names an address, and not the reason.
            reason = os.strerror(error.errno or 0) if isinstance(error, ConnectionError) else error.strerror
            why = reason if error.errno else error
            raise RequestError(
                f"cannot reach {self._address} ({why}): is the run still active, and the address "
                "that `polyrhythm train --listen` prints?"
            ) from None

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await self._enter()
            await channel.send({"ask": "store"})
            await channel.receive()
            await relay((reader, writer), (channel.reader, channel.writer))
        except (RequestError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError, NotAdmitted):
            hang_up(writer)  # as a store that is gone

    async def _listen(self, stop: Callable[[], None], over: Callable[[str], None]) -> None:
        try:
            while True:
                word = await self._own_channel.receive()
                if word.get("stop"):
                    stop()
                if word.get("over"):
                    over("the run is over")
        except (OSError, asyncio.IncompleteReadError, NotAdmitted):
            if not self._left:
                over("the run's launcher is gone")
