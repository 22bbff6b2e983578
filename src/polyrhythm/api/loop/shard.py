"""One worker's share of what a loader loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from polyrhythm.api.loop.bulletin import Posted
from polyrhythm.api.loop.dealing import DealtLoader
from polyrhythm.api.loop.seat import Seat
from polyrhythm.api.loop.step_weight import StepWeight


class Batches(Protocol):
    """What a shard hands out.

    Attributes:
        seat: the share that is handed out.
    """

    seat: Seat

    def __len__(self) -> int:
        """Batches an epoch."""

    def epoch(self, epoch: int) -> Iterator[tuple[Any, float]]:
        """Gives the batches of an epoch, each with its weight in units of a full batch."""


class Host(Protocol):
    """Where a shard belongs."""

    def seat(self, shard: int, epoch: int) -> Seat:
        """An iteration begins: gives this worker's share of it."""

    def left_out(self, batches: int) -> None:
        """So many batches of it need not be taken again."""

    def took(self, taken: int, of: int) -> None:
        """One more batch of an epoch is taken, for training, after so many."""

    def through(self, of: int, *, broken_off: bool) -> None:
        """Nothing more of the share is taken, for training: it is at its end, or the user has broken off."""


class EveryNth:
    """Each worker takes every N-th batch of a stream that is the same on all; all stop after the last whole round.

    Args:
        stream: any iterable.
        worker: takes this one of every round.
        workers: batches in a round.

    Attributes:
        seat: the share that is handed out.
    """

    def __init__(self, stream: Iterable[Any], worker: int, workers: int) -> None:
        self.seat = Seat(worker, workers)
        self._stream = stream

    def __len__(self) -> int:
        return len(self._stream) // self.seat.of  # type: ignore[arg-type]

    def epoch(self, epoch: int) -> Iterator[tuple[Any, float]]:
        """Gives this worker's batches; each counts the same."""
        mine, seat = None, self.seat
        for position, batch in enumerate(self._stream):
            if position % seat.of == seat.place:
                mine = batch
            # only now is it sure that everyone has one
            if position % seat.of == seat.of - 1 and position // seat.of >= seat.taken:
                yield mine, 1.0


class Shard:
    """This worker's batches; each iteration is the next epoch.

    Args:
        batches: to hand out.
        weight: is told of each.
        host: where it belongs.
        number: of this shard there.

    Attributes:
        epoch: which one the next iteration is, from 0; set it to resume.
    """

    def __init__(self, batches: Batches, weight: StepWeight, host: Host, number: int = 0) -> None:
        self.epoch = 0
        self._batches = batches
        self._weight = weight
        self._host = host
        self._number = number

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        seat = self._batches.seat = self._host.seat(self._number, epoch)
        trains = torch.is_grad_enabled()
        if seat.taken:
            seat = self._batches.seat = seat._replace(taken=min(seat.taken, self._length() or seat.taken))
            self._host.left_out(seat.taken)
        own: list[float] = []
        outer = self._weight.use(own)
        at_end = False
        try:
            for taken, (batch, weight) in enumerate(self._batches.epoch(epoch), seat.taken):
                if trains:
                    self._host.took(taken, self._length())
                own.append(weight)
                self._weight.use(own)
                yield batch
            at_end = True
        finally:
            self._weight.use(outer)
            if trains:
                self._host.through(self._length(), broken_off=not at_end)

    def _length(self) -> int:
        """Gives how many batches there are; 0 where nobody knows."""
        try:
            return len(self._batches)
        except TypeError:
            return 0


def batches_of(loader: Iterable[Any], workers: Posted) -> Batches:
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
