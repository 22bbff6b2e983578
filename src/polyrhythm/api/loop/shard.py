"""One worker's share of what a loader loads, and the weight of each step.

A map-style torch `DataLoader` is dealt out, so that each worker gets its share of every batch of the whole
group:

    sampler's order   a b c d e f | g h i j k A | l m        3 workers, batch size 2; the last step is ragged
    worker 0          a     d     | g     j     | l
    worker 1            b     e   |   h     k   |   m
    worker 2              c     f |     i     A |     (l)    nothing is left: l again, with weight 0

So all workers together see what one worker with three times the batch size would see, step by step; and the
user's loop runs equally often on all workers, with everything in it (schedulers, accumulated gradients, means
over workers). Of any other iterable, each worker takes every N-th batch.

The gradient of a step counts as much as the batches that were handed out for it (`StepWeight`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from polyrhythm.api.loop.store_board import Posted
from polyrhythm.data.dealing import steps_per_epoch
from polyrhythm.data.seeding import generator_for
from polyrhythm.errors import RequestError


class StepWeight:
    """Notes every batch that a shard hands out, and every step.

    Shards may be nested (a validation pass in the middle of a training epoch), so each iteration keeps a list of its
    own, and the innermost one is in use.

    Attributes:
        batch: shard, epoch and batch, each from 0, that was handed out last for training; None before the first.
    """

    def __init__(self) -> None:
        self._weights: list[float] = []
        self._latest = 1.0
        self.batch: tuple[int, int, int] | None = None

    def use(self, weights: list[float]) -> list[float]:
        """Take the weights of another iteration's batches since its last step; return those in use before."""
        if weights is not self._weights:
            self._latest = 1.0
        before, self._weights = self._weights, weights
        return before

    def take(self) -> float:
        """Return the weight of a step that is due now, in units of a full batch, and forget its batches.

        With several backward passes a step, it is the mean of their batches' weights, and a further pass of the same
        batch has the same; without any shard it is 1.
        """
        if self._weights:
            self._latest = sum(self._weights) / len(self._weights)
        self._weights.clear()
        return self._latest


class Seat(NamedTuple):
    """Which share of an epoch a worker has.

    Attributes:
        place: of the worker among those who have one.
        of: how many have one.
        taken: batches of it that need not be taken again.
    """

    place: int
    of: int
    taken: int = 0


class Deal(Sampler[Any]):
    """One worker's batches of indices, an epoch at each iteration.

    Args:
        sampler: gives an epoch's indices in order, the same on all workers if torch's generators are.
        batch_size: of one worker.
        drop_last: whether a ragged last step is left out.
        workers: of which this is one.
        seed: of torch's global generator while the sampler runs; the same on all workers.

    Attributes:
        epoch: which one the next iteration deals, from 0.
        seat: whose share is dealt.
        weights: of the batches of the latest iteration, in units of a full batch.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, workers: Posted, seed: int) -> None:
        self.epoch = 0
        self.weights: list[float] = []
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.seat = Seat(workers.rank, workers.size)
        self._seed = seed

    def __len__(self) -> int:
        return self._steps(len(self._sampler))

    def __iter__(self) -> Iterator[list[Any]]:
        order = self._order()
        positions, together = torch.arange(len(order)), self.seat.of * self._batch_size
        self.weights = []
        for step in range(self._steps(len(order))):
            mine = positions[step * together : (step + 1) * together][
                self.seat.place :: self.seat.of
            ].tolist()
            self.weights.append(len(mine) / self._batch_size)
            if step < self.seat.taken:
                continue
            yield [order[position] for position in mine or [self._substitute(step, len(order))]]

    def _steps(self, n: int) -> int:
        together = self.seat.of * self._batch_size
        return n // together if self._drop_last else steps_per_epoch(n, self.seat.of, self._batch_size)

    def _substitute(self, step: int, n: int) -> int:
        start = step * self.seat.of * self._batch_size
        return start + self.seat.place % (n - start)

    def _order(self) -> list[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(generator_for("order of a shard", self._seed, self.epoch).get_state())
            return list(self._sampler)


class SingleItems(Sampler[Any]):
    """Batches of one index each as plain indices: for loaders whose sampler gives whole batches."""

    def __init__(self, deal: Deal) -> None:
        self._deal = deal

    def __len__(self) -> int:
        return len(self._deal)

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self._deal)


class DealtLoader:
    """A copy of a map-style loader that loads one worker's share only.

    Args:
        loader: the user's; not changed but for the state of its generators, which become worker 0's.
        workers: hands worker 0's random generators on.

    Raises:
        RequestError: the loader shares out its images itself, or has too few of them.
    """

    def __init__(self, loader: DataLoader[Any], workers: Posted) -> None:
        if isinstance(loader.sampler, torch.utils.data.DistributedSampler):
            raise RequestError(
                "the loader has a DistributedSampler: give group.shard a plain one, it shares out itself"
            )
        seed = _agree_on_chance(loader, workers)
        self._deal, choice = _choice(loader, workers, seed)
        if len(loader) and not len(self._deal):
            raise RequestError(
                f"{len(loader)} batches of the loader do not make one step of {workers.size} workers: use a smaller "
                "batch size, fewer workers, or no drop_last"
            )
        names = (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
        )
        kept = {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers")}
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset, **choice, **kept, generator=loader.generator or _own_generator(seed, workers.rank)
        )

    @property
    def seat(self) -> Seat:
        """The share that is handed out."""
        return self._deal.seat

    @seat.setter
    def seat(self, seat: Seat) -> None:
        self._deal.seat = seat

    def __len__(self) -> int:
        return len(self._deal)

    def epoch(self, epoch: int) -> Iterator[tuple[Any, float]]:
        """Load the batches of an epoch, with their weights."""
        self._deal.epoch = epoch
        for step, batch in enumerate(self._loader, self.seat.taken):
            yield batch, self._deal.weights[step]


def _choice(loader: DataLoader[Any], workers: Posted, seed: int) -> tuple[Deal, dict[str, Any]]:
    """Deal the loader's indices out; return the arguments that make a loader take this worker's."""
    if loader.batch_size is not None:
        deal = Deal(loader.sampler, loader.batch_size, loader.drop_last, workers, seed)
        return deal, {"batch_sampler": deal}
    if loader.batch_sampler is not None:
        deal = Deal(loader.batch_sampler, 1, True, workers, seed)
        return deal, {"batch_sampler": SingleItems(deal)}
    deal = Deal(loader.sampler, 1, True, workers, seed)
    return deal, {"batch_size": None, "sampler": SingleItems(deal)}


def _own_generator(seed: int, worker: int) -> torch.Generator:
    """Make the generator that seeds a worker's loading processes: they must not all augment alike."""
    return generator_for("loading of a shard", seed, worker)


def _agree_on_chance(loader: DataLoader[Any], workers: Posted) -> int:
    """Give all workers the same generators: worker 0's where the loader has some, else one seed."""
    sampler = (
        loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    )
    holders = (sampler, loader.batch_sampler, loader)
    found = {id(made): made for made in (getattr(holder, "generator", None) for holder in holders)}
    for generator in found.values():
        if isinstance(generator, torch.Generator):
            state = generator.get_state()
            workers.broadcast(state)
            generator.set_state(state)
    seed = torch.empty((), dtype=torch.int64).random_()
    workers.broadcast(seed)
    return int(seed)


class Batches(Protocol):
    """What a shard hands out.

    Attributes:
        seat: the share that is handed out.
    """

    seat: Seat

    def __len__(self) -> int:
        """Batches an epoch."""

    def epoch(self, epoch: int) -> Iterator[tuple[Any, float]]:
        """Return the batches of an epoch, each with its weight in units of a full batch."""


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
        """Return this worker's batches; each counts the same."""
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
                    self._weight.batch = self._number, epoch, taken
                own.append(weight)
                self._weight.use(own)
                yield batch
            at_end = True
        finally:
            self._weight.use(outer)
            if trains:
                self._host.through(self._length(), broken_off=not at_end)

    def _length(self) -> int:
        """Return how many batches there are; 0 where nobody knows."""
        try:
            return len(self._batches)
        except TypeError:
            return 0


def batches_of(loader: Iterable[Any], workers: Posted) -> Batches:
    """Choose how a loader is shared out.

    A worker on its own gets the loader's own batches, whatever it is.
    """
    if (
        workers.size > 1
        and isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
    ):
        return DealtLoader(loader, workers)
    return EveryNth(loader, workers.rank, workers.size)
