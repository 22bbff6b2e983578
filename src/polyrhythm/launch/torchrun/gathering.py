"""Which processes are of one start of a run, however often each host's torchrun has started its own again.

The store outlives processes that are started again, and each host counts its restarts alone. So rank 0 draws
a name for every start, and keys have it in front; what an earlier start has left is never read.

rank r   "call r <nonce>" ─────────────▶ rank 0: answers every call, even of a process that is dead by now
         ◀──────────── answer/<nonce>: the name, and how many have had the rank before
         "there r <name>" ─────────────▶ rank 0: waits until all have heard its own name
         …all say where they are…        roles and cores are dealt out
         ◀──────────── whole: from here on a rank that is lost is missed by those who go on

A rank that dies before that is missed by no other, so until then all look whether their start still counts
(`check_counts`):

rank 0 looks whether a rank calls once more      ─┐ void: all begin again from the call
the others, whether a new start has been named   ─┘
rank 0 has all that it asks of the others: whole ─▶ from here on a rank that is lost is missed by those who go on

Where torchrun starts a lost rank again and leaves the others alone (`--master-addr`), that one calls while
they are under way, and `reception.py` answers: it comes in as a successor.

A rank that has a link to worker 0, or has seen its pulse, knows without this that worker 0 is lost. But
worker 0 may die before any rank has either; where torchrun then starts its host's ranks again alone, it waits
for the others, and they for it. So every rank ends soon after worker 0 has begun another start of the run
(`leave_with_start`).

At the start of a run that has nothing left to do, rank 0 lets all others leave, as those who come too late
(`tell_that_it_is_over`). The message stays in the store, so that ranks that come later still find it; rank 0
waits for the others only where it hosts the store. They may never come: they may have left in good order, and
only rank 0 was started again.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.launch.patience import Patience

CALLS = "calls"
"""The queue of the store in which ranks call rank 0."""

RETURN_VARIABLE = "POLYRHYTHM_LOST_RANKS_RETURN"
"""Set to 1 by whoever starts a lost rank again, and leaves the others alone."""

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


def gather(rendezvous: Rendezvous, patience: Patience | None = None) -> Gathered:
    """Meet those that are started together with this process; every rank must call it.

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
    """Return the name of the start that was named last; empty if there has been none."""
    return bytes(store.get(_NEWEST)).decode() if store.check([_NEWEST]) else ""


def call_again(store: Any, rank: int, nonce: str) -> None:
    """Call rank 0, for the first time or once more."""
    store.queue_push(CALLS, f"call {rank} {nonce}".encode())


def answer(store: Any, nonce: str, name: str, generation: int = 0) -> None:
    """Answer a call with the name of the start, and how many processes have had the rank before in it."""
    store.set(_answer(nonce), f"{name} {generation}")


def say_that_it_is_over(store: Any) -> None:
    """Tell ranks that call from now on; those that have called before must be told with `answer_over`."""
    store.set(_OVER, "")


def answer_over(store: Any, nonce: str) -> None:
    """Answer a call of a rank that comes too late."""
    store.set(_answer(nonce), _OVER)


def starts_hosts_apart(rendezvous: Rendezvous) -> bool:
    """Return whether lost ranks are started again while others go on: by torchrun, with its static rendezvous.

    There the store is the agents' own, and holds the ranks that they have been given; `c10d` makes another for ranks.
    Engines that start ranks one by one (`submission/placed_run.py`) say so in a variable.
    """
    if os.environ.get(RETURN_VARIABLE) == "1":
        return True
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
    name, generation = words[0], int(words[1])
    found = _inside(rendezvous, name)
    if generation:
        return Gathered(replace(found, generation=generation), name)
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


_WHOLE = "whole"


class StartIsVoid(Exception):
    """Some process of a start has been replaced before the start was whole: it is begun again."""


def check_counts(outside: Rendezvous, start: Gathered) -> None:
    """Check that a start still counts that is not known to be whole yet.

    Raises:
        StartIsVoid: it does not; gather again.
    """
    store = outside.store
    if outside.rank != LEADER:
        if newest_start(store) != start.name:
            raise StartIsVoid
        return
    while store.queue_len(CALLS):
        word, rank, about = bytes(store.queue_pop(CALLS, False)).decode().split()
        if word == "call" and about not in start.answered:
            call_again(store, int(rank), about)
            raise StartIsVoid


def make_whole(start: Gathered, patience: Patience) -> None:
    """End the gathering of a start, once all of this rank's questions to the others are answered.

    Raises:
        RunError: rank 0 has not come so far in time, or the store is gone.
        StartIsVoid: the start does not count.
    """
    if start.rendezvous.rank == LEADER:
        start.rendezvous.store.set(_WHOLE, "")
    else:
        patience.key(start.rendezvous.store, _WHOLE, LEADER)


_LOOK_EVERY_S = 1.0


def leave_with_start(outside: Rendezvous, start: Gathered) -> None:
    """End this process with status 1, and a line, soon after worker 0 has begun another start of the run.

    Not where worker 0 has ended this one in good order (`end_start`): then the other is the next part of the run.
    """
    store = outside.store.clone()  # the run uses the other

    def watch() -> None:
        with suppress(RuntimeError):  # the store is gone, and the watchdog sees for how long
            while newest_start(store) == start.name:
                time.sleep(_LOOK_EVERY_S)
            if store.check([_ended(start.name)]):
                return
            print(
                f"error: rank 0 has been started again, and the run with it: rank {outside.rank} must start again too",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    threading.Thread(target=watch, name="replaced", daemon=True).start()


def end_start(outside: Rendezvous, start: Gathered) -> None:
    """Say, in rank 0, that a part of a run has ended in good order, and that a start that follows is the next one."""
    outside.store.set(_ended(start.name), "")


def _ended(name: str) -> str:
    return f"ended/{name}"


def tell_that_it_is_over(rendezvous: Rendezvous, patience: Patience) -> None:
    """Let all others leave, in rank 0's place at the start of a run that has nothing left to do.

    Raises:
        RunError: some ranks have not come in time, or the store is gone.
    """
    store, missing = rendezvous.store, set(range(rendezvous.size)) if rendezvous.keeper else {LEADER}
    missing.remove(LEADER)
    say_that_it_is_over(store)
    while missing or store.queue_len(CALLS):  # who has called before the word was there waits for an answer
        word, rank, about = patience.word(store, CALLS, lambda: sorted(missing)).split()
        if word == "call":
            answer_over(store, about)
        elif word == "left":  # and does not need the store any more
            missing.discard(int(rank))
