"""Role assignment: which ranks of a run are workers and which are servers.

A placement chooses the servers, given the host of every rank. All other ranks are workers; the first of them,
rank 0, leads the run and is never a server.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

PLACEMENTS = "polyrhythm.strategies.placements"
"""The folder that lists them."""


class Placement(Config):
    """A rule for choosing servers among the ranks."""

    dedicated: ClassVar[bool]

    @abstractmethod
    def servers(self, hosts: Sequence[int], count: int) -> tuple[int, ...]:
        """Choose the ranks that are servers; rank 0 is never one.

        Args:
            hosts: the host of every rank.
            count: number of servers; less than the number of ranks.
        """


@dataclass(frozen=True)
class RoleAssignment:
    """The ranks of a run by role.

    Attributes:
        workers: ranks of the workers; the first one, rank 0, leads the run.
        servers: ranks of the servers, in the order of their shards.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(self.workers) + len(self.servers)

    def works(self, rank: int) -> bool:
        """Return whether a rank is a worker; at once, since thousands of ranks ask about thousands."""
        return rank in self._working

    @cached_property
    def _working(self) -> frozenset[int]:
        return frozenset(self.workers)


def roles_in_order(workers: int, servers: int) -> RoleAssignment:
    """Number the workers first, as a local run does."""
    return RoleAssignment(tuple(range(workers)), tuple(range(workers, workers + servers)))


def roles_for(hosts: Sequence[int], servers: int, placement: Placement) -> RoleAssignment:
    """Return the role of every rank.

    Args:
        hosts: the host of every rank.
        servers: number of servers.
        placement: rule that chooses them.

    Raises:
        RequestError: no rank would be left to work.
    """
    if servers >= len(hosts):
        raise RequestError(
            f"{len(hosts)} processes cannot hold {servers} servers and a worker: start at least {servers + 1}"
        )
    chosen = placement.servers(hosts, servers)
    return RoleAssignment(tuple(rank for rank in range(len(hosts)) if rank not in chosen), chosen)
