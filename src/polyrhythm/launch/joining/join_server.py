"""The join server of a run: the only way in for a process that was not started by its launcher.

client           server (a thread of the launcher)                 launcher
  challenge ───▶ the token is right? else refused, counted
  job? ────────▶ the recipe, and what its data and model are like
  place? ──────▶ one that is vacant: rank, generation ───────────▶ came: told of the losses from now on
  store? ──────▶ a connection to the store, passed through          (the store itself stays on loopback)
  …
  ◀──── stop ─── the run is asked to stop ◀───────────────────────
  (gone) ──────▶ its place is vacant again ───────────────────────▶ went: the others are told at once

Where torchrun has started the ranks, worker 0's process is what is called launcher here, and the store
torchrun's; `Admission` is what every rank must know of joining there. `Entrance` listens before the server is
made, so that a port that is taken is known before anything is written. `Places` lists the vacant ranks;
`Guests` are the workers that joined, as the launcher knows them.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

from polyrhythm.communication.secret import nonce, prove, proves
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, own_address
from polyrhythm.errors import RequestError
from polyrhythm.launch.joining.connections import (
    DESCRIPTORS,
    Address,
    Channel,
    EventLoop,
    NotAdmitted,
    challenge,
    hang_up,
    listener_at,
    relay,
)
from polyrhythm.launch.joining.token import TOKEN_VARIABLE, door_key, link_key
from polyrhythm.launch.patience import Patience
from polyrhythm.strategies.role_assignment import RoleAssignment

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
    cast: RoleAssignment
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


class Places:
    """Places in a run; used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[int, int] = {}
        self._given: dict[int, int] = {}

    def vacate(self, peer: Peer) -> None:
        """Notes that a process is gone; news of one that has a successor already changes nothing."""
        with self._lock:
            if peer.incarnation >= self._given.get(peer.rank, 0):
                self._next[peer.rank] = peer.incarnation + 1

    def take(self, rank: int | None = None) -> Peer | None:
        """Gives a vacant rank to a new process; None if it is taken.

        Args:
            rank: that it must be; None: the lowest that is vacant.
        """
        with self._lock:
            if not self._next or (rank is not None and rank not in self._next):
                return None
            chosen = min(self._next) if rank is None else rank
            peer = Peer(chosen, self._next.pop(chosen))
            self._given[chosen] = peer.incarnation
            return peer


class Entrance:
    """Listens from the start, so that a port that is taken is known before anything is written.

    Args:
        address: of this host, as others reach it.
        token: that they must know.

    Attributes:
        address: with the port that was found.
        link_key: key of the run's links.
        offer: what visitors are told of the job.
        how: in words, for people who want to come in.

    Raises:
        RequestError: the address cannot be used.
    """

    def __init__(self, address: Address, token: str) -> None:
        self._listener: socket.socket | None = listener_at(address)
        DESCRIPTORS.add(self._listener.fileno())
        self.address = Address(*self._listener.getsockname()[:2])
        self.link_key = link_key(token)
        self.offer: dict[str, Any] = {}
        self.how = ""
        self._door_key = door_key(token)
        self._door: Door | None = None

    def open(self, places: Places | None = None) -> Door:
        """Makes the door; once.

        Args:
            places: of workers, that may be taken; None: there are none yet.
        """
        assert self._listener is not None, "a door is made once"
        self._door = Door(self._listener, self._door_key, self.offer, places or Places())
        self._listener = None  # it is the door's
        return self._door

    def ask_to_stop(self) -> None:
        """Tells all who have come in that the run is asked to stop."""
        if self._door is not None:
            self._door.ask_to_stop()

    def close(self) -> None:
        """Shuts the door, or stops listening if it was never made."""
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._listener is not None:
            DESCRIPTORS.remove(self._listener.fileno())
            self._listener.close()
            self._listener = None


FAREWELL_S = 5.0
"""How long the launcher keeps the store for guests, once all its own ranks have left."""


class Guests:
    """Keeps the launcher's list of guests in step with the news of the door.

    Args:
        door: of the run.
        name: names a rank for people.
        say: tells people.
        tell_of_loss: tells every rank that a process is gone.
        welcome: tells who has come of those that are gone.
    """

    def __init__(
        self,
        door: Door,
        name: Callable[[int], str],
        say: Callable[[str], None],
        tell_of_loss: Callable[[Peer], None],
        welcome: Callable[[Peer], None],
    ) -> None:
        self.door = door
        self.present: set[Peer] = set()
        self._name = name
        self._say = say
        self._tell_of_loss = tell_of_loss
        self._welcome = welcome
        self._said: set[str] = set()
        self._over = False

    def look(self) -> None:
        """Takes the door's news."""
        for news in self.door.news():
            self._take(news)

    def see_off(self, wait: Callable[[list[Any], float], Any]) -> None:
        """Gives guests a moment to leave, once the run is over.

        Args:
            wait: until one of these is readable, or for so many seconds.
        """
        self._over = True
        self.door.end()
        deadline = time.monotonic() + FAREWELL_S
        self.look()
        while self.present and (left_s := deadline - time.monotonic()) > 0:
            wait([self.door], left_s)
            self.look()

    def sum_up(self) -> None:
        """Says how many visitors were refused; the run is about to say that it has ended, which is its last word."""
        self.look()
        if refused := self.door.refused.total():
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.door.refused.most_common())
            self._say(f"the door refused {refused} {'visitor' if refused == 1 else 'visitors'}: {reasons}")
        self._over = True
        self.door.end()

    def _take(self, news: News) -> None:
        if news.what == "refused":
            if news.reason not in self._said and not self._over:  # the first of each reason; all are counted
                self._said.add(news.reason)
                self._say(f"the door refused {news.who} ({news.reason}): {news.why}")
            return
        name = self._name(news.peer.rank)
        if news.what == "came":
            self.present.add(news.peer)
            self._welcome(news.peer)
            if self._over:
                return
            self._say(f"{news.who} takes the place of {name}")
            return
        self.present.discard(news.peer)
        if news.what == "went" and not self._over:
            self._tell_of_loss(news.peer)
            self._say(f"{name}, which came from {news.who}, {news.why}; its place is vacant")


_PROOF, _PURPOSE = "run token", "polyrhythm, the same token"
_LEADER = 0


@dataclass(frozen=True)
class Admission:
    """One rank's part in it.

    Attributes:
        address: of the door.
        token: gives the run token; asked once rank 0 has drawn it, if it does. None: this rank has none.
        entrance: the door's; rank 0's alone.
    """

    address: Address
    token: Callable[[], str | None]
    entrance: Entrance | None = None

    def of(self, rendezvous: Rendezvous) -> Rendezvous:
        """Gives a rank's rendezvous with the key of links, and an address that guests reach; all ranks call it.

        Args:
            rendezvous: of this rank, with the keys of this start in its store.

        Raises:
            RequestError: this rank has another token than rank 0, or none; or guests would not reach it.
        """
        token = self.token()
        if token is None:
            raise RequestError(
                f"rank {rendezvous.rank} has no run token, which all ranks of a run need that others may join: name "
                f"its file with --token-file, or set {TOKEN_VARIABLE}, on every host"
            )
        key = link_key(token)
        _agree(rendezvous, key)
        return replace(rendezvous, key=key, address=self._address_of(rendezvous))

    def _address_of(self, rendezvous: Rendezvous) -> str:
        address = own_address(self.address.host, self.address.port or 1)
        several_hosts = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        if several_hosts and _is_loopback(address) and not _is_loopback(rendezvous.address):
            raise RequestError(
                f"--listen {self.address} is reached from this host alone, and the run has several: give an address "
                "of worker 0's host that all of them reach"
            )
        return address


def _agree(rendezvous: Rendezvous, key: bytes) -> None:
    """Finds out whether this rank has the token of rank 0, without telling the store which it is."""
    store = rendezvous.store
    if rendezvous.rank == _LEADER:
        drawn = nonce()
        store.set(_PROOF, f"{drawn.hex()} {prove(key, _PURPOSE, drawn).hex()}")
        return
    told = Patience().key(store, _PROOF, _LEADER).split()
    drawn, proof = (bytes.fromhex(each) for each in told)
    if not proves(proof, key, _PURPOSE, drawn):
        raise RequestError(
            f"rank {rendezvous.rank} has another run token than rank 0: give all hosts the same --token-file, or the "
            f"same {TOKEN_VARIABLE}"
        )


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback
