"""Where the parts of a vector lie in the shared memory; looked up often, so made once for each size and dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyrhythm.communication.transports.shared_memory.arena import Arena

_MOST_SIZES = 64


@dataclass(frozen=True)
class HalfPlaces:
    """The places in one half, for a vector that fits into a slot and is cut into one slice a member.

    Attributes:
        whole: where each member hands in its vector.
        mine: what each member hands in of this member's slice.
        handing_in: where this member hands in what lies before and behind its own slice.
        total: where this member puts the sum of its slice.
        totals: what lies before and behind it: the sums of the others' slices.
    """

    whole: list[Tensor]
    mine: list[Tensor]
    handing_in: tuple[Tensor, Tensor]
    total: Tensor
    totals: tuple[Tensor, Tensor]


class Places:
    """The places of vectors of all sizes, as one member sees them.

    Args:
        arena: the memory.
        member: who looks.
    """

    def __init__(self, arena: Arena, member: int) -> None:
        self._arena = arena
        self._member = member
        self._known: dict[tuple[torch.dtype, int], tuple[HalfPlaces, HalfPlaces]] = {}

    def of(self, dtype: torch.dtype, count: int) -> tuple[HalfPlaces, HalfPlaces]:
        """Gives the places of a vector of `count` elements, in each half."""
        known = self._known.get((dtype, count))
        if known is None:
            if len(self._known) == _MOST_SIZES:
                self._known.clear()
            known = self._known[dtype, count] = self._half(0, dtype, count), self._half(1, dtype, count)
        return known

    def cut(self, count: int) -> tuple[int, int, int]:
        """Gives the lengths of what lies before this member's slice, of the slice, and of what lies behind it."""
        members = self._arena.layout.members
        start, stop = count * self._member // members, count * (self._member + 1) // members
        return start, stop - start, count - stop

    def _half(self, half: int, dtype: torch.dtype, count: int) -> HalfPlaces:
        start, length, _ = self.cut(count)
        stop = start + length
        *slots, sums = (slot[:count] for slot in self._arena.slots(half, dtype))
        own = slots[self._member]
        return HalfPlaces(
            slots,
            [slot[start:stop] for slot in slots],
            (own[:start], own[stop:]),
            sums[start:stop],
            (sums[:start], sums[stop:]),
        )
