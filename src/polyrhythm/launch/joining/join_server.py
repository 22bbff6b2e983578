"""The join server of a run: the only way in for a process that was not started by its launcher.

client           server (a thread of the launcher)                 launcher
  challenge ───▶ the token is right? else refused, counted
  job? ────────▶ the recipe, and what its data and model are like
  place? ──────▶ GuestAsked ─────────────────────────────────────▶ supervisor: is a place vacant?
  ◀───────────── rank, generation ◀────────────────────────────── Seat, once all losses are announced to it
  store? ──────▶ a connection to the store, passed through          (the store itself stays on loopback)
  …
  ◀──── stop ─── the run is asked to stop ◀───────────────────────
  (gone) ──────▶ GuestLeft ──────────────────────────────────────▶ its place is vacant again; the others are notified

Where torchrun has started the ranks, worker 0's process is what is called launcher here, and the store
torchrun's; `Admission` is what every rank must know of joining there. `Entrance` listens before the server is
made, so that a port that is taken is known before anything is written.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from math import inf
from typing import Any

from polyrhythm.communication.secret import nonce, prove, proves
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, own_address
from polyrhythm.errors import RequestError
from polyrhythm.launch.joining.connections import (
    CROWDED,
    DESCRIPTORS,
    TOKEN_VARIABLE,
    Address,
    Channel,
    EventLoop,
    NotAdmitted,
    challenge,
    door_key,
    hang_up,
    link_key,
    listener_at,
    relay,
)
from polyrhythm.launch.patience import Patience
from polyrhythm.launch.supervisor import (
    CloseJoinServer,
    Fact,
    GuestAsked,
    GuestLeft,
    GuestRefused,
    Order,
    Refuse,
    Seat,
)
from polyrhythm.strategies.role_assignment import RoleAssignment

PATIENCE_S = 5.0
"""A client proves within this time that it knows the token."""

MOST_STRANGERS, MOST_OF_AN_ADDRESS = 64, 16
"""The most clients that may be about to prove it at once, and the most from one address. One more sends the oldest of
them away, which has been silent for longest: a client that knows the token proves it in a round trip."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A client's host that is cut off is noticed after 20 s, if nothing else notices."""


@dataclass(frozen=True)
class Inside:
    """Facts that an admitted client receives.

    Attributes:
        store: store where the run's store is, as seen from the server.
        roles: roles of the run.
        prefix: prefix of the run's keys in that store.
    """

    store: Address
    roles: RoleAssignment
    prefix: str = ""


class JoinServer:
    """Admits workers that know the token, as a source of processes.

    It has a thread of its own for its connections. Each worker that asks for a place waits until the launcher's
    supervisor has decided about it.

    Args:
        listener: listening socket; closed by the server.
        key: key that clients prove to know.
        offer: description of the job for clients.

    Attributes:
        address: address where it listens.
    """

    look_every_s = inf

    def __init__(self, listener: socket.socket, key: bytes, offer: dict[str, Any]) -> None:
        self.address = Address(*listener.getsockname()[:2])
        self._key = key
        self._offer = offer
        self._inside: Inside | None = None
        self._begun = asyncio.Event()
        self._over = False
        self._parameters = 0
        self._strangers: dict[asyncio.Task[Any], str] = {}  # with their addresses, oldest first
        self._rejected: set[asyncio.Task[Any]] = set()
        self._asked = itertools.count()
        self._asking: dict[int, asyncio.Future[Peer | None]] = {}
        self._guests: dict[Peer, Channel] = {}
        self._facts: queue.SimpleQueue[Fact] = queue.SimpleQueue()
        self._bell, self._ringing = socket.socketpair()
        self._ringing.setblocking(False)
        self._bell.setblocking(False)
        for descriptor in (self._bell, self._ringing):
            DESCRIPTORS.add(descriptor.fileno())
        self._listener = listener
        self._loop = EventLoop("door")
        self._server: asyncio.Server | None = None

    def fileno(self) -> int:
        """Return the file that becomes readable when something has happened."""
        return self._bell.fileno()

    @property
    def waitables(self) -> tuple[JoinServer]:
        """Objects that become readable when an event is pending."""
        return (self,)

    def open(self, inside: Inside) -> None:
        """Admit clients from now on, and send them `inside`."""
        self._inside = inside
        self._server = self._loop.call(asyncio.start_server(self._receive, sock=self._listener))

    def begin(self, parameters: int) -> None:
        """Assign places from now on: the run is in progress, and trains `parameters` parameters."""
        self._parameters = parameters
        self._loop.soon(self._begun.set)

    def poll(self, ready: Sequence[Any] = ()) -> list[Fact]:
        """Return the facts since the last call."""
        with suppress(BlockingIOError):
            while self._bell.recv(1024):
                pass
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._facts.get_nowait())
        return found

    def carry_out(self, order: Order) -> None:
        """Give a guest its place or none, or end."""
        match order:
            case Seat(guest=guest, peer=peer):
                self._loop.soon(partial(self._decide, guest, peer))
            case Refuse(guest=guest):
                self._loop.soon(partial(self._decide, guest, None))
            case CloseJoinServer():
                self.end()

    def ask_to_stop(self) -> None:
        """Notify all guests that the run is asked to stop."""
        self._notify_all({"stop": True})

    def end(self) -> None:
        """Stop admitting clients, and notify all guests that the run is over."""
        self._over = True
        self._loop.soon(self._refuse_all)
        self._notify_all({"over": True})

    def close(self) -> None:
        """Close all connections."""
        self._loop.close()
        for each in (self._listener, self._bell, self._ringing):
            DESCRIPTORS.remove(each.fileno())
            each.close()

    def _notify_all(self, word: dict[str, Any]) -> None:
        for channel in list(self._guests.values()):
            self._loop.start(_send(channel, word))

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        descriptor = connection.fileno()
        DESCRIPTORS.add(descriptor)
        caller = str(Address(*writer.get_extra_info("peername")[:2]))
        try:
            for option in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, *option)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await self._serve(await self._admit(reader, writer), caller)
        except NotAdmitted as refusal:
            self._notify(GuestRefused(caller, refusal.reason, str(refusal)))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the guest has left, or the server is closed; departures are reported elsewhere
        finally:
            DESCRIPTORS.remove(descriptor)
            hang_up(writer)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
        task, host = asyncio.current_task(), writer.get_extra_info("peername")[0]
        assert task is not None
        self._make_room(host)
        self._strangers[task] = host
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await challenge(reader, writer, self._key)
        except TimeoutError:
            raise NotAdmitted("silent", f"it sent nothing for {PATIENCE_S:g} s") from None
        except asyncio.CancelledError:
            if task not in self._rejected:
                raise
            task.uncancel()
            writer.write(CROWDED)
            raise NotAdmitted("crowd", "it had sent nothing when many others connected") from None
        finally:
            self._strangers.pop(task, None)
            self._rejected.discard(task)

    def _make_room(self, host: str) -> None:
        """Send the oldest stranger away, if there are too many, or too many of this address."""
        of_host = [task for task, other in self._strangers.items() if other == host]
        crowd = of_host if len(of_host) >= MOST_OF_AN_ADDRESS else list(self._strangers)
        if crowd is of_host or len(crowd) >= MOST_STRANGERS:
            del self._strangers[crowd[0]]
            self._rejected.add(crowd[0])
            crowd[0].cancel()

    async def _serve(self, channel: Channel, caller: str) -> None:
        while True:
            match await channel.receive():
                case {"ask": "job", "version": version}:
                    if version != self._offer["version"]:
                        await self._refuse(
                            channel,
                            "version",
                            f"it runs Polyrhythm {self._offer['version']}, you {version!s:.60}: install the same",
                        )
                    await channel.send(self._offer)
                case {"ask": "place"}:
                    await self._seat(channel, caller)
                    return
                case {"ask": "store"}:
                    reader, writer = await asyncio.open_connection(*self._found.store)
                    await channel.send({"store": True})
                    await relay((channel.reader, channel.writer), (reader, writer))
                    return
                case _:
                    await self._refuse(channel, "request", "it does not know what you ask for")

    async def _seat(self, channel: Channel, caller: str) -> None:
        """Ask for a place, and wait until the guest leaves."""
        await self._begun.wait()
        peer = await self._ask(caller)
        if self._over:
            if peer is not None:
                self._notify(GuestLeft(peer, caller, done=True))
            await self._refuse(channel, "time", "it is over")
        if peer is None:
            await self._refuse(
                channel,
                "place",
                "all its workers are there: start it with --vacant, or join when one is lost",
            )
        assert peer is not None
        self._guests[peer] = channel
        done, why = False, "is gone"
        try:
            await channel.send(self._describe(peer))
            last = await channel.receive()
            done = last.get("done") is True
            why = f"left: {last.get('why', '')!s:.200}"
        except NotAdmitted as refusal:
            why = f"was sent away: {refusal}"
        finally:
            del self._guests[peer]
            self._notify(GuestLeft(peer, caller, "" if done else why, done))

    async def _ask(self, caller: str) -> Peer | None:
        """Return the place that the supervisor gives, or None."""
        if self._over:
            return None
        guest = next(self._asked)
        self._asking[guest] = asyncio.get_running_loop().create_future()
        self._notify(GuestAsked(guest, caller))
        try:
            return await self._asking[guest]
        finally:
            del self._asking[guest]

    def _decide(self, guest: int, peer: Peer | None) -> None:
        if guest in self._asking and not self._asking[guest].done():
            self._asking[guest].set_result(peer)
        elif peer is not None:  # the server is about to be closed
            self._notify(GuestLeft(peer, "", "is gone"))

    def _refuse_all(self) -> None:
        for guest in list(self._asking):
            self._decide(guest, None)

    @property
    def _found(self) -> Inside:
        assert self._inside is not None, "clients are admitted once it is open"
        return self._inside

    def _describe(self, peer: Peer) -> dict[str, Any]:
        roles = self._found.roles
        description = {"workers": roles.workers, "servers": roles.servers, "prefix": self._found.prefix}
        return description | {
            "rank": peer.rank,
            "generation": peer.generation,
            "parameters": self._parameters,
        }

    async def _refuse(self, channel: Channel, reason: str, text: str) -> None:
        await channel.send({"refused": text})
        raise NotAdmitted(reason, text)

    def _notify(self, fact: Fact) -> None:
        self._facts.put(fact)
        with suppress(BlockingIOError):  # it rings already
            self._ringing.send(b"!")


async def _send(channel: Channel, word: dict[str, Any]) -> None:
    with suppress(OSError):  # it is going
        await channel.send(word)


class Entrance:
    """Port for joining workers; opened at the start, so that a port in use is detected before files are written.

    Args:
        address: address of this host, as others reach it.
        token: token that they must know.

    Attributes:
        address: address with the port that was found.
        link_key: key of the run's links.
        offer: description of the job for clients.
        how: instructions for users that want to join.

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
        self._server: JoinServer | None = None

    def open(self) -> JoinServer:
        """Return the join server, made once."""
        assert self._listener is not None, "a join server is made once"
        self._server = JoinServer(self._listener, self._door_key, self.offer)
        self._listener = None  # it is the server's
        return self._server

    def ask_to_stop(self) -> None:
        """Notify all guests that the run is asked to stop."""
        if self._server is not None:
            self._server.ask_to_stop()

    def close(self) -> None:
        """Close the join server, or stop listening if it was never made."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._listener is not None:
            DESCRIPTORS.remove(self._listener.fileno())
            self._listener.close()
            self._listener = None


_PROOF, _PURPOSE = "run token", "polyrhythm, the same token"
_LEADER = 0


@dataclass(frozen=True)
class Admission:
    """One rank's part in it.

    Attributes:
        address: address of the join server.
        token: returns the run token, or None if this rank has none; called once rank 0 has drawn it, if it does.
        entrance: entrance of the join server; rank 0's alone.
    """

    address: Address
    token: Callable[[], str | None]
    entrance: Entrance | None = None

    def of(self, rendezvous: Rendezvous) -> Rendezvous:
        """Return a rank's rendezvous with the key of links, and an address that guests reach; all ranks call it.

        Args:
            rendezvous: rendezvous of this rank, with the keys of this start in its store.

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
    """Check that this rank has the token of rank 0, without telling the store which it is."""
    store = rendezvous.store
    if rendezvous.rank == _LEADER:
        drawn = nonce()
        store.set(_PROOF, f"{drawn.hex()} {prove(key, _PURPOSE, drawn).hex()}")
        return
    answer = Patience().key(store, _PROOF, _LEADER).split()
    drawn, proof = (bytes.fromhex(each) for each in answer)
    if not proves(proof, key, _PURPOSE, drawn):
        raise RequestError(
            f"rank {rendezvous.rank} has another run token than rank 0: give all hosts the same --token-file, or the "
            f"same {TOKEN_VARIABLE}"
        )


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback
