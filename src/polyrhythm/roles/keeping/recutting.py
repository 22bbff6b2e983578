"""Resuming with another number of servers than a checkpoint was written by: their shards are cut anew."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Job
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy


def goes_on_from(job: Job, before: str) -> bool:
    """Whether the job's strategy can go on where a run with another left off, given as text."""
    if str(job.strategy) == before:
        return True
    try:
        found = build("strategy", before, *FAMILIES)
    except RequestError:  # there is no such strategy any more
        return False
    return isinstance(found, Strategy) and job.strategy.goes_on_from(found)


def recutting_notice(job: Job, states: Sequence[State]) -> str:
    """Says what becomes of the servers' states."""
    columns = zip(*(facts["steps"] for _, facts in states), strict=True)
    apart = sum(max(steps) - min(steps) for steps in columns)
    merged = "" if not apart else f"; {apart} gradients that not all servers had yet count as applied"
    return (
        f"resumed with {job.strategy.server_count} servers in place of {len(states)}: the shards are cut anew, with "
        f"the optimisers' states{merged}"
    )
