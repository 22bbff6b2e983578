"""The door of a run: the only way in for who was not started by its launcher.

visitor          door (a thread of the launcher)                   launcher
  challenge ───▶ the token is right? else refused, counted
  job? ────────▶ the recipe, and what its data and model are like
  place? ──────▶ one that is vacant: rank, incarnation ──────────▶ came: told of the losses from now on
  store? ──────▶ a connection to the store, passed through          (the store itself stays on loopback)
  …
  ◀──── stop ─── the run is asked to stop ◀───────────────────────
  (gone) ──────▶ its place is vacant again ───────────────────────▶ went: the others are told at once

Where torchrun has started the ranks, worker 0's process is what is called launcher here, and the store torchrun's.
"""

from __future__ import annotations

import asyncio
import queue
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.launch.joining.address import Address
from polyrhythm.launch.joining.event_loop import DESCRIPTORS, EventLoop
from polyrhythm.launch.joining.frames import Channel, NotAdmitted, challenge
from polyrhythm.launch.joining.places import Places
from polyrhythm.launch.joining.relay import hang_up, relay
from polyrhythm.strategies.cast import Cast

PATIENCE_S = 5.0
"""A visitor proves within this time that it knows the token."""

MOST_STRANGERS = 64
"""So many may be about to prove it at once."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A visitor's host that is cut off is noticed after 20 s, if nothing else notices."""


_NOBODY = Peer(-1, 0)


@dataclass(frozen=True)
class News:
    """What has happened at the door.

    Attributes:
        what: `came`, `went`, `done` (it has taken all its steps) or `refused`.
        who: address of the visitor.
        peer: the place that it has or had.
        why: it went or was refused.
        reason: for counting: why it was refused, in one word.
    """

    what: str
    who: str
    peer: Peer = _NOBODY
    why: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Inside:
    """What is behind a door.

    Attributes:
        store: where the run's store is, as seen from the door.
        cast: of the run.
        prefix: what the run's keys have in front in that store.
    """

    store: Address
    cast: Cast
    prefix: str = ""


class Door:
    """Lets in whoever knows the token.

    Args:
        listener: where it is; its owner from now on.
        key: of the door.
        offer: what a visitor is told of the job.
        places: that may be taken.

    Attributes:
        address: where it is.
        refused: attempts that came to nothing, by reason.
    """

    def __init__(self, listener: socket.socket, key: bytes, offer: dict[str, Any], places: Places) -> None:
        self.address = Address(*listener.getsockname()[:2])
        self.refused: Counter[str] = Counter()
        self._key = key
        self._offer = offer
        self._places = places
        self._inside: Inside | None = None
        self._begun = asyncio.Event()
        self._over = False
        self._parameters = 0
        self._strangers = 0
        self._guests: dict[Peer, Channel] = {}
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._bell, self._ringing = socket.socketpair()
        self._ringing.setblocking(False)
        self._bell.setblocking(False)
        for descriptor in (self._bell, self._ringing):
            DESCRIPTORS.add(descriptor.fileno())
        self._listener = listener
        self._loop = EventLoop("door")
        self._server: asyncio.Server | None = None

    def fileno(self) -> int:
        """Becomes readable when there is news."""
        return self._bell.fileno()

    def open(self, inside: Inside) -> None:
        """Lets visitors in.

        Args:
            inside: what they find.
        """
        self._inside = inside
        self._server = self._loop.call(asyncio.start_server(self._receive, sock=self._listener))

    def begin(self, parameters: int) -> None:
        """The run is under way, and places may be taken.

        Args:
            parameters: that it trains; who takes a place is told how many.
        """
        self._parameters = parameters
        self._loop.soon(self._begun.set)

    def news(self) -> list[News]:
        """Takes what has happened."""
        with suppress(BlockingIOError):
            while self._bell.recv(1024):
                pass
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def vacate(self, peer: Peer) -> None:
        """A process is gone, and will have no successor but one that comes through the door."""
        self._loop.soon(lambda: self._places.vacate(peer))

    def ask_to_stop(self) -> None:
        """Tells all guests that the run is asked to stop."""
        self._tell_all({"stop": True})

    def end(self) -> None:
        """The run is over: nobody is let in any more, and all guests are told."""
        self._over = True
        self._tell_all({"over": True})

    def close(self) -> None:
        """Shuts it."""
        self._loop.close()
        for each in (self._listener, self._bell, self._ringing):
            DESCRIPTORS.remove(each.fileno())
            each.close()

    def _tell_all(self, word: dict[str, Any]) -> None:
        for channel in list(self._guests.values()):
            self._loop.start(_say(channel, word))

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        descriptor = connection.fileno()
        DESCRIPTORS.add(descriptor)
        who = str(Address(*writer.get_extra_info("peername")[:2]))
        try:
            for option in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, *option)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await self._serve(await self._admit(reader, writer), who)
        except NotAdmitted as refusal:
            self._tell(News("refused", who, why=str(refusal), reason=refusal.reason))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # it has gone, or the door is shut; whoever had a place has been seen to go
        finally:
            DESCRIPTORS.remove(descriptor)
            hang_up(writer)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
        if self._strangers >= MOST_STRANGERS:
            raise NotAdmitted("crowd", f"{self._strangers} others were about to prove who they are")
        self._strangers += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await challenge(reader, writer, self._key)
        except TimeoutError:
            raise NotAdmitted("silent", f"it said nothing for {PATIENCE_S:g} s") from None
        finally:
            self._strangers -= 1

    async def _serve(self, channel: Channel, who: str) -> None:
        while True:
            match await channel.hear():
                case {"ask": "job", "version": version}:
                    if version != self._offer["version"]:
                        await self._refuse(
                            channel,
                            "version",
                            f"it runs Polyrhythm {self._offer['version']}, you {version!s:.20}: install the same",
                        )
                    await channel.say(self._offer)
                case {"ask": "place"}:
                    await self._seat(channel, who)
                    return
                case {"ask": "store"}:
                    reader, writer = await asyncio.open_connection(*self._found.store)
                    await channel.say({"store": True})
                    await relay((channel.reader, channel.writer), (reader, writer))
                    return
                case _:
                    await self._refuse(channel, "request", "it does not know what you ask for")

    async def _seat(self, channel: Channel, who: str) -> None:
        """Gives a visitor a place, and waits until it goes."""
        await self._begun.wait()
        if self._over:
            await self._refuse(channel, "time", "it is over")
        peer = self._places.take()
        if peer is None:
            await self._refuse(
                channel,
                "place",
                "all its workers are there: start it with --vacant, or join when one is lost",
            )
        assert peer is not None
        self._guests[peer] = channel
        what, why = "went", "is gone"
        try:
            self._tell(News("came", who, peer))
            await channel.say(self._describe(peer))
            last = await channel.hear()
            what = "done" if last.get("done") is True else "went"
            why = f"left: {last.get('why', '')!s:.200}"
        except NotAdmitted as refusal:
            why = f"was sent away: {refusal}"
        finally:
            del self._guests[peer]
            if what == "went":  # else it has taken all its steps
                self._places.vacate(peer)
            self._tell(News(what, who, peer, why))

    @property
    def _found(self) -> Inside:
        assert self._inside is not None, "who is here has come through an open door"
        return self._inside

    def _describe(self, peer: Peer) -> dict[str, Any]:
        cast = self._found.cast
        told = {"workers": cast.workers, "servers": cast.servers, "prefix": self._found.prefix}
        return told | {
            "rank": peer.rank,
            "incarnation": peer.incarnation,
            "parameters": self._parameters,
        }

    async def _refuse(self, channel: Channel, reason: str, text: str) -> None:
        await channel.say({"refused": text})
        raise NotAdmitted(reason, text)

    def _tell(self, news: News) -> None:
        if news.what == "refused":
            self.refused[news.reason] += 1
        self._news.put(news)
        with suppress(BlockingIOError):  # it rings already
            self._ringing.send(b"!")


async def _say(channel: Channel, word: dict[str, Any]) -> None:
    with suppress(OSError):  # it is going
        await channel.say(word)
