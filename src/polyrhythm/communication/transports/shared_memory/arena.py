"""The memory that the members of one communicator share: who is where, and what they add up.

    control   one line a member: its number of crossed barriers, two descriptions, its state
    half 0    slot of member 0 | slot of member 1 | … | sums
    half 1    the same

What a barrier publishes lies in one half, what the next one publishes in the other. So a member may write
what the next barrier will publish while others still read what the last one did.

The memory is a file without a name (memfd): nothing is left behind, however its users end, and it is not
bounded by the size of /dev/shm. All of its pages are allocated before the first access, which could otherwise
end the process. Where the parts of a vector lie in it (`Places`) is looked up often, so it is made once for
each size and dtype.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

LINE_WORDS = 16
"""Words of 8 bytes in a member's line: two cache lines, because processors fetch them in pairs."""

_PAGE_BYTES = 4096
_TOKEN_BYTES = 16
_CONTROL_START = 128
_LARGEST_SLOT_BYTES = 1 << 20
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Layout:
    """Where things are in the memory of so many members.

    Attributes:
        members: how many there are.
    """

    members: int

    @property
    def slot_bytes(self) -> int:
        """Of one member's slot in one half: less where there are many, so that caches hold all."""
        fair = _MOST_BYTES // (2 * (self.members + 1))
        return max(_PAGE_BYTES, min(_LARGEST_SLOT_BYTES, fair // _PAGE_BYTES * _PAGE_BYTES))

    @property
    def half_bytes(self) -> int:
        """Of all slots and the sums of one half."""
        return self.slot_bytes * (self.members + 1)

    @property
    def control_bytes(self) -> int:
        """Of the token and the members' lines, up to the first slot."""
        needed = _CONTROL_START + self.members * LINE_WORDS * 8
        return -(-needed // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def nbytes(self) -> int:
        """Of everything."""
        return self.control_bytes + 2 * self.half_bytes

    def start(self, half: int, slot: int) -> int:
        """Gives where a slot starts; slot `members` holds the sums."""
        return self.control_bytes + half * self.half_bytes + slot * self.slot_bytes


class Arena:
    """The shared memory, mapped into this process.

    Args:
        descriptor: of a file as large as the layout says; may be closed afterwards.
        layout: where things are.

    Attributes:
        layout: where things are.
        words: the members' lines, `LINE_WORDS` whole numbers of 8 bytes each.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self.layout = layout
        self._memory = mmap.mmap(descriptor, layout.nbytes)
        lines = memoryview(self._memory)[_CONTROL_START : layout.control_bytes]
        self.words = lines[: layout.members * LINE_WORDS * 8].cast("q")
        self._slots: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    @property
    def token(self) -> str:
        """A random text that no other memory has."""
        return self._memory[:_TOKEN_BYTES].hex()

    def mark(self) -> None:
        """Gives the memory its token; done once, by whoever made the file."""
        self._memory[:_TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)

    def slots(self, half: int, dtype: torch.dtype) -> list[Tensor]:
        """Gives the slots of a half and, last, its sums, as vectors of a dtype."""
        if dtype not in self._slots:
            self._slots[dtype] = self._cut(0, dtype), self._cut(1, dtype)
        return self._slots[dtype][half]

    def whole(self, half: int) -> Tensor:
        """Gives all slots of a half as one vector of bytes."""
        start, size = self.layout.start(half, 0), self.layout.slot_bytes * self.layout.members
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=size)

    def _cut(self, half: int, dtype: torch.dtype) -> list[Tensor]:
        count = self.layout.slot_bytes // dtype.itemsize
        return [
            torch.frombuffer(self._memory, dtype=dtype, offset=self.layout.start(half, slot), count=count)
            for slot in range(self.layout.members + 1)
        ]


def memory_file(nbytes: int) -> int:
    """Makes a file of memory without a name, all of it allocated, and gives its descriptor.

    Raises:
        OSError: the system has no such files, or too little memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files of memory (memfd)")
    descriptor = os.memfd_create("polyrhythm", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


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
