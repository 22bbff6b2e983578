"""What holds wherever `ShardServer` serves."""

from __future__ import annotations

from collections.abc import Mapping

from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.answers import Answers
from polyrhythm.strategies.invariants.ledger import Behind, Ledger
from polyrhythm.strategies.invariants.meetings import Undisturbed
from polyrhythm.strategies.invariants.shards_together import ShardsTogether
from polyrhythm.strategies.invariants.staleness import Staleness
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.shard import Handling


def serving_invariants(
    conditions: Conditions,
    pushers: Mapping[int, tuple[int, ...]],
    consistency: Consistency,
    handling: Handling,
    *,
    in_step: bool,
    behind: Behind | None = None,
) -> list[Invariant]:
    """Makes the invariants of servers that own the optimiser.

    Args:
        conditions: of the run.
        pushers: for each rank that pushes, the indices of the workers whose mean it pushes.
        consistency: of the servers.
        handling: of gradients.
        in_step: whether all workers are at the same step at all times.
        behind: as in `Ledger`, where it is not always the same for a pusher.
    """
    drops = consistency.drops and not consistency.in_step()
    staleness = Staleness(drops=drops, doubts=handling.aggregator.whole and in_step)
    found: list[Invariant] = [Answers(conditions.cast), staleness]
    found += consistency.invariants(conditions, pushers)
    if conditions.gradient is not None and adds_up(handling):
        behind = behind or (lambda server, rank, step: pushers.get(rank, ()))
        found.append(Ledger(conditions, behind, drops=drops))
    if in_step:
        found.append(Undisturbed(ShardsTogether()))
    return found


def adds_up(handling: Handling) -> bool:
    """Whether the parameters are the sum of the gradients' means as they came."""
    return handling.merge.keeps_gradients and not handling.aggregator.robust
