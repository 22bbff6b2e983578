"""A strategy's state in a checkpoint, and how it is resharded for another number of workers.

checkpoint of N workers ─▶ counted: which of their steps count ─▶ the rest of the epoch is dealt out among K
─▶ merged: what K workers and the servers start from, and a summary for people
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Named tensors and JSON-able facts: all that a resumed part needs."""


@dataclass(frozen=True)
class Held:
    """What a checkpoint holds of a strategy.

    Attributes:
        parameters: `(n,)`, worker 0's flat vector.
        steps: that each worker had reported; 0 of one that had not.
        workers: the state of their parts, by index, of those that had handed one in; of parts that are `replicated`,
            worker 0's.
        servers: the states of all servers.
    """

    parameters: Tensor
    steps: tuple[int, ...]
    workers: dict[int, State]
    servers: list[State]


@dataclass(frozen=True)
class Merged:
    """What another number of workers goes on with.

    Attributes:
        held: as if they had written the checkpoint; who has no state among its workers begins as at a run's start.
        text: what was merged and what was left out, for people.
    """

    held: Held
    text: str


class Resharding(Protocol):
    """A strategy's way from one number of workers to another."""

    def counted(self, held: Held) -> list[int]:
        """Gives how many steps of each worker count; what they did beyond is done again by others.

        Args:
            held: by the checkpoint.
        """

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Gives what another number of workers goes on with.

        Args:
            held: by the checkpoint.
            workers: how many there are now.
            step: that all of them begin with, in the count of steps that they have from now on.
        """


class SameForAll:
    """Where workers go in step, hold the same, and there are no servers: all begin with what worker 0 had."""

    def counted(self, held: Held) -> list[int]:
        """All that worker 0 has done: it is what the others did."""
        return [held.steps[0]] * len(held.steps)

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Everybody gets worker 0's part."""
        own = held.workers.get(0, ({}, {}))
        every = dict.fromkeys(range(workers), own)
        return Merged(replace(held, workers=every), "all go on from worker 0's parameters and optimiser")
