"""Process groups of `torch.distributed`, made one by one from a store, without the global default group."""

from __future__ import annotations

from collections.abc import Sequence
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
        self._device = dist.ProcessGroupGloo.create_device(hostname=rendezvous.address)

    def gloo(self, name: str, rank: int, size: int) -> Any:
        """Makes a gloo group; returns when all `size` members have.

        Args:
            name: the same on all members, and never used before.
            rank: this member.
            size: how many there are.
        """
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._timeout = FOREVER
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self._store.clone()), rank, size, options)

    def nccl(self, name: str, rank: int, size: int) -> Any:
        """Makes an NCCL group; every member has a GPU of its own."""
        options = dist.ProcessGroupNCCL.Options()
        store = dist.PrefixStore(f"nccl/{name}", self._store.clone())
        return dist.ProcessGroupNCCL(store, rank, size, options)


def group_name(name: str, members: Sequence[int]) -> str:
    """Names the group of some ranks, the same on all of them."""
    return f"group/{name}/{'-'.join(map(str, members))}"
