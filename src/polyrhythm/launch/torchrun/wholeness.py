"""Whether the start of a run still counts, until it is whole: until then, who dies is missed by nobody.

rank 0 looks whether somebody calls once more    ─┐ void: all begin again from the call (`gathering.py`)
the others, whether a new start has been named   ─┘
rank 0 has all that it asks of the others: whole ─▶ from here on whoever is lost is missed by those who go on
"""

from __future__ import annotations

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.launch.patience import Patience
from polyrhythm.launch.torchrun.gathering import CALLS, LEADER, Gathered, call_again, newest_start

_WHOLE = "whole"


class StartIsVoid(Exception):
    """Some process of a start has been replaced before the start was whole: it is begun again."""


def check_counts(outside: Rendezvous, start: Gathered) -> None:
    """Checks that a start still counts, of which nobody knows yet whether it is whole.

    Args:
        outside: of this rank, as its environment has it.
        start: as this rank knows it.

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
    """Ends the gathering of a start, once all of this rank's questions to the others are answered.

    Args:
        start: as this rank knows it.
        patience: looks whether the start counts.

    Raises:
        RunError: rank 0 has not come so far in time, or the store is gone.
        StartIsVoid: the start does not count.
    """
    if start.rendezvous.rank == LEADER:
        start.rendezvous.store.set(_WHOLE, "")
    else:
        patience.key(start.rendezvous.store, _WHOLE, LEADER)
