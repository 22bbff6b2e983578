"""Process groups of `torch.distributed`, made one by one from a store, without the global default group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous

# A peer that dies breaks its connections and is noticed at once. A limit here would only kill slow, healthy runs.
FOREVER = timedelta(days=365)


class Groups:
    """Makes process groups for one rank.

    Args:
        rendezvous: how to meet the others.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._store = rendezvous.store
        self._idle: deque[Any] = deque()
        self._device = dist.ProcessGroupGloo.create_device(hostname=rendezvous.address)

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Lends a connection to the store for the caller alone: whoever waits for a key keeps a connection busy.

        They are used again, because making one can take seconds where no name server answers: the library asks for
        the name of every address that it connects to.
        """
        store = self._idle.pop() if self._idle else self._store.clone()
        yield store
        self._idle.append(store)  # not after an error: its last answer may still be under way

    def gloo(self, name: str, rank: int, size: int) -> Any:
        """Makes a gloo group; returns when all `size` members have.

        Args:
            name: the same on all members, and never used before.
            rank: this member.
            size: how many there are.

        Raises:
            RuntimeError: the others did not come.
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
        """Makes an NCCL group; every member has a GPU of its own."""
        options = dist.ProcessGroupNCCL.Options()
        store = dist.PrefixStore(f"nccl/{name}", self._store.clone())
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _gloo_options() -> Any:
    library: Any = dist.ProcessGroupGloo  # its stubs do not know its options
    return library._Options()


def group_name(name: str, members: Sequence[int]) -> str:
    """Names the group of some ranks, the same on all of them."""
    return f"group/{name}/{'-'.join(map(str, members))}"
