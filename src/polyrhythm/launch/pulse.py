"""Pulses: what every rank says of itself, again and again, in the store where all meet."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from polyrhythm.communication.activity import Activity
from polyrhythm.communication.transports.membership import Peer


@dataclass(frozen=True)
class Pulse:
    """One rank at one moment.

    Attributes:
        rank: which.
        incarnation: how many have had its number before.
        role: what it is, such as `worker 1`.
        beat: counts up, so that others see it live, whatever their clocks say.
        step: steps that it has done.
        doing: in words.
        doing_s: for how long.
        takes_long: whether that may well take long.
        host: equal for ranks of one host.
        process: its number there.
        left: whether it has left in good order.
    """

    rank: int
    incarnation: int
    role: str
    beat: int = 0
    step: int = 0
    doing: str = ""
    doing_s: float = 0.0
    takes_long: bool = False
    host: str = ""
    process: int = 0
    left: bool = False

    @property
    def peer(self) -> Peer:
        """The process."""
        return Peer(self.rank, self.incarnation)

    @property
    def text(self) -> str:
        """In words."""
        where = f"step {self.step}, " if self.role.startswith("worker") else ""
        return f"{self.role} (rank {self.rank}): {where}{self.doing} for {self.doing_s:.1f} s"

    @classmethod
    def of(cls, activity: Activity, own: Peer, role: str, host: str, beat: int) -> Pulse:
        """Takes this process's."""
        doing = activity.now()
        return cls(
            *own,
            role=role,
            beat=beat,
            step=activity.step,
            doing=doing.what,
            doing_s=time.monotonic() - doing.since_s,
            takes_long=doing.takes_long,
            host=host,
            process=os.getpid(),
        )


def publish(store: Any, pulse: Pulse) -> None:
    """Leaves a pulse in the store."""
    store.set(_key(pulse.rank), json.dumps(asdict(pulse)))


def read(store: Any, ranks: list[int]) -> dict[int, Pulse]:
    """Reads the latest pulses of some ranks, of those that have had one."""
    there = [rank for rank in ranks if store.check([_key(rank)])]
    if not there:
        return {}
    values = store.multi_get([_key(rank) for rank in there])
    return {
        rank: Pulse(**json.loads(bytes(value).decode())) for rank, value in zip(there, values, strict=True)
    }


def _key(rank: int) -> str:
    return f"pulse/{rank}"
