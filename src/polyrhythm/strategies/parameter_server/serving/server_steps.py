"""What servers' states tell of their workers' steps, where each counts them by worker."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.strategies.state import State


def steps_known(servers: Sequence[State]) -> list[tuple[int, ...]]:
    """Gives, for each worker, how many of its steps every server knows of."""
    return list(zip(*(facts["steps"] for _, facts in servers), strict=True))


def all_at(servers: Sequence[State], workers: int, step: int) -> list[State]:
    """Gives the states of servers that know of so many workers, all of them at one step."""
    return [(tensors, facts | {"steps": [step] * workers}) for tensors, facts in servers]
