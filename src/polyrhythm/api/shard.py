"""One worker's share of what a loader loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from polyrhythm.api.dealing import DealtLoader
from polyrhythm.api.step_weight import StepWeight
from polyrhythm.communication.communicator import Communicator


class Batches(Protocol):
    """What a shard hands out."""

    def __len__(self) -> int:
        """Batches an epoch."""

    def epoch(self, epoch: int) -> Iterator[tuple[Any, float]]:
        """Gives the batches of an epoch, each with its weight in units of a full batch."""


class EveryNth:
    """Each worker takes every N-th batch of a stream that is the same on all; all stop after the last whole round.

    Args:
        stream: any iterable.
        worker: takes this one of every round.
        workers: batches in a round.
    """

    def __init__(self, stream: Iterable[Any], worker: int, workers: int) -> None:
        self._stream = stream
        self._worker = worker
        self._workers = workers

    def __len__(self) -> int:
        return len(self._stream) // self._workers  # type: ignore[arg-type]

    def epoch(self, epoch: int) -> Iterator[tuple[Any, float]]:
        """Gives this worker's batches; each counts the same."""
        mine = None
        for position, batch in enumerate(self._stream):
            if position % self._workers == self._worker:
                mine = batch
            if position % self._workers == self._workers - 1:  # only now is it sure that everyone has one
                yield mine, 1.0


class Shard:
    """This worker's batches; each iteration is the next epoch.

    Args:
        batches: to hand out.
        weight: is told of each.
        on_start: called when an iteration begins.

    Attributes:
        epoch: which one the next iteration is, from 0; set it to resume.
    """

    def __init__(self, batches: Batches, weight: StepWeight, on_start: Callable[[], object]) -> None:
        self.epoch = 0
        self._batches = batches
        self._weight = weight
        self._on_start = on_start

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._on_start()
        epoch, self.epoch = self.epoch, self.epoch + 1
        own: list[float] = []
        outer = self._weight.use(own)
        try:
            for batch, weight in self._batches.epoch(epoch):
                own.append(weight)
                self._weight.use(own)
                yield batch
        finally:
            self._weight.use(outer)


def batches_of(loader: Iterable[Any], workers: Communicator) -> Batches:
    """Chooses how a loader is shared out.

    A worker on its own gets the loader's own batches, whatever it is.
    """
    if (
        workers.size > 1
        and isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
    ):
        return DealtLoader(loader, workers)
    return EveryNth(loader, workers.rank, workers.size)
