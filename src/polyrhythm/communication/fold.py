"""Folding: how an algorithm for powers of two takes part with any number of ranks.

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005, section 4.

    N = 6:   4 ──▶ 3,  5 ──▶ 0     then 0, 1, 2, 3 go on alone     3 ──▶ 4,  0 ──▶ 5
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from polyrhythm.communication.collective import PointToPoint, exchange, receive, start_send
from polyrhythm.cost.traffic import core_size, fold_partner


def folded(ranks: PointToPoint, vector: Tensor, tag: int, reduce_core: Callable[[int], None]) -> None:
    """Adds up over any number of ranks by an algorithm for a power of two.

    Args:
        ranks: who takes part.
        vector: changed in place.
        tag: of the messages.
        reduce_core: adds `vector` up over the first ranks, as many as it is told, which is the largest power of two
            that there is; called on these ranks only.
    """
    core, partner = core_size(ranks.size), fold_partner(ranks.size, ranks.rank)
    if ranks.rank >= core:
        assert partner is not None
        vector.copy_(exchange(ranks, partner, vector, tag, vector))
        return
    if partner is not None:
        vector.add_(receive(ranks, partner, tag, vector))
    reduce_core(core)
    if partner is not None:
        start_send(ranks, partner, vector, tag).wait()
