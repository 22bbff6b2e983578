"""The start of a run that has nothing left to do: rank 0 lets all others leave, as those who come too late."""

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
    store, missing = rendezvous.store, set(range(rendezvous.size)) - {LEADER}
    say_that_it_is_over(store)
    while missing:
        word, rank, about = patience.word(store, CALLS, lambda: sorted(missing)).split()
        if word == "call":
            answer_over(store, about)
        elif word == "left":  # nobody needs the store any more, which may be this process's
            missing.discard(int(rank))
