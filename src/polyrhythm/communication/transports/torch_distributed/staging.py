"""Host memory through which tensors of a GPU leave it.

    GPU, computing   ──▓ gradients ──────▓ next step …       what comes after the gradients does not wait for the copy
    GPU, own stream        └▓ copy ▓┐
    host                            └▶ pinned buffer ─▶ link ─▶ server

A copy to pinned memory goes at the speed of the bus, beside the computation; one to ordinary memory goes through a
small pinned buffer of the driver's, in the stream that computes. Pinning takes long, so buffers are used again, once
what was in them has left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle

Copy = Callable[[Tensor, Tensor], None]
"""Copies a tensor of a device, (n,), into one of the host; returns when it is there."""


class OwnStreamCopy:
    """Copies beside whatever the GPU computes; see `Copy`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)

    def __call__(self, source: Tensor, target: Tensor) -> None:
        """Copies what the stream that computes will have made of the source when it has done what it was told."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()


@dataclass
class _Buffer:
    """Some bytes, and what must be over before they are used again."""

    memory: Tensor
    leaving: Handle | None = None
    taken: bool = True

    @property
    def free(self) -> bool:
        return not self.taken and (self.leaving is None or self.leaving.done())


class Staging:
    """Buffers that are made when they are needed.

    Args:
        copy: from the device.
        pinned: whether buffers are page-locked; only where there is a GPU.
    """

    def __init__(self, copy: Copy, *, pinned: bool) -> None:
        self._copy = copy
        self._pinned = pinned
        self._buffers: list[_Buffer] = []
        self._lock = threading.Lock()

    @classmethod
    def of(cls, device: torch.device) -> Staging:
        """Makes that of a GPU."""
        return cls(OwnStreamCopy(device), pinned=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def send(self, tensor: Tensor, start: Callable[[Tensor], Handle]) -> Handle:
        """Copies a contiguous tensor and starts to send the copy; the tensor may change when this returns.

        Args:
            tensor: on the device.
            start: starts to send a tensor of the host, which it needs until its handle is done.
        """
        buffer = self._take(tensor.nbytes)
        try:
            staged = buffer.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._copy(tensor, staged)
            buffer.leaving = start(staged)
        finally:
            buffer.taken = False
        return buffer.leaving

    def _take(self, nbytes: int) -> _Buffer:
        with self._lock:
            fitting = [each for each in self._buffers if each.free and each.memory.nbytes >= nbytes]
            if fitting:
                found = min(fitting, key=lambda each: each.memory.nbytes)
                found.taken, found.leaving = True, None
                return found
            made = _Buffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))
            self._buffers = [each for each in self._buffers if not each.free]  # they were too small
            self._buffers.append(made)
            return made
