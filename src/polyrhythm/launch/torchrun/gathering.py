"""Which processes are of one start of a run, however often the torchrun of each host has started its own again.

The store outlives processes that are started again, and each host counts its restarts alone. So rank 0 draws a name
for every start, and keys have it in front; what an earlier start has left is never read.

rank r   "call r <nonce>" ─────────────▶ rank 0: answers whoever calls, even who is dead by now
         ◀──────────── answer/<nonce>: the name, and how many have had the rank before
         "there r <name>" ─────────────▶ rank 0: waits until all have heard its own name
         …all say where they are…        roles and cores are dealt out
         ◀──────────── whole: from here on whoever is lost is missed by those who go on

Who dies before that is missed by nobody, so until then all look whether their start still counts (`wholeness.py`).

Where torchrun starts a lost rank again and leaves the others alone (`--master-addr`), that one calls while they are
under way, and `reception.py` answers: it comes in as a successor.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import PREFIX, Rendezvous
from polyrhythm.launch.patience import Patience

CALLS = "calls"
"""The queue of the store in which ranks call rank 0."""

_OVER, _NEWEST = "over", "newest"
_NAME_BYTES = 8
LEADER = 0


class RunIsOver(Exception):
    """The others have ended, in good order, before this rank came."""


@dataclass(frozen=True)
class Gathered:
    """A start of a run, as one of its ranks knows it.

    Attributes:
        rendezvous: with keys that are this start's alone.
        name: of the start.
        answered: to rank 0, the calls that it has answered; they may come twice.
    """

    rendezvous: Rendezvous
    name: str
    answered: frozenset[str] = frozenset()

    @property
    def prefix(self) -> str:
        """What its keys have in front in the store."""
        return f"{PREFIX}/{self.name}"


def gather(rendezvous: Rendezvous, patience: Patience | None = None) -> Gathered:
    """Meets those that are started together with this process; every rank must call it.

    Args:
        rendezvous: whose store may hold what an earlier start has left.
        patience: for how long; None: as long as ranks have it that are not told otherwise.

    Returns:
        The start that this process is of, as the successor of a lost rank if the others are under way.

    Raises:
        RunError: some ranks have not come in time, or the store is gone.
        RunIsOver: the others have ended.
    """
    patience = patience or Patience()
    if rendezvous.rank == LEADER:
        return _name_start(rendezvous, patience)
    return _call(rendezvous, patience)


def newest_start(store: Any) -> str:
    """Gives the name of the start that was named last; empty if there has been none."""
    return bytes(store.get(_NEWEST)).decode() if store.check([_NEWEST]) else ""


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


def _call(rendezvous: Rendezvous, patience: Patience) -> Gathered:
    store, rank, nonce = rendezvous.store, rendezvous.rank, secrets.token_hex(_NAME_BYTES)
    called = newest_start(store)

    def again() -> None:
        call_again(store, rank, nonce)

    def look() -> None:  # whoever has heard the call may have died with it
        nonlocal called
        before, called = called, newest_start(store)
        if before not in ("", called):
            again()

    call_again(store, rank, nonce)
    words = [_OVER]
    if not store.check([_OVER]):  # else it is said after this call, which then is answered
        words = patience.looking(look).key(store, _answer(nonce), LEADER, again).split()
    if words == [_OVER]:
        store.queue_push(CALLS, f"left {rank} {nonce}".encode())
        raise RunIsOver
    name, incarnation = words[0], int(words[1])
    found = _inside(rendezvous, name)
    if incarnation:
        return Gathered(replace(found, incarnation=incarnation), name)
    store.queue_push(CALLS, f"there {rank} {name}".encode())
    return Gathered(found, name)


def _name_start(rendezvous: Rendezvous, patience: Patience) -> Gathered:
    name, store, answered = secrets.token_hex(_NAME_BYTES), rendezvous.store, set()
    store.delete_key(_OVER)  # an earlier start's
    store.set(_NEWEST, name)
    missing = set(range(rendezvous.size)) - {LEADER}
    while missing:
        word, rank, about = patience.word(store, CALLS, lambda: sorted(missing)).split()
        if word == "call":
            answer(store, about, name)
            answered.add(about)
        elif about == name:
            missing.discard(int(rank))
    return Gathered(_inside(rendezvous, name), name, frozenset(answered))


def _answer(nonce: str) -> str:
    return f"answer/{nonce}"
