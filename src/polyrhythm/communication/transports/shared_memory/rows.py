"""Vectors of all members that lie in memory which all of them see, so that they are added up where they lie.

row 0   [ vector of member 0 …… ]        member s adds slice s of all rows up, in the order of members,
row 1   [ vector of member 1 …… ]        and writes the sum into slice s of every row
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED_BYTES = 4096
_MOST_PLACES = 256


class Rows:
    """Where each member's vector begins, and how much memory all of them take.

    Args:
        members: how many there are.
        like: gives the size and dtype of a vector.
    """

    def __init__(self, members: int, like: Tensor) -> None:
        self._members = members
        self._count = like.numel()
        aligned = _ALIGNED_BYTES // like.element_size()
        self._stride = -(-self._count // aligned) * aligned
        self.memory_like = torch.empty(members * self._stride, dtype=like.dtype, device="meta")

    def of(self, memory: Tensor) -> list[Tensor]:
        """Gives all members' vectors in a memory like `memory_like`."""
        return list(memory.view(self._members, self._stride)[:, : self._count])


class InPlace:
    """The vectors that a member can add up in place; looks up the others' parts of what is given to it.

    Args:
        member: this one.
    """

    def __init__(self, member: int) -> None:
        self._member = member
        self._rows: list[list[Tensor]] = []
        self._known: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, rows: Sequence[Tensor]) -> Tensor:
        """Takes the vectors of all members; gives this one's."""
        self._rows.append(list(rows))
        return rows[self._member]

    def parts(self, vector: Tensor) -> list[Tensor] | None:
        """Gives what all members have in the place of a slice of this one's vector; None if it is no such slice."""
        if not self._rows:
            return None
        key = vector.data_ptr(), vector.numel()
        known = self._known.get(key)
        if known is None and (known := self._found(vector)) is not None:
            if len(self._known) == _MOST_PLACES:
                self._known.clear()
            self._known[key] = known
        return known

    def _found(self, vector: Tensor) -> list[Tensor] | None:
        for rows in self._rows:
            own = rows[self._member]
            start, rest = divmod(vector.data_ptr() - own.data_ptr(), own.element_size())
            inside = start >= 0 and start + vector.numel() <= own.numel()
            if inside and rest == 0 and vector.dtype == own.dtype:
                return [row[start : start + vector.numel()] for row in rows]
        return None
