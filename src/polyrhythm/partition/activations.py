"""Activations on their way between the workers that share a head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from polyrhythm.communication.collective import start_send
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.errors import RunError

_EXAMPLES, _LAYERS = 1, 2


class Activations:
    """One worker's end. All workers must make the same calls in the same order.

    Args:
        group: who shares the head.
        name: tells its messages from those of others on the same group.

    Attributes:
        received_bytes: of numbers, headers not counted, since it was made.
    """

    def __init__(self, group: Communicator, name: str = "activations") -> None:
        self._group = group.subgroup(name, range(group.size)) if group.size > 1 else group
        self.rank, self.size = group.rank, group.size
        self.received_bytes = 0

    def start(self, examples: Tensor) -> list[Handle]:
        """Starts to send examples (R, A) to all others, who learn from it how many there are."""
        flat = examples.detach().reshape(-1)
        return [start_send(self._group, to, flat, _EXAMPLES) for to in self._others()]

    def examples(self, source: int, like: Tensor) -> Tensor:
        """Waits for what another worker has started to send.

        Args:
            source: the worker.
            like: (…, A), of the same dtype and device.

        Returns:
            (R, A).

        Raises:
            RunError: what has come is not whole examples of A numbers.
        """
        return self._take(source, _EXAMPLES, (-1, like.shape[-1]), like)

    def finish(self, handles: Iterable[Handle]) -> None:
        """Waits until what has been started is on its way, and its memory free."""
        with _own_random_numbers():
            for handle in handles:
                handle.wait()

    def swap(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Gives every worker its part, and takes this worker's from each.

        Args:
            parts: one a worker, in rank order.
            shapes: of what each worker has for this one; that of its own part is not looked at. What is empty does
                not travel.

        Returns:
            One a worker, in rank order.
        """
        ours = [part.detach().contiguous().reshape(-1) for part in parts]
        sent = [start_send(self._group, to, ours[to], _LAYERS) for to in self._others() if ours[to].numel()]
        own = parts[self.rank].detach()
        taken = [
            own if source == self.rank else self._take(source, _LAYERS, shape, own)
            for source, shape in enumerate(shapes)
        ]
        self.finish(sent)
        return taken

    def _take(self, source: int, tag: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        if 0 in shape:
            return like.new_zeros(shape)
        with _own_random_numbers():
            vector = self._group.receive(source, tag)[1].tensor
        whole = abs(shape[0] * shape[1])
        if vector is None or vector.dtype != like.dtype or vector.numel() % whole:
            raise RunError(
                f"worker {source} sent activations that do not fit: {whole} numbers of {like.dtype} were expected; all "
                "workers must train the same network"
            )
        self.received_bytes += vector.numel() * vector.element_size()
        return vector.to(like.device).reshape(shape)

    def _others(self) -> list[int]:
        """Gives the other ranks, the next one first, so that not all begin with the same one."""
        return [(self.rank + offset) % self.size for offset in range(1, self.size)]


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Goes on with the same random numbers afterwards: ranks of a simulation share a generator, and take turns."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
