"""Where the ranks of a run meet: a key-value store that all reach, and the address under which this one is reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.errors import RequestError, RunError

LOOPBACK = "127.0.0.1"
PREFIX = "polyrhythm"
"""Of all keys in a store that others may use as well, such as torchrun's."""

_BACKLOG = 4096
_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Rendezvous:
    """One rank's way to the others.

    Attributes:
        store: reached by all ranks.
        rank: this rank.
        size: how many ranks there are.
        address: of this host, as the others reach it.
        keeper: whether this process hosts the store, and so must leave last.
        incarnation: how many processes have had this rank's number before.
        key: that links between ranks prove to know, the same on all; empty asks for no proof.
        met: of ranks that were there before this process, the incarnation that is there now.
    """

    store: Any  # a torch.distributed.Store; its stubs know neither clone nor queues
    rank: int
    size: int
    address: str
    keeper: bool = False
    incarnation: int = 0
    key: bytes = field(default=b"", repr=False)
    met: Mapping[int, int] = field(default_factory=dict)

    @property
    def own(self) -> Peer:
        """This process, as others know it."""
        return Peer(self.rank, self.incarnation)


def host_store(port: int = 0) -> dist.TCPStore:
    """Starts a store on the loopback interface of this host.

    Args:
        port: where it listens; 0 picks a free one.

    Raises:
        RequestError: the port is in use.
    """
    # Left to itself the store would listen on every interface.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            raise RequestError(
                f"port {port} of {LOOPBACK} is in use: choose another, or 0 for a free one"
            ) from None
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return dist.TCPStore(
            LOOPBACK,
            port,
            None,
            is_master=True,
            timeout=_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def local(rank: int, size: int, port: int, incarnation: int = 0) -> Rendezvous:
    """Meets at a store that `host_store` has started on this host."""
    store = dist.TCPStore(LOOPBACK, port, None, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
    return Rendezvous(store, rank, size, LOOPBACK, incarnation=incarnation)


def from_environment() -> Rendezvous:
    """Meets where torchrun's variables say (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    The store may hold what processes that torchrun has ended since have left; `launch/torchrun/gathering.py` tells them
    apart.

    Raises:
        RequestError: a variable is missing or wrong, or the port is in use.
        RunError: the store cannot be reached.
    """
    rank, size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = _variable("MASTER_ADDR")
    keeper = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, port, None, is_master=keeper, timeout=_PATIENCE, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as error:
        if "EADDRINUSE" in str(error):
            raise RequestError(f"port {port} of {host} is in use: set another with --master-port") from None
        raise RunError(
            f"rank {rank} cannot reach the store at {host}:{port}: {str(error).splitlines()[0]}"
        ) from None
    return Rendezvous(dist.PrefixStore(PREFIX, store), rank, size, own_address(host, port), keeper)


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
    """Gives the address of the interface through which this host reaches another one.

    Gloo must be told; left alone it resolves the host's name, which often leads nowhere. Nothing is sent.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
