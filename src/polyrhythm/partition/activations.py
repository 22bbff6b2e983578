"""Exchange of activations between workers that compute one network together, and how its parts are shared out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from polyrhythm.communication.collective import start_send
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.errors import RunError


def neurons(count: int, workers: int) -> list[slice]:
    """Cut `count` neurons into contiguous slices, one per worker, of lengths that differ by at most one."""
    return [slice(count * worker // workers, count * (worker + 1) // workers) for worker in range(workers)]


def added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, added in their order."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


EXAMPLES, LAYERS, PICTURES = 1, 2, 3
"""Kinds of messages, which do not overtake their own kind."""


class Activations:
    """One worker's exchange of activations. All workers must make the same calls in the same order.

    Args:
        group: the workers that share the head.
        name: prefix of its messages, unique within the group.

    Attributes:
        received_bytes: bytes received so far, without headers.
    """

    def __init__(self, group: Communicator, name: str = "activations") -> None:
        self._group = group.subgroup(name, range(group.size)) if group.size > 1 else group
        self.rank, self.size = group.rank, group.size
        self.received_bytes = 0

    def start(self, examples: Tensor) -> list[Handle]:
        """Start to send examples (R, A) to all others; the receivers infer R from the message."""
        flat = examples.detach().reshape(-1)
        return [start_send(self._group, to, flat, EXAMPLES) for to in others(self.rank, self.size)]

    def examples(self, source: int, like: Tensor) -> Tensor:
        """Wait for the examples that another worker has started to send.

        Args:
            source: the worker.
            like: (…, A), of the same dtype and device.

        Returns:
            (R, A).

        Raises:
            RunError: the message does not consist of whole examples of A values.
        """
        return self._take(source, EXAMPLES, (-1, like.shape[-1]), like)

    def start_to(self, to: int, images: Tensor) -> Handle:
        """Start to send images, or parts of them, to another worker, which infers their number from the message."""
        return start_send(self._group, to, images.detach().contiguous().reshape(-1), PICTURES)

    def pictures(self, source: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Wait for the images, or parts of them, that another worker has started to send.

        Args:
            source: the worker.
            shape: shape of them, -1 for their number.
            like: tensor of the same dtype and device.

        Raises:
            RunError: the message does not consist of whole ones.
        """
        return self._take(source, PICTURES, shape, like)

    def finish(self, handles: Iterable[Handle]) -> None:
        """Wait until started sends have left, and their memory is free."""
        with _own_random_numbers():
            for handle in handles:
                handle.wait()

    def swap(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send every worker its part, and receive this worker's part from each.

        Args:
            parts: one per worker, in rank order.
            shapes: shapes of the parts to receive; that of its own part is ignored. Empty parts do not travel.

        Returns:
            One per worker, in rank order.
        """
        ours = [part.detach().contiguous().reshape(-1) for part in parts]
        sent = [
            start_send(self._group, to, ours[to], LAYERS)
            for to in others(self.rank, self.size)
            if ours[to].numel()
        ]
        own = parts[self.rank].detach()
        taken = [
            own if source == self.rank else self._take(source, LAYERS, shape, own)
            for source, shape in enumerate(shapes)
        ]
        self.finish(sent)
        return taken

    def _take(self, source: int, tag: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if 0 in shape:
            return like.new_zeros(shape)
        with _own_random_numbers():
            vector = self._group.receive(source, tag)[1].tensor
        whole = abs(prod(shape))
        if vector is None or vector.dtype != like.dtype or vector.numel() % whole:
            raise RunError(
                f"worker {source} sent activations that do not fit: {whole} numbers of {like.dtype} were expected; all "
                "workers must train the same network"
            )
        self.received_bytes += vector.numel() * vector.element_size()
        return vector.to(like.device).reshape(shape)


def others(rank: int, size: int) -> list[int]:
    """Return the other ranks, the next one first, so that not all begin with the same one."""
    return [(rank + offset) % size for offset in range(1, size)]


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Restore torch's random state afterwards: ranks of a simulation share a generator, and take turns."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
