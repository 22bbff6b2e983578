"""Which processes are of one start of a run, however often the torchrun of each host has started its own again.

The store outlives processes that are started again, and each host counts its restarts alone. So rank 0 draws a name
for every start, and keys have it in front; what an earlier start has left is never read.

rank r   "call r <nonce>" ─────────────▶ rank 0: answers whoever calls, even who is dead by now
         ◀──────────── answer/<nonce>: the name, and how many have had the rank before
         "there r <name>" ─────────────▶ rank 0: waits until all have heard its own name

Where torchrun starts a lost rank again and leaves the others alone (`--master-addr`), that one calls while they are
under way, and `reception.py` answers: it comes in as a successor.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import PREFIX, Rendezvous
from polyrhythm.launch.patience import SPEAK_AFTER_S, await_key, await_word

CALLS = "calls"
"""The queue of the store in which ranks call rank 0."""

_OVER = "over"
_NAME_BYTES = 8
_LEADER = 0


class RunIsOver(Exception):
    """The others have ended, in good order, before this rank came."""


@dataclass(frozen=True)
class Gathered:
    """A start of a run, as one of its ranks knows it.

    Attributes:
        rendezvous: with keys that are this start's alone.
        name: of the start.
    """

    rendezvous: Rendezvous
    name: str

    @property
    def prefix(self) -> str:
        """What its keys have in front in the store."""
        return f"{PREFIX}/{self.name}"


def gather(rendezvous: Rendezvous) -> Gathered:
    """Meets those that are started together with this process; every rank must call it.

    Args:
        rendezvous: whose store may hold what an earlier start has left.

    Returns:
        The start that this process is of, as the successor of a lost rank if the others are under way.

    Raises:
        RunError: the store is gone.
        RunIsOver: the others have ended.
    """
    if rendezvous.rank == _LEADER:
        name = _name_start(rendezvous)
        return Gathered(_inside(rendezvous, name), name)
    return _call(rendezvous)


def call_again(store: Any, rank: int, nonce: str) -> None:
    """Calls rank 0, for the first time or once more."""
    store.queue_push(CALLS, f"call {rank} {nonce}".encode())


def answer(store: Any, nonce: str, name: str, incarnation: int = 0) -> None:
    """Answers a call.

    Args:
        store: where ranks call.
        nonce: of the call.
        name: of the start.
        incarnation: how many processes have had the rank before in this start.
    """
    store.set(_answer(nonce), f"{name} {incarnation}")


def say_that_it_is_over(store: Any) -> None:
    """Leaves word for ranks that call from now on; who has called before must be told with `answer_over`."""
    store.set(_OVER, "")


def answer_over(store: Any, nonce: str) -> None:
    """Answers a call of a rank that comes too late."""
    store.set(_answer(nonce), _OVER)


def starts_hosts_apart(rendezvous: Rendezvous) -> bool:
    """Whether torchrun starts the ranks of a host again while those of others go on: its rendezvous is the static one.

    There the store is the agents' own, and holds the ranks that they have been given; `c10d` makes another for ranks.

    Args:
        rendezvous: as the environment gives it.
    """
    run, host = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("GROUP_RANK", "0")
    agents: Any = rendezvous.store.underlying_store
    return bool(agents.check([f"{run}/torchelastic/assigned_ranks/{host}"]))


def _inside(rendezvous: Rendezvous, name: str) -> Rendezvous:
    return replace(rendezvous, store=dist.PrefixStore(name, rendezvous.store))


def _call(rendezvous: Rendezvous) -> Gathered:
    store, rank, nonce = rendezvous.store, rendezvous.rank, secrets.token_hex(_NAME_BYTES)
    call_again(store, rank, nonce)
    if store.check([_OVER]):  # else it is said after this call, which then is answered
        raise RunIsOver
    again = partial(call_again, store, rank, nonce)  # whoever has heard the call may have died with it
    words = await_key(store, _answer(nonce), "rank 0 to join", again).split()
    if words == [_OVER]:
        raise RunIsOver
    name, incarnation = words[0], int(words[1])
    found = _inside(rendezvous, name)
    if incarnation:
        return Gathered(replace(found, incarnation=incarnation), name)
    store.queue_push(CALLS, f"there {rank} {name}".encode())
    return Gathered(found, name)


def _name_start(rendezvous: Rendezvous) -> str:
    name = secrets.token_hex(_NAME_BYTES)
    store = rendezvous.store.clone()  # a connection of its own, since it waits there
    store.set_timeout(timedelta(seconds=SPEAK_AFTER_S))
    store.delete_key(_OVER)  # an earlier start's
    missing = set(range(rendezvous.size)) - {_LEADER}
    while missing:
        word, rank, about = await_word(store, CALLS, f"rank {min(missing)} to join").split()
        if word == "call":
            answer(store, about, name)
        elif about == name:
            missing.discard(int(rank))
    return name


def _answer(nonce: str) -> str:
    return f"answer/{nonce}"
