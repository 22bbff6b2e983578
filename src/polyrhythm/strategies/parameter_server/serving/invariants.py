"""What holds wherever `ShardServer` serves."""

from __future__ import annotations

from collections.abc import Mapping

from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.answers import Answers
from polyrhythm.strategies.invariants.ledger import Ledger
from polyrhythm.strategies.invariants.shards_together import ShardsTogether
from polyrhythm.strategies.invariants.staleness import Staleness


def serving_invariants(
    conditions: Conditions, pushers: Mapping[int, tuple[int, ...]], *, in_step: bool
) -> list[Invariant]:
    """Makes the invariants of servers that own the optimiser.

    Args:
        conditions: of the run.
        pushers: for each rank that pushes, the indices of the workers whose mean it pushes.
        in_step: whether all workers are at the same step at all times.
    """
    found: list[Invariant] = [Answers(conditions.cast), Staleness()]
    if conditions.gradient is not None:
        found.append(Ledger(conditions, lambda rank: pushers.get(rank, ())))
    if in_step:
        found.append(ShardsTogether())
    return found
