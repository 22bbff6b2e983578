"""Which processes are of one start of a run, however often the torchrun of each host has started its own again.

The store outlives processes that are started again, and each host counts its restarts alone. So rank 0 draws a name
for every start, and keys have it in front; what an earlier start has left is never read.

rank r   "call r <nonce>" ─────────────▶ rank 0: answers whoever calls, even who is dead by now
         ◀──────────── answer/<nonce>: the name
         "there r <name>" ─────────────▶ rank 0: waits until all have heard its own name
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.launch.patience import SPEAK_AFTER_S, await_key, await_word

_CALLS = "calls"
_NAME_BYTES = 8
_LEADER = 0


def gather(rendezvous: Rendezvous) -> Rendezvous:
    """Meets those that are started together with this process; every rank must call it.

    Args:
        rendezvous: whose store may hold what an earlier start has left.

    Returns:
        The same, with keys that are this start's alone.

    Raises:
        RunError: the store is gone.
    """
    name = _name_start(rendezvous) if rendezvous.rank == _LEADER else _hear_name(rendezvous)
    return replace(rendezvous, store=dist.PrefixStore(name, rendezvous.store))


def _hear_name(rendezvous: Rendezvous) -> str:
    store, rank, nonce = rendezvous.store, rendezvous.rank, secrets.token_hex(_NAME_BYTES)
    store.queue_push(_CALLS, f"call {rank} {nonce}".encode())
    name = await_key(store, _answer(nonce), "rank 0 to join")
    store.queue_push(_CALLS, f"there {rank} {name}".encode())
    return name


def _name_start(rendezvous: Rendezvous) -> str:
    name = secrets.token_hex(_NAME_BYTES)
    store = rendezvous.store.clone()  # a connection of its own, since it waits there
    store.set_timeout(timedelta(seconds=SPEAK_AFTER_S))
    missing = set(range(rendezvous.size)) - {_LEADER}
    while missing:
        word, rank, about = await_word(store, _CALLS, f"rank {min(missing)} to join").split()
        if word == "call":
            store.set(_answer(about), name)
        elif about == name:
            missing.discard(int(rank))
    return name


def _answer(nonce: str) -> str:
    return f"answer/{nonce}"
