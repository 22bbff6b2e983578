"""Memory of one rank that ranks of its host read where it lies.

A link copies each message into a slot, so that the sender may continue. A vector in a segment of this memory
is lent instead: the receiver maps the segment, and its owner does not change it before it is returned.

    owner                                                        receiver
    vector, in a segment ── number, place, descriptor if new ──▶ a tensor in the segment itself
    lends(vector)? ◀──────────── number, back on the socket ─────┘ when nothing holds that tensor any more
      no: change it         yes: continue with another segment

A segment is a file without a name, as slots are: allocated before it is used, and sealed against shrinking.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from polyrhythm.communication.communicator import LentMemory

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0
_UNIT_BYTES = 1 << 16
_MOST_SEGMENTS = 16
_MOST_BYTES = 1 << 30
"""Limit of all segments of a rank. Larger vectors are in ordinary memory, and are copied when they are sent."""


def shared_file(size: int) -> int:
    """Make a file of memory that has no name, all of it allocated, and return its descriptor.

    Raises:
        OSError: there is no such thing here, or no memory.
    """
    if not _SEALS or not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory files (memfd)")
    descriptor = os.memfd_create("polyrhythm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)  # else the first access to a page could end the process
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class LendingLink(Protocol):
    """A link on which segments are lent."""

    def lends(self, segment: Segment) -> bool:
        """Return whether its receiver still reads a segment, after a look at what it has given back."""


class Segment:
    """One file, mapped into its owner.

    Args:
        size: size in bytes.

    Attributes:
        memory: memory where it is mapped.
        address: address of its first byte.
        descriptor: file descriptor of the file.
        dropped: whether it will not be used again, so that receivers need not keep it.

    Raises:
        OSError: there is no memory.
    """

    def __init__(self, size: int) -> None:
        self.descriptor = shared_file(size)
        try:
            self.memory = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            os.close(self.descriptor)
            raise
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.dropped = False
        self._ways: tuple[weakref.ref[LendingLink], ...] = ()
        self._noting = threading.Lock()
        self._held: weakref.ref[memoryview] | None = None  # dead when no vector in it is referenced

    def vector(self, like: Tensor) -> Tensor:
        """Return a vector of the size and dtype of `like`, with what is there."""
        view = memoryview(self.memory)[: like.nbytes]  # the tensor's storage holds it, and no one else does
        self._held = weakref.ref(view)
        return torch.frombuffer(view, dtype=like.dtype)

    def note(self, way: LendingLink) -> None:
        """Take note that it is about to be lent on a link."""
        if not any(known() is way for known in self._ways):
            with self._noting:
                others = (known for known in self._ways if known() is not None)
                self._ways = (*others, weakref.ref(way))

    @property
    def is_lent(self) -> bool:
        """Whether a receiver still reads it."""
        ways = [known() for known in self._ways]
        return any(way is not None and way.lends(self) for way in ways)

    @property
    def is_free(self) -> bool:
        """Whether no vector in it is referenced, here or elsewhere."""
        return (self._held is None or self._held() is None) and not self.is_lent

    def drop(self) -> None:
        """Close the file; its memory stays as long as a process uses it."""
        self.dropped = True
        os.close(self.descriptor)


class LentSegments(LentMemory):
    """All segments of one rank. Vectors are made by one thread at a time; others may send in the meantime."""

    def __init__(self) -> None:
        self._segments: tuple[Segment, ...] = ()  # replaced as a whole: senders look without a lock
        self._making = threading.Lock()
        self._refused = False

    def vector(self, like: Tensor) -> Tensor:
        with self._making:
            segment = self._segment(like.nbytes) if like.nbytes and not like.is_cuda else None
            return torch.empty_like(like) if segment is None else segment.vector(like)

    def lends(self, tensor: Tensor) -> bool:
        found = self.find(tensor)
        return found is not None and found[0].is_lent

    def find(self, tensor: Tensor) -> tuple[Segment, int] | None:
        """Return the segment that a contiguous tensor lies in, and its place there in bytes; None: elsewhere."""
        address, size = tensor.data_ptr(), tensor.nbytes
        for segment in self._segments:
            start = address - segment.address
            if start >= 0 and start + size <= len(segment.memory):
                return segment, start
        return None

    def close(self) -> None:
        """Close all files; vectors that are still used stay."""
        with self._making:
            segments, self._segments = self._segments, ()
            for segment in segments:
                segment.drop()

    def _segment(self, size: int) -> Segment | None:
        """Return an unused segment, made if need be; None if there is no memory for it."""
        size = -(-size // _UNIT_BYTES) * _UNIT_BYTES  # shards with sizes that differ by a number take turns
        free = [segment for segment in self._segments if segment.is_free]
        for segment in free:
            if size <= len(segment.memory) < 2 * size:
                return segment
        kept = list(self._segments)
        while free and not _has_room(kept, size):
            free[-1].drop()
            kept.remove(free.pop())
        self._segments = tuple(kept)
        if self._refused or not _has_room(kept, size):
            return None
        try:
            made = Segment(size)
        except OSError:
            self._refused = True
            return None
        self._segments = (*kept, made)
        return made


def _has_room(segments: Sequence[Segment], size: int) -> bool:
    total = sum(len(segment.memory) for segment in segments)
    return len(segments) < _MOST_SEGMENTS and total + size <= _MOST_BYTES
