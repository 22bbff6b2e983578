"""Which servers are there, and which shards they can hand in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyrhythm.errors import PeerLost
from polyrhythm.strategies.strategy import Strategy


@dataclass
class ServerLosses:
    """What has become of a run's servers.

    Attributes:
        lost: how often a server was lost that had all of its shards.
        joined: how often a successor has got all of its shards.
        absent: ranks of those who are lost, and have no successor with all of its shards.
    """

    lost: int = 0
    joined: int = 0
    absent: set[int] = field(default_factory=set)

    def lose(self, rank: int) -> bool:
        """Strikes a server off; gives whether it was there: a successor may be lost before it has its shards."""
        news = rank not in self.absent
        self.absent.add(rank)
        self.lost += news
        return news

    def join(self, rank: int) -> None:
        """Enters a successor that has all of its shards."""
        self.absent.discard(rank)
        self.joined += 1

    def to_json(self) -> dict[str, Any]:
        """Gives it as a JSON-able dict."""
        return {"lost": self.lost, "joined": self.joined, "absent": sorted(self.absent)}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> ServerLosses:
        """Reads what `to_json` gave."""
        return cls(told["lost"], told["joined"], set(told["absent"]))


class ServerAttendance:
    """The leader's list of servers.

    Args:
        servers: their ranks, in the order of their indices.
        strategy: says which shards each holds.
        losses: so far.

    Attributes:
        losses: so far.
    """

    def __init__(self, servers: tuple[int, ...], strategy: Strategy, losses: ServerLosses) -> None:
        self.losses = losses
        self._servers = servers
        self._strategy = strategy

    @property
    def present(self) -> list[int]:
        """Ranks of those who are there, with all of their shards."""
        return [rank for rank in self._servers if rank not in self.losses.absent]

    def lose(self, rank: int) -> bool:
        """Strikes a server off; gives whether it was there with all of its shards.

        Raises:
            PeerLost: nobody else has one of its shards.
        """
        absent = {self._servers.index(each) for each in {rank, *self.losses.absent}}
        if not self._strategy.spares_servers(absent):
            raise PeerLost(rank, "waiting for a message from anyone")
        return self.losses.lose(rank)

    def holder(self, shard: int) -> int:
        """Gives the rank of a server that is there and has a shard."""
        ranks = [self._servers[index] for index in self._strategy.holders(shard)]
        return next(rank for rank in ranks if rank not in self.losses.absent)

    def shards_of(self, rank: int) -> list[int]:
        """Gives the shards that a server holds."""
        return self._strategy.holds(self._servers.index(rank))

    def name(self, rank: int) -> str:
        """Names a server for people."""
        return f"server {self._servers.index(rank)} (rank {rank})"
