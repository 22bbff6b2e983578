"""The ranks of a simulated communicator."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of a communicator: one object for all of them, since thousands of ranks have thousands of members.

    Attributes:
        name: tells its messages from those of other groups of the same ranks.
        members: global ranks, in the order in which the group numbers them.
        context: of its messages.
        numbers: of the members in the group, by global rank.
    """

    name: str
    members: tuple[int, ...]
    context: int
    numbers: dict[int, int]

    @classmethod
    def of(cls, name: str, members: tuple[int, ...]) -> Group:
        """Makes a group."""
        numbers = {member: number for number, member in enumerate(members)}
        return cls(name, members, crc32(f"{name}{members}".encode()), numbers)
