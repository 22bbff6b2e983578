"""One all-reduce or broadcast, seen by one member: which bytes go where, and when. No network, no threads.

Wu, Yan, Shan, Dang, Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv 1501.02876, section 3.1.

    slice k of every vector  ─ PART ─▶ member k:  s_k = x_0[k] + x_1[k] + … + x_N-1[k]  ─ SUM ─▶ all

A slice travels in runs, and a run is added up, in the order of members, and handed on as soon as all of its
parts are there: so both directions of every link are busy from the beginning to the end. A small vector is
one slice that everyone adds up for itself, which takes one latency instead of two. However it is cut, the
bits of the sums are the same, those of `collectives/direct`. A broadcast is the same with the root's parts
alone.

Parts may arrive before this member has begun, since others may be ahead. Connections between two members
carry frames: a header of 32 bytes, and a run of a vector's bytes.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

import torch
from torch import Tensor

from polyrhythm.cost.all_reduce import travels_whole
from polyrhythm.errors import RunError

_HEADER = struct.Struct("<IBBxxIIQQ")  # number, phase, bytes of an element, kind, bytes, total bytes, offset
HEADER_BYTES = _HEADER.size


class Phase(enum.IntEnum):
    """Why a frame travels."""

    PART = 1  # one member's, to be added up by the receiver
    SUM = 2  # over all members


@dataclass(frozen=True, slots=True)
class Shape:
    """Facts that all members must agree on.

    Attributes:
        total_bytes: bytes of the whole vector.
        element_bytes: bytes of one number.
        kind: code of the dtype.
    """

    total_bytes: int
    element_bytes: int
    kind: int


def shape_of(vector: Tensor) -> Shape:
    """Describe a vector."""
    return Shape(vector.nbytes, vector.element_size(), crc32(str(vector.dtype).encode()))


@dataclass(frozen=True, slots=True)
class Frame:
    """A header.

    Attributes:
        number: number of the collective, counted by all members alike.
        phase: why it travels.
        shape: shape of the vector.
        offset: bytes from the beginning of the slice that it is a run of.
        nbytes: number of bytes that follow.
    """

    number: int
    phase: Phase
    shape: Shape
    offset: int
    nbytes: int

    def encode(self) -> bytes:
        """Return `HEADER_BYTES` bytes."""
        shape = self.shape
        return _HEADER.pack(
            self.number,
            self.phase,
            shape.element_bytes,
            shape.kind,
            self.nbytes,
            shape.total_bytes,
            self.offset,
        )

    @classmethod
    def decode(cls, content: bytes | bytearray | memoryview) -> Frame:
        """Read a header; raise `RunError` if it is none."""
        number, phase, element_bytes, kind, nbytes, total_bytes, offset = _HEADER.unpack(content)
        if (
            phase not in (Phase.PART, Phase.SUM)
            or not 0 < nbytes <= total_bytes
            or element_bytes not in (1, 2, 4, 8, 16)
        ):
            raise RunError("a member of a collective sent what is no part of one")
        return cls(number, Phase(phase), Shape(total_bytes, element_bytes, kind), offset, nbytes)


RUNS = 8
LEAST_RUN_BYTES, MOST_RUN_BYTES = 32 << 10, 512 << 10
"""Runs of a slice, unless they would be too small for the work of a frame, or too large for caches."""

_ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A frame to send.

    Attributes:
        to: a member.
        addition: addition that it belongs to.
        header: encoded.
        payload: bytes that must not change until they have left.
    """

    to: int
    addition: Addition
    header: bytes
    payload: memoryview


class Addition:
    """One member's side of a collective.

    Args:
        size: number of members.
        number: number of the collective.

    Attributes:
        number: the argument of that name.
        unsent: frames that have not left yet.
    """

    def __init__(self, member: int, size: int, number: int, shape: Shape) -> None:
        self.number = number
        self.unsent = 0
        self._member, self._size, self._shape = member, size, shape
        self._whole = travels_whole(shape.total_bytes, size)
        self._cuts = _cuts(shape, 1 if self._whole else size)
        self._start, self._stop = (0, shape.total_bytes) if self._whole else self._cuts[member]
        self._run = _run_bytes(shape.total_bytes // size)
        self._rows: dict[int, Tensor] = {}
        self._arrived: dict[
            int, set[int]
        ] = {}  # offset of a run of this member -> members with arrived parts
        self._early_sums: dict[int, bytearray] = {}  # in a broadcast, by their offset
        self._arrived_early: list[int] = []  # those of them that are there
        self._contributors: tuple[int, ...] = ()
        self._vector: Tensor | None = None
        self._bytes: memoryview | None = None
        self._sums_awaited = [
            0 if self._whole or other == member else self._length(other) for other in range(size)
        ]
        self._runs_to_sum = len(self._offsets())

    @property
    def begun(self) -> bool:
        """Whether this member takes part already."""
        return self._vector is not None

    @property
    def small(self) -> bool:
        """Whether others wait for no more of this member than the frames that it sends at once."""
        return self._whole

    @property
    def done(self) -> bool:
        """Whether the vector is whole, and may be changed."""
        return self.begun and not (self._runs_to_sum or self.unsent or any(self._sums_awaited))

    def needs(self, member: int) -> bool:
        """Return whether something has yet to arrive from a member."""
        if not self.begun or self._sums_awaited[member]:
            return True
        return member in self._contributors and any(
            member not in self._arrived.get(offset, ()) for offset in self._offsets()
        )

    def begin(self, vector: Tensor, contributors: Sequence[int]) -> list[Outgoing]:
        """Take part.

        Args:
            vector: `(n,)`, contiguous; changed in place.
            contributors: members with vectors to be added up; all, or the root alone.

        Returns:
            Frames to be sent.

        Raises:
            RunError: another member's vector has another size or dtype.
        """
        if shape_of(vector) != self._shape:
            raise RunError(_disagreement(self._shape, shape_of(vector)))
        self._vector, self._contributors = vector, tuple(contributors)
        self._bytes = vector.view(torch.uint8).numpy().data
        if self._contributors == (self._member,):
            self._sums_awaited = [0] * self._size
        for start in self._arrived_early:
            self._take_early_sum(start)
        frames = list(self._parts()) if self._member in contributors else []
        for offset in self._offsets():
            frames += self._sum_if_arrived(offset)
        self.unsent += len(frames)
        return frames

    def target(self, source: int, frame: Frame) -> memoryview:
        """Return where the bytes of a frame belong.

        Raises:
            RunError: nowhere, or the sender's vector has another size or dtype.
        """
        # Checked before a byte of it is received: the bytes go straight to their place.
        if frame.shape != self._shape:
            raise RunError(_disagreement(frame.shape, self._shape))
        start, stop = (
            self._cuts[source] if frame.phase is Phase.SUM and not self._whole else (self._start, self._stop)
        )
        expected = min(self._run, stop - start - frame.offset)
        if frame.offset % self._run or frame.nbytes != expected or (self._whole and frame.phase is Phase.SUM):
            raise RunError("a member of a collective sent what is no part of it")
        if frame.phase is Phase.SUM:
            start += frame.offset
            if self._bytes is None:  # in a broadcast, this member contributes nothing
                kept = self._early_sums[start] = bytearray(frame.nbytes)
                return memoryview(kept)
            return self._bytes[start : start + frame.nbytes]
        if source not in self._rows:
            self._rows[source] = torch.empty(stop - start, dtype=torch.uint8)
        return self._rows[source].numpy().data[frame.offset : frame.offset + frame.nbytes]

    def _take_early_sum(self, start: int) -> None:
        assert self._bytes is not None
        kept = self._early_sums.pop(start)
        self._bytes[start : start + len(kept)] = kept

    def arrived(self, source: int, frame: Frame) -> list[Outgoing]:
        """Note that a frame's bytes are where they belong; return what is to be sent then."""
        if frame.phase is Phase.SUM:
            self._sums_awaited[source] -= frame.nbytes
            start = self._cuts[source][0] + frame.offset
            if start in self._early_sums:
                if self.begun:
                    self._take_early_sum(start)
                else:
                    self._arrived_early.append(start)
            return []
        self._arrived.setdefault(frame.offset, set()).add(source)
        frames = list(self._sum_if_arrived(frame.offset)) if self.begun else []
        self.unsent += len(frames)
        return frames

    def _length(self, member: int) -> int:
        start, stop = self._cuts[member]
        return stop - start

    def _offsets(self) -> range:
        return range(0, self._stop - self._start, self._run)

    def _others(self) -> Iterator[int]:
        """Return the other members, the next one first: so not all begin with the same."""
        for distance in range(1, self._size):
            yield (self._member + distance) % self._size

    def _parts(self) -> Iterator[Outgoing]:
        """Return this member's part of every other member's slice."""
        assert self._bytes is not None
        # A whole vector is added up in place while it may still be leaving.
        source = memoryview(bytes(self._bytes)) if self._whole else self._bytes
        for to in self._others():
            start, stop = (self._start, self._stop) if self._whole else self._cuts[to]
            yield from self._frames(to, Phase.PART, source[start:stop])

    def _frames(self, to: int, phase: Phase, content: memoryview, first: int = 0) -> Iterator[Outgoing]:
        for offset in range(0, len(content), self._run):
            nbytes = min(self._run, len(content) - offset)
            header = Frame(self.number, phase, self._shape, first + offset, nbytes).encode()
            yield Outgoing(to, self, header, content[offset : offset + nbytes])

    def _sum_if_arrived(self, offset: int) -> Iterator[Outgoing]:
        parts = self._arrived.get(offset, set())
        if any(member != self._member and member not in parts for member in self._contributors):
            return
        assert self._bytes is not None
        start = self._start + offset
        stop = min(start + self._run, self._stop)
        self._add_up(start, stop)
        self._runs_to_sum -= 1
        # The others' parts take as much memory as the slice times the members; sums may still have to travel.
        if not self._runs_to_sum:
            self._rows = {}
        if not self._whole:
            for to in self._others():
                if self._contributors != (to,):  # the root of a broadcast has the sum
                    yield from self._frames(to, Phase.SUM, self._bytes[start:stop], offset)

    def _add_up(self, start: int, stop: int) -> None:
        """Add up a run in the order of members, into the vector."""
        assert self._vector is not None
        size = self._shape.element_bytes
        own = self._vector[start // size : stop // size]
        rows = {
            member: row[start - self._start : stop - self._start].view(own.dtype)
            for member, row in self._rows.items()
        }
        parts = [own if member == self._member else rows[member] for member in self._contributors]
        if len(parts) == 1:
            if parts[0] is not own:
                own.copy_(parts[0])
            return
        # The sum grows in the memory of the first part and reaches the vector with the last addition: this member's
        # own part may stand in the middle, and must not change before its turn.
        for part in parts[1:-1]:
            torch.add(parts[0], part, out=parts[0])
        torch.add(parts[0], parts[-1], out=own)


def _cuts(shape: Shape, slices: int) -> list[tuple[int, int]]:
    """Cut a vector into slices of whole elements, as `torch.tensor_split` does; return first bytes and end."""
    shorter, longer = divmod(shape.total_bytes // shape.element_bytes, slices)
    starts = [(shorter * number + min(number, longer)) * shape.element_bytes for number in range(slices + 1)]
    return list(pairwise(starts))


def _run_bytes(slice_bytes: int) -> int:
    wanted = min(MOST_RUN_BYTES, max(LEAST_RUN_BYTES, slice_bytes // RUNS))
    return -(-wanted // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _disagreement(theirs: Shape, ours: Shape) -> str:
    return (
        f"a member of a collective adds up {theirs.total_bytes // theirs.element_bytes} numbers of "
        f"{theirs.element_bytes} bytes where another has {ours.total_bytes // ours.element_bytes} of "
        f"{ours.element_bytes}: all must give tensors of one size and dtype"
    )
