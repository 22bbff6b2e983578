"""Where the loops of all workers are when an epoch begins."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Mark:
    """One beginning, as whoever comes there first leaves it for all.

    Attributes:
        present: the workers that have a share of the epoch.
        entering: of those, successors that are let in now, where workers go in step.
        shards: how many epochs of each shard have been handed out.
        averages: how many averages have been taken.
        steps: that this worker has taken.
        rates: the learning rate of every parameter group.
        kept: plain states of what the loop keeps.
    """

    present: tuple[int, ...]
    entering: tuple[int, ...]
    shards: tuple[int, ...]
    averages: int
    steps: int
    rates: tuple[float, ...]
    kept: tuple[dict[str, Any], ...]

    def to_text(self) -> str:
        """Writes it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Mark:
        """Reads what `to_text` wrote."""
        told: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
        }
        return cls(**values)
