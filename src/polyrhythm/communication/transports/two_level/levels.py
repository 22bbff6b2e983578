"""Who shares a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Levels:
    """Which members of a communicator share a host.

    Attributes:
        hosts: the members of each host, in their order, the host of member 0 first; the first of each leads.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, host_of: Sequence[str]) -> Levels:
        """Groups members by the host of each."""
        hosts: dict[str, list[int]] = {}
        for member, host in enumerate(host_of):
            hosts.setdefault(host, []).append(member)
        return cls(tuple(map(tuple, hosts.values())))

    @property
    def mixed(self) -> bool:
        """Whether there are several hosts, of which one has several members."""
        return 1 < len(self.hosts) < sum(map(len, self.hosts))

    def host(self, member: int) -> int:
        """Gives the number of a member's host."""
        return next(number for number, members in enumerate(self.hosts) if member in members)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first member of each host."""
        return tuple(members[0] for members in self.hosts)
