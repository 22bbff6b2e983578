"""Collectives through shared memory, for contiguous vectors of the CPU; one at a time.

Wu, Yan, Shan, Dang, Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv 1501.02876, section 3.1, for
the direct reduce-scatter and all-gather, here with loads and stores in place of messages.

    sum[s] = (..((x_0[s] + x_1[s]) + x_2[s]) + ..) + x_{N-1}[s]   slice s of every chunk, added up by member s

Sums go in the order of ranks, element by element, so they are the same bits as those of `collectives/direct.py`,
however the vector is cut. The memory of one communicator (`SharedBuffer`):

    control   one line a member: its number of crossed barriers, two descriptions, its state
    half 0    slot of member 0 | slot of member 1 | … | sums
    half 1    the same

What a barrier publishes lies in one half, what the next one publishes in the other. So a member may write what
the next barrier will publish while others still read what the last one did. A vector larger than a slot goes in
chunks, and one barrier a chunk is enough:

    barrier b publishes   my part of chunk c (all but my slice)        and my sum of my slice of chunk c-1
    then                  take the others' sums of chunk c-1; add up my slice of chunk c; hand in chunk c+1

A small vector is added up as a whole by everyone, which costs one barrier and no second copy. One that lies
where all members see it is added up where it lies, between two barriers, and not copied at all:

    row 0   [ vector of member 0 …… ]        member s adds slice s of all rows up, in the order of members,
    row 1   [ vector of member 1 …… ]        and writes the sum into slice s of every row

Each member describes what it is about to do as one whole number, so that all can see whether they agree.

The memory is a file without a name (memfd): nothing remains of it, however its users end, and it is not
bounded by the size of /dev/shm. All of its pages are allocated before the first access, which could otherwise
end the process. The parts of a vector in it (`Places`) are looked up often, so they are made once for each
size and dtype.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from polyrhythm.communication.transports.shared_memory.barrier import LINE_WORDS, Barrier
from polyrhythm.errors import RequestError

_PAGE_BYTES = 4096
_TOKEN_BYTES = 16
_CONTROL_START = 128
_LARGEST_SLOT_BYTES = 1 << 20
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Layout:
    """Offsets in the memory of `members` members."""

    members: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one member's slot in one half: fewer where there are many, so that caches hold all."""
        fair = _MOST_BYTES // (2 * (self.members + 1))
        return max(_PAGE_BYTES, min(_LARGEST_SLOT_BYTES, fair // _PAGE_BYTES * _PAGE_BYTES))

    @property
    def half_bytes(self) -> int:
        """Bytes of all slots and the sums of one half."""
        return self.slot_bytes * (self.members + 1)

    @property
    def control_bytes(self) -> int:
        """Bytes of the token and the members' lines, up to the first slot."""
        needed = _CONTROL_START + self.members * LINE_WORDS * 8
        return -(-needed // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return self.control_bytes + 2 * self.half_bytes

    def start(self, half: int, slot: int) -> int:
        """Return where a slot starts; slot `members` holds the sums."""
        return self.control_bytes + half * self.half_bytes + slot * self.slot_bytes


class SharedBuffer:
    """The shared memory, mapped into this process.

    Args:
        descriptor: file descriptor of a file of the layout's size; may be closed afterwards.

    Attributes:
        layout: offsets in the memory.
        words: the members' lines, `LINE_WORDS` whole numbers of 8 bytes each.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self.layout = layout
        self._memory = mmap.mmap(descriptor, layout.nbytes)
        lines = memoryview(self._memory)[_CONTROL_START : layout.control_bytes]
        self.words = lines[: layout.members * LINE_WORDS * 8].cast("q")

    @property
    def token(self) -> str:
        """A random text that no other memory has."""
        return self._memory[:_TOKEN_BYTES].hex()

    def mark(self) -> None:
        """Give the memory its token; called once, by the process that made the file."""
        self._memory[:_TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)

    def slot(self, half: int, slot: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return the first `count` elements of a slot of a half as a vector; slot `members` holds the sums."""
        start = self.layout.start(half, slot)
        found = torch.frombuffer(self._memory, dtype=dtype, offset=start, count=max(1, count))
        return found if count else found[:0]

    def whole(self, half: int) -> Tensor:
        """Return all slots of a half as one vector of bytes."""
        start, size = self.layout.start(half, 0), self.layout.slot_bytes * self.layout.members
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=size)


def memory_file(nbytes: int) -> int:
    """Make a file of memory without a name, all of it allocated, and return its descriptor.

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
_LEAST_SLICE = 1024
"""Least elements of a slice: the call that adds fewer takes longer than the adding."""


@dataclass(frozen=True)
class HalfPlaces:
    """The places in one half, for a vector that fits into a slot and is cut into one slice a member.

    Attributes:
        slot: function that returns the place of a member's whole vector, or that of the sums after the last member.
        members: number of members.
        mine: place of each member's part of this member's slice; empty where it has none.
        handing_in: places for this member's parts before and behind its own slice.
        total: place for the sum of this member's slice.
        totals: sums of the others' slices, before and behind it.
        description: description of its all-reduce.
    """

    slot: Callable[[int], Tensor]
    members: int
    mine: list[Tensor]
    handing_in: tuple[Tensor, Tensor]
    total: Tensor
    totals: tuple[Tensor, Tensor]
    description: int

    @cached_property
    def whole(self) -> list[Tensor]:
        """Place of each member's whole vector."""
        return [self.slot(member) for member in range(self.members)]


class Places:
    """The places of vectors of all sizes, as one member sees them."""

    def __init__(self, arena: SharedBuffer, member: int) -> None:
        self._arena = arena
        self._member = member
        self._known: dict[tuple[torch.dtype, int], tuple[HalfPlaces, HalfPlaces]] = {}

    def of(self, dtype: torch.dtype, count: int) -> tuple[HalfPlaces, HalfPlaces]:
        """Return the places of a vector of `count` elements, in each half."""
        known = self._known.get((dtype, count))
        if known is None:
            if len(self._known) == _MOST_SIZES:
                self._known.clear()
            known = self._known[dtype, count] = self._half(0, dtype, count), self._half(1, dtype, count)
        return known

    def cut(self, count: int) -> tuple[int, int, int]:
        """Return the lengths of what lies before this member's slice, of the slice, and of what lies behind it.

        Of many members only the last ones have a slice, so that each is worth the calls that add it up.
        """
        members = self._arena.layout.members
        adders = min(members, max(1, count // _LEAST_SLICE))
        place = self._member - (members - adders)
        start, stop = max(0, count * place // adders), max(0, count * (place + 1) // adders)
        return start, stop - start, count - stop

    def _half(self, half: int, dtype: torch.dtype, count: int) -> HalfPlaces:
        start, length, _ = self.cut(count)
        stop = start + length
        arena, members = self._arena, self._arena.layout.members

        def slot(number: int) -> Tensor:
            return arena.slot(half, number, dtype, count)

        own, sums = slot(self._member), slot(members)
        return HalfPlaces(
            slot,
            members,
            [slot(member)[start:stop] for member in range(members)] if length else [],
            (own[:start], own[stop:]),
            sums[start:stop],
            (sums[:start], sums[stop:]),
            describe(Operation.ALL_REDUCE, own),
        )


_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_DTYPE_BITS, _ROOT_BITS, _COUNT_BITS = 5, 12, 40
_OTHER = (1 << _DTYPE_BITS) - 1


class Operation(IntEnum):
    """Code of a collective."""

    ALL_REDUCE = 1
    BROADCAST = 2
    BARRIER = 3
    ALL_REDUCE_IN_PLACE = 4


def describe(operation: Operation, tensor: Tensor, root: int = 0) -> int:
    """Return the number of a collective: operation, root, dtype and count of elements."""
    dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else _OTHER
    return ((operation << _ROOT_BITS | root) << _DTYPE_BITS | dtype) << _COUNT_BITS | tensor.numel()


def check_agreement(descriptions: Sequence[int], members: Sequence[int]) -> None:
    """Compare what the members are about to do.

    Raises:
        RequestError: two of them differ; all members find the same two.
    """
    first = descriptions[0]
    for rank, description in zip(members, descriptions, strict=True):
        if description != first:
            raise RequestError(
                f"rank {members[0]} called {_call_text(first)}, rank {rank} {_call_text(description)}: call the same "
                "collective with the same dtype and size on all ranks"
            )


def _call_text(description: int) -> str:
    count = description & ((1 << _COUNT_BITS) - 1)
    dtype = description >> _COUNT_BITS & _OTHER
    root = description >> (_COUNT_BITS + _DTYPE_BITS) & ((1 << _ROOT_BITS) - 1)
    operation = Operation(description >> (_COUNT_BITS + _DTYPE_BITS + _ROOT_BITS))
    if operation is Operation.BARRIER:
        return "barrier"
    name = "another dtype" if dtype == _OTHER else str(_DTYPES[dtype]).removeprefix("torch.")
    source = f" from {root}" if operation is Operation.BROADCAST else ""
    return f"{operation.name.lower()}{source} with {count} elements of {name}"


_ALIGNED_BYTES = 4096
_MOST_PLACES = 256


def rows_memory_like(members: int, like: Tensor) -> Tensor:
    """Return a tensor, without memory, of the size and dtype that the vectors of all members need together.

    Args:
        members: number of members.
        like: tensor of the size and dtype of each vector.
    """
    return torch.empty(members * _row_stride(like), dtype=like.dtype, device="meta")


def rows_of(memory: Tensor, members: int, like: Tensor) -> list[Tensor]:
    """Return all members' vectors in a memory like `rows_memory_like`."""
    return list(memory.view(members, _row_stride(like))[:, : like.numel()])


def _row_stride(like: Tensor) -> int:
    # Each begins with a page: no two members write to the same one.
    aligned = _ALIGNED_BYTES // like.element_size()
    return -(-like.numel() // aligned) * aligned


class InPlace:
    """The vectors that a member can add up in place; looks up the others' parts of what is given to it."""

    def __init__(self, member: int) -> None:
        self._member = member
        self._rows: list[list[Tensor]] = []
        self._known: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, rows: Sequence[Tensor]) -> Tensor:
        """Register the vectors of all members; return this one's."""
        self._rows.append(list(rows))
        return rows[self._member]

    def parts(self, vector: Tensor) -> list[Tensor] | None:
        """Return all members' values at the place of a slice of this one's vector; None if it is no such slice."""
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


_SMALL_BYTES = 2 << 20
"""Size of all members' vectors together up to which it is faster for every member to add all up itself."""

_PIECE_BYTES = 1 << 19
"""Piece of each member's vector that is added up and written back while it is in the caches. Less takes more calls."""

_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a member's vector: its own slice, what lies before and behind, and the places of all in the arena."""

    before: Tensor
    own: Tensor
    behind: Tensor
    halves: tuple[HalfPlaces, HalfPlaces]


class Exchange:
    """One member's side.

    Args:
        arena: memory shared by all members.
        barrier: barrier of all members.
        member: index of this member.
        members: the ranks of all members, among all ranks of the run.

    Attributes:
        small_bytes: vectors up to this size are added up as a whole by everyone.
        in_place: vectors that all members see.

    Every operation raises `RequestError` on all members if they disagree about it, and `CollectiveBroken` if one of
    them is gone.
    """

    def __init__(self, arena: SharedBuffer, barrier: Barrier, member: int, members: tuple[int, ...]) -> None:
        self._arena = arena
        self._barrier = barrier
        self._member = member
        self._members = members
        self._places = Places(arena, member)
        self.small_bytes = min(arena.layout.slot_bytes, _SMALL_BYTES // len(members))
        self.in_place = InPlace(member)

    def all_reduce(self, vector: Tensor) -> None:
        """Add a vector of shape `(n,)` up over all members, in place."""
        # The way depends on the size and on what all members have registered alike. Members that call with different
        # vectors find out at the first barrier, by their descriptions.
        if vector.nbytes <= self.small_bytes:
            self._sum_whole(vector)
        elif (parts := self.in_place.parts(vector)) is not None:
            self._sum_in_place(vector, parts)
        else:
            self._sum_slices(vector)

    def broadcast(self, vector: Tensor, root: int) -> None:
        """Overwrite a vector of shape `(n,)` with the one of member `root`."""
        description = describe(Operation.BROADCAST, vector, root)
        raw = vector.view(torch.uint8)
        # Only the root writes, so it has the slots of all.
        room = self._arena.layout.slot_bytes * self._arena.layout.members
        for turn, part in enumerate(raw.split(room)):
            if self._member == root:
                self._arena.whole(self._next)[: part.numel()].copy_(part)
            if turn == 0:
                self._begin(description)
            else:
                self._barrier.cross()
            if self._member != root:
                part.copy_(self._arena.whole(self._last)[: part.numel()])

    def barrier(self) -> None:
        """Return when all members have called it."""
        self._begin(describe(Operation.BARRIER, _NOTHING))

    def _sum_whole(self, vector: Tensor) -> None:
        # In the half that the next barrier publishes: the others may still read the last one's.
        places = self._places.of(vector.dtype, vector.numel())[(self._barrier.crossed + 1) % 2]
        parts = places.whole
        parts[self._member].copy_(vector)
        self._begin(places.description)
        _add_up(parts, vector)

    def _sum_slices(self, vector: Tensor) -> None:
        chunks = [self._chunk(part) for part in vector.split(self._room(vector.dtype))]
        self._publish(chunks[0])
        self._begin(describe(Operation.ALL_REDUCE, vector))
        # One barrier a chunk: it publishes this chunk's sums in the one half and the next chunk's parts next to
        # them.
        for chunk, following in zip_longest(chunks, chunks[1:]):
            self._add_up_own(chunk)
            if following is not None:
                self._publish(following)
            self._barrier.cross()
            self._collect(chunk)

    def _sum_in_place(self, vector: Tensor, parts: list[Tensor]) -> None:
        self._begin(describe(Operation.ALL_REDUCE_IN_PLACE, vector))
        start, length, _ = self._places.cut(len(parts[0]))
        step = _PIECE_BYTES // parts[0].element_size()
        pieces = [part[start : start + length].split(step) for part in parts] if length else []
        for first, *others in zip(*pieces, strict=True):
            # A piece is read and written back while the caches hold it; the whole slice would go through memory
            # twice.
            _add_up([first, *others], first)
            for part in others:
                part.copy_(first)
        self._barrier.cross()

    def _chunk(self, part: Tensor) -> _Chunk:
        before, own, behind = part.split_with_sizes(self._places.cut(part.numel()))
        return _Chunk(before, own, behind, self._places.of(part.dtype, part.numel()))

    def _publish(self, chunk: _Chunk) -> None:
        before, behind = chunk.halves[self._next].handing_in
        before.copy_(chunk.before)
        behind.copy_(chunk.behind)

    def _add_up_own(self, chunk: _Chunk) -> None:
        parts = chunk.halves[self._last].mine.copy()
        if not parts:
            return
        # From where it lies: no other process reads this member's part of its own slice, so it has not been handed in.
        parts[self._member] = chunk.own
        total = chunk.halves[self._next].total
        _add_up(parts, total)
        chunk.own.copy_(total)

    def _collect(self, chunk: _Chunk) -> None:
        before, behind = chunk.halves[self._last].totals
        chunk.before.copy_(before)
        chunk.behind.copy_(behind)

    def _room(self, dtype: torch.dtype) -> int:
        return self._arena.layout.slot_bytes // dtype.itemsize

    @property
    def _next(self) -> int:
        return (self._barrier.crossed + 1) % 2

    @property
    def _last(self) -> int:
        return self._barrier.crossed % 2

    def _begin(self, description: int) -> None:
        """Cross the first barrier of a collective, and compare what the members are about to do."""
        self._barrier.cross(description)
        text = self._barrier.descriptions()
        if text.count(description) != len(text):
            check_agreement(text, self._members)


def _add_up(parts: list[Tensor], total: Tensor) -> None:
    """Write the sum of at least two parts, in their order; `total` may be the first or the second, no other."""
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
