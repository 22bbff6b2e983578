"""Rendezvous of the ranks of a run: a key-value store that all reach, and the address of this rank.

Process groups of `torch.distributed` are made one by one from the store (`Groups`), without the global
default group. In the store ranks also publish their addresses and losses.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist

from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.errors import PeerLost, RequestError, RunError

LOOPBACK = "127.0.0.1"
PREFIX = "polyrhythm"
"""Prefix of all keys in a store that others may use as well, such as torchrun's."""

GROUP_VARIABLE = "POLYRHYTHM_GROUP"
"""Set where some of the ranks that have been started make a run of their own: its name, and the first of them."""

_BACKLOG = 4096
_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Rendezvous:
    """One rank's way to the others.

    Attributes:
        store: reached by all ranks.
        rank: own rank.
        size: number of ranks.
        address: address of this host, as the others reach it.
        keeper: whether this process hosts the store, and so must leave last.
        generation: number of earlier processes of this rank.
        key: key that links between ranks prove to know, the same on all; empty asks for no proof.
        met: present generation of each rank that was there before this process.
    """

    store: Any  # a torch.distributed.Store; its stubs know neither clone nor queues
    rank: int
    size: int
    address: str
    keeper: bool = False
    generation: int = 0
    key: bytes = field(default=b"", repr=False)
    met: Mapping[int, int] = field(default_factory=dict)

    @property
    def own(self) -> Peer:
        """This process, as others know it."""
        return Peer(self.rank, self.generation)


def host_store(port: int = 0, address: str = LOOPBACK) -> dist.TCPStore:
    """Start a store on one interface of this host, loopback unless others must reach it.

    Args:
        port: TCP port where it listens; 0 picks a free one.
        address: address of the interface.

    Raises:
        RequestError: the port is in use.
    """
    # Left to itself the store would listen on every interface.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError:
            raise RequestError(
                f"port {port} of {address} is in use: choose another, or 0 for a free one"
            ) from None
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            None,
            is_master=True,
            timeout=_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def local(rank: int, size: int, port: int, generation: int = 0) -> Rendezvous:
    """Meet at a store that `host_store` has started on this host."""
    store = dist.TCPStore(LOOPBACK, port, None, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
    return Rendezvous(store, rank, size, LOOPBACK, generation=generation)


def from_environment() -> Rendezvous:
    """Meet as torchrun's variables define (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    The store may hold keys of processes that torchrun has ended since; `launch/torchrun/gathering.py`
    distinguishes them.

    Raises:
        RequestError: a variable is missing or wrong, or the port is in use.
        RunError: the store cannot be reached.
    """
    rank, size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = _variable("MASTER_ADDR")
    group, _, first = os.environ.get(GROUP_VARIABLE, "").rpartition(":")
    keeper = rank == 0 and first in ("", "0") and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    hosts = keeper and not group  # the group's process hosts it already
    try:
        store = dist.TCPStore(host, port, None, is_master=hosts, timeout=_PATIENCE, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as error:
        if "EADDRINUSE" in str(error):
            raise RequestError(f"port {port} of {host} is in use: set another with --master-port") from None
        raise RunError(
            f"rank {rank} cannot reach the store at {host}:{port}: {str(error).splitlines()[0]}"
        ) from None
    prefix = f"{PREFIX}/{group}" if group else PREFIX
    return Rendezvous(dist.PrefixStore(prefix, store), rank, size, own_address(host, port), keeper)


def _variable(name: str) -> str:
    if not os.environ.get(name):
        raise RequestError(f"{name} is not set in the environment: start the ranks with torchrun")
    return os.environ[name]


def _number(name: str) -> int:
    text = _variable(name)
    try:
        return int(text)
    except ValueError:
        raise RequestError(f"{name} is {text!r} in the environment: it must be a whole number") from None


def own_address(host: str, port: int) -> str:
    """Return the address of the interface through which this host reaches another one.

    Gloo needs it; by default it resolves the host's name, which often leads nowhere. Nothing is sent.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


# A peer that dies breaks its connections and is noticed at once. A limit here would only kill slow, healthy runs.
FOREVER = timedelta(days=365)


class Groups:
    """Makes process groups for one rank."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._store = rendezvous.store
        self._idle: deque[Any] = deque()
        self._address = rendezvous.address

    @cached_property
    def _device(self) -> Any:
        # Only where there is a group: a thread of it wakes up 100 times a second from the start.
        return dist.ProcessGroupGloo.create_device(hostname=self._address)

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Lend a connection to the store for the caller alone: one that waits for a key keeps a connection busy.

        They are used again, because making one can take seconds where no name server answers: the library asks for
        the name of every address that it connects to.
        """
        store = self._idle.pop() if self._idle else self._store.clone()
        yield store
        self._idle.append(store)  # not after an error: its last answer may still be in progress

    def gloo(self, name: str, rank: int, size: int) -> Any:
        """Make a gloo group; return when all `size` members have.

        Args:
            name: name of the group, the same on all members, and never used before.
            rank: index of this member.
            size: number of members.

        Raises:
            RuntimeError: the others are missing.
        """
        options = _gloo_options()
        options._devices = [self._device]
        options._timeout = FOREVER
        # One after the other: a group cannot be let go while a collective of it waits, and one that starts after
        # another has failed fails too.
        options._threads = 1
        with self.connection() as store:
            return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)

    def nccl(self, name: str, rank: int, size: int) -> Any:
        """Make an NCCL group; every member has a GPU of its own."""
        options = dist.ProcessGroupNCCL.Options()
        store = dist.PrefixStore(f"nccl/{name}", self._store.clone())
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _gloo_options() -> Any:
    library: Any = dist.ProcessGroupGloo  # its stubs do not know its options
    return library._Options()


def group_name(name: str, members: Sequence[int]) -> str:
    """Name the group of some ranks, the same on all of them."""
    return f"group/{name}/{'-'.join(map(str, members))}"


_CLOSE = "close"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.05


class Cards(NamedTuple):
    """Addresses of a rank.

    Attributes:
        memory: memory by ranks of its host; empty if it shares no memory.
        tcp: address for all others.
    """

    memory: str
    tcp: str


def join(rendezvous: Rendezvous, cards: Cards) -> None:
    """Announce that links to this rank may be opened from now on."""
    store = rendezvous.store
    for key, card in zip(_cards(rendezvous.own), cards, strict=True):
        store.set(key, card)
    store.set(_joined(rendezvous.rank), str(rendezvous.generation))


def await_joined(groups: Groups, peer: Peer, membership: Membership) -> Cards:
    """Wait until a peer has joined, and return its cards; raise `PeerLost` if it is gone."""
    key, pause_s = _joined(peer.rank), _SHORTEST_PAUSE_S
    with groups.connection() as store:
        # a number that is lower is its predecessor's
        while not store.check([key]) or (joined := int(store.get(key))) < peer.generation:
            if membership.is_lost(peer.rank):
                raise PeerLost(peer.rank, "opening a link to it")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if joined > peer.generation:  # it has a replacement already
            membership.lose_receiver(peer)
            raise PeerLost(peer.rank, "opening a link to it")
        return Cards(*(str(card.decode()) for card in store.multi_get(list(_cards(peer)))))


def joined_peers(store: Any, size: int) -> dict[Peer, Cards]:
    """Return the cards of the newest process of every rank that has joined."""
    found = {}
    for rank in range(size):
        if store.check([_joined(rank)]):
            peer = Peer(rank, int(store.get(_joined(rank))))
            found[peer] = Cards(*(card.decode() for card in store.multi_get(list(_cards(peer)))))
    return found


def record_start(store: Any, peer: Peer) -> None:
    """Announce that a process is about to be started, to ranks that wait for it.

    Args:
        store: store where the ranks meet.
        peer: rank and generation of the process.
    """
    store.set(_started(peer.rank), str(peer.generation))


def newest_generations(store: Any, size: int) -> dict[int, int]:
    """Return the newest generation of every rank that has joined, or is about to."""
    found: dict[int, int] = {}
    for rank in range(size):
        generations = [int(store.get(key)) for key in (_joined(rank), _started(rank)) if store.check([key])]
        if generations:
            found[rank] = max(generations)
    return found


def record_loss(store: Any, lost: Peer, to: Peer) -> None:
    """Inform a rank, by the store, that another is gone: a launcher that saw a process die need not wait for its links.

    Args:
        store: store where the ranks meet.
        lost: the lost rank.
        to: the rank that is informed.
    """
    store.queue_push(_words(to), f"{lost.rank} {lost.generation}".encode())


class LossListener:
    """Receives what `record_loss` leaves for this rank, on a thread of its own."""

    def __init__(self, rendezvous: Rendezvous, membership: Membership) -> None:
        self._words = _words(rendezvous.own)
        self._closing_store = rendezvous.store
        self._store = rendezvous.store.clone()  # a connection of its own, since it waits there
        self._store.set_timeout(FOREVER)
        self._membership = membership
        self._thread = threading.Thread(target=self._listen, name="words of loss", daemon=True)
        self._thread.start()

    def close(self, patience_s: float) -> None:
        """Stop listening."""
        with suppress(RuntimeError):  # the store is gone, and so the thread has ended
            self._closing_store.queue_push(self._words, _CLOSE.encode())
        self._thread.join(patience_s)

    def _listen(self) -> None:
        while True:
            try:
                word = self._store.queue_pop(self._words, True).decode()
            except (RuntimeError, dist.DistError):
                return  # the store is gone, and with it the run
            if word == _CLOSE:
                return
            # On a thread of its own: it waits for the peer's last words, and several may be lost at once.
            lost = Peer(*map(int, word.split()))
            threading.Thread(target=self._membership.lose_receiver, args=(lost,), daemon=True).start()


def _cards(peer: Peer) -> tuple[str, str]:
    return f"card/{peer.rank}/{peer.generation}", f"card/tcp/{peer.rank}/{peer.generation}"


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _started(rank: int) -> str:
    return f"started/{rank}"


def _words(to: Peer) -> str:
    return f"words/{to.rank}/{to.generation}"
