"""Identity of a run's start: its processes, however often each host's torchrun has restarted its own.

The store outlives restarted processes, and each host counts its restarts alone. So rank 0 draws a name for
every start, and keys have it as a prefix; keys of an earlier start are never read.

rank r   "call r <nonce>" ─────────────▶ rank 0: answers every call, even of a process that is dead by now
         ◀──────────── answer/<nonce>: the name, and the number of previous processes of the rank
         "there r <name>" ─────────────▶ rank 0: waits until all have received its own name
         …all publish their hosts…        roles and cores are assigned
         ◀──────────── whole: from here on a rank that is lost is missed by the others, which continue

A rank that dies before that is missed by no other, so until then all check whether their start still counts
(`check_counts`):

rank 0 checks whether a rank calls once more      ─┐ void: all restart from the call
the others, whether a new start has been named    ─┘
rank 0 has all answers from the others: whole    ─▶ from here on a rank that is lost is missed by the others

Where torchrun restarts a failed rank and leaves the others alone (`--master-addr`), that one calls while they
are in progress, and `reception.py` answers: it enters as a replacement.

A rank that has a link to worker 0, or has seen its pulse, knows without this that worker 0 is lost. But
worker 0 may die before any rank has either; where torchrun then starts its host's ranks again alone, it waits
for the others, and they for it. So every rank ends soon after worker 0 has begun another start of the run
(`leave_with_start`).

At the start of a run that has nothing left to do, rank 0 lets all others leave, like late ranks
(`announce_end`). The message stays in the store, so that later ranks still find it; rank 0 waits for
the others only where it hosts the store. They may never arrive: they may have left in good order, and
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
"""Set to 1 by a launcher that restarts failed ranks alone."""

_OVER, _NEWEST = "over", "newest"
_NAME_BYTES = 8
LEADER = 0


class RunIsOver(Exception):
    """The others have ended, in good order, before this rank started."""


@dataclass(frozen=True)
class Gathered:
    """A start of a run, as one of its ranks knows it.

    Attributes:
        rendezvous: rendezvous with keys that are this start's alone.
        name: name of the start.
        answered: calls that rank 0 has answered; they may arrive twice. Empty on other ranks.
    """

    rendezvous: Rendezvous
    name: str
    answered: frozenset[str] = frozenset()


def gather(rendezvous: Rendezvous, patience: Patience | None = None) -> Gathered:
    """Meet the processes that are started together with this one; every rank must call it.

    Args:
        rendezvous: rendezvous; its store may hold keys of an earlier start.
        patience: time limit; None: the default.

    Returns:
        The start that this process is of, as the replacement of a lost rank if the others are in progress.

    Raises:
        RunError: some ranks are missing after the time limit, or the store is gone.
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


def post_end(store: Any) -> None:
    """Notify ranks that call from now on; earlier callers must be notified with `answer_over`."""
    store.set(_OVER, "")


def answer_over(store: Any, nonce: str) -> None:
    """Answer a call of a rank that is too late."""
    store.set(_answer(nonce), _OVER)


def starts_hosts_apart(rendezvous: Rendezvous) -> bool:
    """Return whether failed ranks are restarted while others continue: by torchrun, with its static rendezvous.

    There the store is the agents' own, and holds the ranks that they have been given; `c10d` makes another
    for ranks. Engines that start ranks one by one (`submission/placed_run.py`) set a variable.
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

    def look() -> None:  # a rank that has received the call may have died with it
        nonlocal called
        before, called = called, newest_start(store)
        if before not in ("", called):
            again()

    call_again(store, rank, nonce)
    words = [_OVER]
    if not store.check([_OVER]):  # else it is set after this call, which then is answered
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
        RunError: rank 0 has not progressed this far in time, or the store is gone.
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
    """Announce, in rank 0, that a part of a run has ended in good order, and that the next start is the next part."""
    outside.store.set(_ended(start.name), "")


def _ended(name: str) -> str:
    return f"ended/{name}"


def announce_end(rendezvous: Rendezvous, patience: Patience) -> None:
    """Let all others leave, on rank 0, at the start of a run that has nothing left to do.

    Raises:
        RunError: some ranks are missing after the time limit, or the store is gone.
    """
    store, missing = rendezvous.store, set(range(rendezvous.size)) if rendezvous.keeper else {LEADER}
    missing.remove(LEADER)
    post_end(store)
    while missing or store.queue_len(CALLS):  # a rank that called before the key was set waits for an answer
        word, rank, about = patience.word(store, CALLS, lambda: sorted(missing)).split()
        if word == "call":
            answer_over(store, about)
        elif word == "left":  # and does not need the store any more
            missing.discard(int(rank))
