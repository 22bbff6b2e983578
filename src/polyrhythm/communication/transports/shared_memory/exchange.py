"""Collectives through shared memory, for contiguous vectors of the CPU; one at a time.

Wu, Yan, Shan, Dang, Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv 1501.02876, section 3.2, for the
direct reduce-scatter and all-gather, here with loads and stores in place of messages.

    sum[s] = (..((x_0[s] + x_1[s]) + x_2[s]) + ..) + x_{N-1}[s]     slice s of every chunk, added up by member s

Sums go in the order of ranks, element by element, so they are the same bits as `collectives/direct.py` gives, however
the vector is cut. A vector larger than a slot goes in chunks, and one barrier a chunk is enough:

    barrier b publishes   my part of chunk c (all but my slice)        and my sum of my slice of chunk c-1
    then                  take the others' sums of chunk c-1; add up my slice of chunk c; hand in chunk c+1

A vector that is small is added up as a whole by everyone, which costs one barrier and no second copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from polyrhythm.communication.transports.shared_memory.arena import Arena
from polyrhythm.communication.transports.shared_memory.barrier import Barrier
from polyrhythm.communication.transports.shared_memory.description import (
    Operation,
    check_agreement,
    describe,
)

_SMALL_BYTES = 128 << 10
"""Of all members' vectors together: so much is added up faster by everyone than passed on."""

_MOST_PLACES = 64
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class _Places:
    """Where vectors of one size and dtype lie in the arena: for each half, what each member hands in."""

    halves: tuple[list[Tensor], list[Tensor]]


class Exchange:
    """One member's side.

    Args:
        arena: shared by all members.
        barrier: of all members.
        member: this one.
        members: the ranks of all members, among all ranks of the run.

    Every operation raises `RequestError` on all members if they disagree about it, and `CollectiveBroken` if one of
    them is gone.
    """

    def __init__(self, arena: Arena, barrier: Barrier, member: int, members: tuple[int, ...]) -> None:
        self._arena = arena
        self._barrier = barrier
        self._member = member
        self._members = members
        self._places: dict[tuple[torch.dtype, int], _Places] = {}

    def all_reduce(self, vector: Tensor) -> None:
        """Adds a vector of shape `(n,)` up over all members, in place."""
        self._barrier.describe(describe(Operation.ALL_REDUCE, vector))
        if vector.nbytes * len(self._members) <= _SMALL_BYTES:
            self._sum_whole(vector)
        else:
            self._sum_slices(vector)

    def reduce_scatter(self, vector: Tensor) -> Tensor:
        """Adds up, in place, this member's slice of a vector of shape `(n,)`, and gives the slice.

        Slices are those of `torch.tensor_split`; the others are left as they are.
        """
        self._barrier.describe(describe(Operation.REDUCE_SCATTER, vector))
        slices = torch.tensor_split(vector, len(self._members))
        room = self._room(vector.dtype) // len(self._members)
        for turn in range(max(1, -(-slices[0].numel() // room))):
            window = slice(turn * room, (turn + 1) * room)
            handed_in = self._next_half(vector.dtype)[self._member]
            for member, part in enumerate(slices):
                self._place(handed_in, member * room, part[window])
            self._cross(first=turn == 0)
            mine = slices[self._member][window]
            start = self._member * room
            parts = [slot[start : start + mine.numel()] for slot in self._last_half(vector.dtype)[:-1]]
            _add_up(parts, mine)
        return slices[self._member]

    def all_gather(self, vector: Tensor) -> None:
        """Overwrites every slice of a vector of shape `(n,)` with its member's; slices as in `reduce_scatter`."""
        self._barrier.describe(describe(Operation.ALL_GATHER, vector))
        slices = torch.tensor_split(vector, len(self._members))
        room = self._room(vector.dtype)
        for turn in range(max(1, -(-slices[0].numel() // room))):
            window = slice(turn * room, (turn + 1) * room)
            self._place(self._next_half(vector.dtype)[self._member], 0, slices[self._member][window])
            self._cross(first=turn == 0)
            for member, slot in enumerate(self._last_half(vector.dtype)[:-1]):
                if member != self._member:
                    part = slices[member][window]
                    part.copy_(slot[: part.numel()])

    def broadcast(self, vector: Tensor, root: int) -> None:
        """Overwrites a vector of shape `(n,)` with the one of member `root`."""
        self._barrier.describe(describe(Operation.BROADCAST, vector, root))
        raw = vector.view(torch.uint8)
        room = self._arena.layout.slot_bytes * self._arena.layout.members
        for turn, part in enumerate(raw.split(room)):
            if self._member == root:
                self._place(self._arena.whole((self._barrier.crossed + 1) % 2), 0, part)
            self._cross(first=turn == 0)
            if self._member != root:
                part.copy_(self._arena.whole(self._barrier.crossed % 2)[: part.numel()])

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self._barrier.describe(describe(Operation.BARRIER, _NOTHING))
        self._cross(first=True)

    def _sum_whole(self, vector: Tensor) -> None:
        halves = self._places_of(vector).halves
        halves[(self._barrier.crossed + 1) % 2][self._member].copy_(vector)
        self._cross(first=True)
        _add_up(halves[self._barrier.crossed % 2], vector)

    def _sum_slices(self, vector: Tensor) -> None:
        chunks = vector.split(self._room(vector.dtype))
        self._hand_in(chunks[0])
        self._cross(first=True)
        for chunk, following in zip_longest(chunks, chunks[1:]):
            self._add_up_own(chunk)
            if following is not None:
                self._hand_in(following)
            self._barrier.cross()
            self._collect(chunk)

    def _hand_in(self, chunk: Tensor) -> None:
        slot = self._next_half(chunk.dtype)[self._member]
        start, stop = self._own(chunk)
        self._place(slot, 0, chunk[:start])
        self._place(slot, stop, chunk[stop:])

    def _add_up_own(self, chunk: Tensor) -> None:
        start, stop = self._own(chunk)
        mine = chunk[start:stop]
        parts = [slot[start:stop] for slot in self._last_half(chunk.dtype)[:-1]]
        parts[self._member] = mine
        total = self._next_half(chunk.dtype)[-1][start:stop]
        _add_up(parts, total)
        mine.copy_(total)

    def _collect(self, chunk: Tensor) -> None:
        sums = self._last_half(chunk.dtype)[-1]
        start, stop = self._own(chunk)
        if start:
            chunk[:start].copy_(sums[:start])
        if stop < chunk.numel():
            chunk[stop:].copy_(sums[stop : chunk.numel()])

    def _own(self, chunk: Tensor) -> tuple[int, int]:
        count, size = chunk.numel(), len(self._members)
        return count * self._member // size, count * (self._member + 1) // size

    @staticmethod
    def _place(slot: Tensor, start: int, part: Tensor) -> None:
        if part.numel():
            slot[start : start + part.numel()].copy_(part)

    def _places_of(self, vector: Tensor) -> _Places:
        key = vector.dtype, vector.numel()
        if key not in self._places:
            if len(self._places) == _MOST_PLACES:
                self._places.clear()
            first, second = (
                [slot[: vector.numel()] for slot in self._arena.slots(half, vector.dtype)[:-1]]
                for half in (0, 1)
            )
            self._places[key] = _Places((first, second))
        return self._places[key]

    def _room(self, dtype: torch.dtype) -> int:
        return self._arena.layout.slot_bytes // dtype.itemsize

    def _next_half(self, dtype: torch.dtype) -> list[Tensor]:
        return self._arena.slots((self._barrier.crossed + 1) % 2, dtype)

    def _last_half(self, dtype: torch.dtype) -> list[Tensor]:
        return self._arena.slots(self._barrier.crossed % 2, dtype)

    def _cross(self, *, first: bool) -> None:
        self._barrier.cross()
        if first:
            check_agreement(self._barrier.descriptions(), self._members)


def _add_up(parts: list[Tensor], total: Tensor) -> None:
    """Writes the sum of at least two parts, in their order; `total` may be the first or the second, no other."""
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
