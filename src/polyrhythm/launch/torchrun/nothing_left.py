"""The start of a run that has nothing left to do: rank 0 lets all others leave, as those who come too late.

The word stays in the store, so who comes later still finds it; rank 0 waits for the others only where it hosts the
store. Whom it would wait for may never come: they may have left in good order, and only rank 0 was started again.
"""

from __future__ import annotations

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.launch.patience import Patience
from polyrhythm.launch.torchrun.gathering import CALLS, LEADER, answer_over, say_that_it_is_over


def tell_that_it_is_over(rendezvous: Rendezvous, patience: Patience) -> None:
    """Lets all others leave, in rank 0's place at the start of a run that has nothing left to do.

    Args:
        rendezvous: of rank 0, as its environment has it.
        patience: with the others.

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
