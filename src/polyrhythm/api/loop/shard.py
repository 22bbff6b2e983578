"""One worker's share of what a loader loads, and the weight of each step.

A map-style torch `DataLoader` is divided, so that each worker gets its share of every batch of the whole
group:

    sampler's order   a b c d e f | g h i j k A | l m        3 workers, batch size 2; the last step is ragged
    worker 0          a     d     | g     j     | l
    worker 1            b     e   |   h     k   |   m
    worker 2              c     f |     i     A |     (l)    no image remains: l again, with weight 0

So all workers together process the images of one worker with three times the batch size, step by step; and the
user's loop runs equally often on all workers, with everything in it (schedulers, accumulated gradients, means
over workers). An evaluation (without gradients) leaves the repeated images out, so that each counts once. Where the
last step would have fewer than two images a worker, which layers such as `BatchNorm1d` cannot be trained on, the last
two steps share theirs. Of any other iterable, each worker takes every N-th batch.

At the beginning of each epoch workers compare a digest of the order: the first to reach it posts it in the store.

Asynchronous workers may draw their batches instead (`Drawing`), so that a fast one takes more:

    sampler's order   a b | c d | e f | g h | i j | k l | m        batch size 2
    worker 0          a b   c d               i j   k l
    worker 1                      e f   g h               m

On uneven machines with a synchronous strategy, shares of every step by weight, here 3, 2, 1 at batch size 2:

    worker 0          a b c       | g h i       | l
    worker 1                d e   |       j k   |   m
    worker 2                    f |           A |    (l)

The gradient of a step is weighted by the batches that were handed out for it (`StepWeight`).

Where workers have failed or joined in the middle of an epoch, each later step is dealt out among the present ones, as
large as before (`Division`):

    sampler's order   a b c d e f | g h i j k l | m n o p q r | s t u v w x    3 workers, batch size 2
    worker 0          a     d     | g     j     | m   o   q   | s     v
    worker 1            b     e   |   h     k   |   n   p   r |   t     w
    worker 2              c     f |             |             |     u     x    failed, later replaced

Images of its broken step are spread over the steps that follow, in addition to theirs.

A run that is resumed in the middle of an epoch draws the same order again, and divides its rest among the present
number of workers:

    2 workers    a b c d | e f g h |            saved here, with 8 of the order
    3 workers                        i j k l m n | o p …
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate

from polyrhythm.api.loop.random_state import (
    GLOBAL_GENERATORS,
    RandomStateToRestore,
    generator_states,
    random_state,
    set_generators,
    set_random_state,
    tensor_of,
)
from polyrhythm.api.loop.store_board import Posted, StoreBoard
from polyrhythm.communication.control_message import checked
from polyrhythm.data.balance import split
from polyrhythm.data.dealing import steps_per_epoch
from polyrhythm.data.seeding import generator_for, seed_for
from polyrhythm.errors import RequestError
from polyrhythm.roles.checkpointing.worker_state import counted
from polyrhythm.training.checkpoint import restoring


class StepWeight:
    """Records every batch that a shard hands out, and every step.

    Shards may be nested (a validation pass in the middle of a training epoch), so each iteration has its own list of
    weights, and the innermost one is in use.

    Attributes:
        batch: shard, epoch and batch, each from 0, that was handed out last for training; None before the first.
    """

    def __init__(self) -> None:
        self._weights: list[float] = []
        self._latest = 1.0
        self.batch: tuple[int, int, int] | None = None

    def use(self, weights: list[float]) -> list[float]:
        """Use the weights of another iteration's batches since its last step; return those in use before."""
        if weights is not self._weights:
            self._latest = 1.0
        before, self._weights = self._weights, weights
        return before

    @property
    def now(self) -> float:
        """Weight of the current pass, as far as it is known: that of the step, if this is its only pass."""
        return sum(self._weights) / len(self._weights) if self._weights else self._latest

    def take(self) -> float:
        """Return the weight of a step that is due now, in units of a full batch, and forget its batches.

        With several backward passes a step, it is the mean of their batches' weights, and a further pass of the same
        batch has the same; without any shard it is 1.
        """
        self._latest = self.now
        self._weights.clear()
        return self._latest


class Division(NamedTuple):
    """Division of an epoch's steps among workers, from a step on.

    Attributes:
        begins: first step.
        members: indices of the workers that have a share.
        batches: full batches in a step: number of the workers at the epoch's beginning.
        extras: positions in the epoch's order that failed workers have not taken, to be dealt out in addition: evenly
            over the steps.
    """

    begins: int
    members: tuple[int, ...]
    batches: int
    extras: tuple[int, ...] = ()


class Seat(NamedTuple):
    """Share of an epoch that a worker has.

    Attributes:
        place: place of the worker among those that have a share.
        of: number of workers that have a share.
        taken: batches of the share that need not be taken again.
        passed: length of the epoch's order that was dealt out before the run was resumed, and is not any more.
        division: division of the epoch's rest, to which place and number refer; None: that of the whole epoch. A worker
            that begins before it repeats images of others, with weight 0.
    """

    place: int
    of: int
    taken: int = 0
    passed: int = 0
    division: Division | None = None


BatchesOfShard = Literal["static", "dynamic"]
_STRETCHES = 16
"""Stretches of the rest of an epoch, for each worker: few messages, and a slow worker never holds much of it."""


class Drawing:
    """Draws one worker's batches: an epoch is cut into stretches, each taken by the first worker that requests it.

    A stretch is 1/(16 N) of the remaining batches, at least one. Its holder is recorded in the store, so a replacement
    finds the stretches of its predecessor.

    Args:
        board: board with the holders.
        name: prefix of its keys.
        worker: index of this worker.
    """

    def __init__(self, board: StoreBoard, name: str, worker: int) -> None:
        self._board = board
        self._name = name
        self._own = str(worker)

    def stretches(self, epoch: int, batches: int, workers: int, *, again: bool) -> Iterator[range]:
        """Yield this worker's stretches of an epoch, drawing each when it is requested.

        Args:
            epoch: number of the epoch.
            batches: number of batches in it, of all workers.
            workers: number of workers that share it.
            again: whether this worker's predecessor may have drawn some, which are then yielded first.
        """
        number, cut = 0, stretches(batches, workers)
        while number < len(cut):
            if self._board.post_if_absent(self._key(epoch, number), self._own) == self._own:
                self._board.post(self._key(epoch, "next"), str(number + 1))
                yield cut[number]
            elif not again:  # stretches before the last drawn one are taken as well
                number = max(number, int(self._board.read(self._key(epoch, "next")) or 0) - 1)
            number += 1

    def held(self, epoch: int, batches: int, workers: int) -> int:
        """Return how many batches of an epoch this worker, or its predecessor, has drawn."""
        held = 0
        for number, stretch in enumerate(stretches(batches, workers)):
            holder = self._board.read(self._key(epoch, number))
            if holder is None:
                break
            held += len(stretch) if holder == self._own else 0
        return held

    def _key(self, epoch: int, what: int | str) -> str:
        return f"{self._name}/{epoch}/{what}"


def stretches(batches: int, workers: int) -> list[range]:
    """Cut an epoch of `batches` batches into stretches for `workers` workers; see `Drawing`."""
    found, start = list[range](), 0
    while start < batches:
        stop = start + max(1, (batches - start) // (_STRETCHES * workers))
        found.append(range(start, stop))
        start = stop
    return found


class Deal(Sampler[Any]):
    """One worker's batches of indices, an epoch at each iteration.

    Args:
        sampler: sampler of an epoch's indices, in the same order on all workers if torch's generators are the same.
        batch_size: batch size of one worker.
        drop_last: whether a ragged last step is dropped.
        workers: numbers that worker 0 posts, with the rank of this worker.
        seed: seed of torch's global generator while the sampler runs; the same on all workers.
        drawing: source of drawn batches; None: each worker has a fixed share.
        parts: relative share of each worker in every step; empty: equal. Shares are equal while workers are absent.
        size_of: function that returns the images of an item of the order, where items are whole batches; None: one
            each.

    Attributes:
        epoch: epoch of the next iteration, from 0.
        seat: share that is dealt.
        weights: weights of the batches of the latest iteration, in units of a full batch.
        batch_size: the argument of that name.
        seed: the argument of that name.
        explicit: order of the resumed epoch, where it does not follow from the seed; else None.
        drawn: order of the latest iteration.
        drawing: the argument of that name.
        parts: the argument of that name.
        held: number of batches drawn in the latest iteration.
        leaves_repeats_out: whether a worker without an image of a step gets no batch.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        drop_last: bool,
        workers: Posted,
        seed: int,
        drawing: Drawing | None = None,
        parts: Sequence[float] = (),
        size_of: Callable[[Any], int] | None = None,
    ) -> None:
        self.epoch = self.held = 0
        self.leaves_repeats_out = False
        self._workers = workers
        self._size_of = size_of
        self.drawing = drawing
        self.parts = tuple(parts)
        self.weights: list[float] = []
        self._sampler = sampler
        self.batch_size = batch_size
        self._drop_last = drop_last
        self.seat = Seat(workers.rank, workers.size)
        self.seed = seed
        self.explicit: list[Any] | None = None
        self.drawn: list[Any] = []

    def __len__(self) -> int:
        left = self.left
        return self._steps(left) if self.drawing is None else -(-self._batches(left) // self.seat.of)

    @property
    def left(self) -> int:
        """Length of the rest of the epoch's order."""
        images = len(self._sampler) if self.explicit is None else len(self.explicit)
        return max(0, images - self.seat.passed)

    def drawn_before(self, epoch: int) -> int | None:
        """Return how many batches of an epoch have been drawn for this worker; None where it has a fixed share."""
        return (
            None if self.drawing is None else self.drawing.held(epoch, self._batches(self.left), self.seat.of)
        )

    def __iter__(self) -> Iterator[list[Any]]:
        whole = self.drawn = self.order() if self.explicit is None else self.explicit
        self._check_alike(whole)
        order = whole[self.seat.passed :]
        full = self.batch_size if self._size_of is None else max(map(self._size_of, whole), default=1)
        if self.drawing is not None:
            yield from self._drawn(self.drawing, order, full)
            return
        self.weights, seat = [], self.seat
        for step in range(self._steps(len(order))):
            own = self._own(self._positions(seat.division, step, len(order)), seat.place, seat.of).tolist()
            begins = 0 if seat.division is None else seat.division.begins
            self.weights.append(self._images([order[each] for each in own]) / full if step >= begins else 0.0)
            if step < seat.taken or (not own and self.leaves_repeats_out):
                continue
            begin, end = self.begins(step, len(order)), self.begins(step + 1, len(order))
            yield [order[each] for each in own or [begin + seat.place % (end - begin)]]

    def _positions(self, division: Division | None, step: int, n: int) -> Tensor:
        """Return the positions of a step in an order of `n`."""
        positions = torch.arange(self.begins(step, n), self.begins(step + 1, n))
        if division is None or not division.extras or step < division.begins:
            return positions
        return torch.cat([positions, torch.tensor(self.extras(division, step, step + 1), dtype=torch.int64)])

    def extras(self, division: Division, step: int, end: int | None = None) -> tuple[int, ...]:
        """Return a division's extras in steps from `step` to before `end`; None: to the last."""
        steps, many = len(self) - division.begins, len(division.extras)
        first = many * (step - division.begins) // steps if steps > 0 else many
        last = many if end is None or steps <= 0 else many * (end - division.begins) // steps
        return division.extras[first:last]

    def share_of(self, division: Division, worker: int, step: int) -> list[int]:
        """Return the positions of a step that a worker has by a division."""
        positions = self._positions(division, step, self.left)
        return self._own(positions, division.members.index(worker), len(division.members)).tolist()

    def _images(self, items: list[Any]) -> int:
        return len(items) if self._size_of is None else sum(map(self._size_of, items))

    def begins(self, step: int, n: int, workers: int | None = None) -> int:
        """Return the position in an order of `n` at which a step begins; the step after the last begins at the end.

        Args:
            step: number of the step, from 0.
            n: length of the order.
            workers: number of workers that share it; None: those of the seat.
        """
        workers = self._full_batches if workers is None else workers
        together = workers * self.batch_size
        full, rest = divmod(n, together)
        if self._drop_last:
            return min(step, full) * together
        last = together + rest
        if full and step == full and 0 < rest < 2 * workers and last // 2 >= 2 * workers:
            return n - last // 2
        return min(step * together, n)

    def not_dealt(self, order: list[Any], dealt_count: Sequence[int]) -> list[Any]:
        """Return the rest of an order from which each of some workers has taken its own number of batches."""
        left, step, workers = list[Any](), 0, len(dealt_count)
        while (begin := self.begins(step, len(order), workers)) < len(order):
            end = self.begins(step + 1, len(order), workers)
            left += [
                order[place]
                for place in range(begin, max(end, begin + 1))
                if step >= dealt_count[(place - begin) % workers]
            ]
            step += 1
        return left

    def _check_alike(self, order: list[Any]) -> None:
        """Compare the order of the epoch with that of the worker that reached it first.

        Raises:
            RequestError: they differ.
        """
        if self._workers.size == 1:
            return
        own = {"worker": self._workers.rank, "length": len(order), "digest": _digest(order)}
        first = json.loads(self._workers.first(f"{self.epoch}/order", json.dumps(own)))
        if (first["length"], first["digest"]) != (own["length"], own["digest"]):
            raise RequestError(
                f"group.shard: worker {own['worker']} has another order of samples in epoch {self.epoch} than worker "
                f"{first['worker']} ({own['length']:,} and {first['length']:,} samples): give all workers the same "
                "data, and a sampler that draws from torch's, Python's or NumPy's global generator, or from one that "
                "is seeded alike"
            )

    def _own(self, step: Tensor, place: int, of: int) -> Tensor:
        """Return the share that the worker at a place has of a step's positions in the order."""
        if len(self.parts) != of:
            return step[place::of]
        mine: Tensor = step.split(split(len(step), self.parts))[place]
        return mine

    @property
    def _full_batches(self) -> int:
        """Number of full batches in a step."""
        return self.seat.of if self.seat.division is None else self.seat.division.batches

    def _drawn(self, drawing: Drawing, order: list[Any], full: int) -> Iterator[list[Any]]:
        size, seat = self.batch_size, self.seat
        self.weights, self.held = [], 0
        for stretch in drawing.stretches(
            self.epoch, self._batches(len(order)), seat.of, again=seat.taken > 0
        ):
            self.held += len(stretch)
            for batch in stretch:
                mine = order[batch * size : (batch + 1) * size]
                self.weights.append(self._images(mine) / full)
                if len(self.weights) > seat.taken:
                    yield mine

    def _batches(self, n: int) -> int:
        return n // self.batch_size if self._drop_last else -(-n // self.batch_size)

    def _steps(self, n: int) -> int:
        together = self._full_batches * self.batch_size
        return n // together if self._drop_last else steps_per_epoch(n, self._full_batches, self.batch_size)

    def order(self) -> list[Any]:
        """Draw the order of the epoch."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        with _seeded("order of a shard", self.seed, self.epoch):
            return list(self._sampler)


@contextmanager
def _seeded(purpose: str, *numbers: int) -> Iterator[None]:
    """Seed the global generators of torch, Python and NumPy inside, and restore them."""
    seed = seed_for(purpose, *numbers)
    with GLOBAL_GENERATORS:
        python, numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(generator_for(purpose, *numbers).get_state())
                random.seed(seed)
                np.random.seed(seed)
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _digest(order: list[Any]) -> str:
    """Return a digest of indices, which may be tensors, texts, and lists of them."""
    return hashlib.sha256(json.dumps(order, default=_plain_index).encode()).hexdigest()


def _plain_index(index: Any) -> Any:
    return index.tolist() if hasattr(index, "tolist") else type(index).__name__


class SingleItems(Sampler[Any]):
    """Batches of one index each as plain indices: for loaders with a sampler that yields whole batches."""

    def __init__(self, deal: Deal) -> None:
        self._deal = deal

    def __len__(self) -> int:
        return len(self._deal)

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self._deal)


class DealtLoader:
    """A copy of a map-style loader that loads one worker's share only.

    Args:
        loader: loader of the user; not changed except for the state of its generators, which become worker 0's.
        workers: numbers that worker 0 posts, such as its random generators.
        drawing: source of drawn batches; None: each worker has a fixed share.
        parts: see `Deal`.

    Raises:
        RequestError: the loader divides its images itself, or has too few of them, or yields whole batches that
            cannot be divided.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        workers: Posted,
        drawing: Drawing | None = None,
        parts: Sequence[float] = (),
    ) -> None:
        if isinstance(loader.sampler, torch.utils.data.DistributedSampler):
            raise RequestError(
                "the loader has a DistributedSampler: give group.shard a plain one, it shares out itself"
            )
        seed = _agree_on_chance(loader, workers)
        self._plain = loader
        self._workers = workers
        self._deal, choice = _choice(loader, workers, seed, drawing, parts)
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
        own = loader.generator or _own_generator(seed, workers.rank)
        dataset = loader.dataset
        if not loader.num_workers and loader.collate_fn is default_collate and _gathers(dataset):
            dataset, kept["collate_fn"] = _Gathered(dataset), _unchanged
        self._loader: DataLoader[Any] = DataLoader(dataset, **choice, **kept, generator=own)
        self._generators = [*_generators(loader), *([own] if loader.generator is None else [])]
        self._began: list[str] = []
        self._begins_with: list[str] = []
        self._taken = 0

    @property
    def seat(self) -> Seat:
        """Share that is handed out."""
        return self._deal.seat

    @seat.setter
    def seat(self, seat: Seat) -> None:
        self._deal.seat = seat

    def __len__(self) -> int:
        return len(self._deal)

    def epoch(self, epoch: int, *, leaves_repeats_out: bool = False) -> Iterator[tuple[Any, float]]:
        """Load the batches of an epoch, with their weights; see `Batches`."""
        if epoch != self._deal.epoch:
            self._deal.explicit = None
        self._deal.epoch = epoch
        self._deal.leaves_repeats_out = leaves_repeats_out
        set_generators(self._generators, self._begins_with)
        self._begins_with = []
        if shared := _generators(self._plain):  # those of a replacement may have other states
            own = json.dumps(generator_states(shared))
            set_generators(shared, json.loads(self._workers.first(f"{epoch}/generators", own)))
        self._began = generator_states(self._generators)
        for step, batch in enumerate(self._loader, self.seat.taken):
            self._taken = step + 1
            yield batch, self._deal.weights[step]

    def undealt(self, divisions: Sequence[Division], since: dict[int, int], until: int) -> tuple[int, ...]:
        """Return the positions in the epoch's order that would be lost in the next division.

        They are those that failed workers have not taken, and those to be taken in addition later.

        Args:
            divisions: divisions of this epoch, in their order.
            since: first step that a worker has not taken, by its index.
            until: first step of the next division.
        """
        lost = list(self._deal.extras(divisions[-1], max(until, divisions[-1].begins)))
        for step in range(min(since.values(), default=until), until):
            division = [each for each in divisions if each.begins <= step][-1]
            for worker in set(since).intersection(division.members):
                lost += self._deal.share_of(division, worker, step) if step >= since[worker] else []
        return tuple(sorted(lost))

    def share(self, epoch: int) -> int:
        """Return the number of this worker's batches of an epoch, as far as they have been dealt."""
        if self._deal.epoch == epoch and self._deal.held:
            return self._deal.held
        before = self._deal.drawn_before(epoch)
        return len(self) if before is None else before

    @property
    def draws(self) -> bool:
        """Whether workers draw their batches."""
        return self._deal.drawing is not None

    def passed(self, dealt_count: int) -> int:
        """Return the length of the epoch's order after `dealt_count` batches per worker; see `Batches`."""
        return self.seat.passed + self._deal.begins(dealt_count, self._deal.left)

    def chance(self, *, under_way: bool) -> dict[str, Any]:
        """Return the state that determines the order of an epoch, JSON-able; see `Batches`."""
        began = self._began if under_way else generator_states(self._generators)
        explicit, division = self._deal.explicit, self.seat.division
        if under_way and division is not None and division.extras:
            whole = self._deal.drawn
            extras = self._deal.extras(division, max(self._taken, division.begins))
            explicit = [*whole, *(whole[self.seat.passed + position] for position in extras)]
        order = {"order": explicit} if under_way and explicit is not None else {}
        parts = {"parts": list(self._deal.parts)} if self._deal.parts else {}
        return {"dealt": True, "seed": self._deal.seed, "generators": began, **order, **parts}

    def resume(self, state: dict[str, Any], random: RandomStateToRestore) -> int:
        """Draw the order that the other run drew; see `Batches`."""
        passed, dealt_count = int(state["passed"]), state.get("handed_to_each")
        self._deal.epoch = state["epoch"]
        if state["dealt"]:
            self._deal.seed = state["seed"]
            self._deal.explicit = state.get("order")
            self._begins_with = state["generators"]
        elif passed:
            self._deal.explicit, passed = self._drawn_alone(state, passed)
        if not passed or dealt_count:
            set_generators(self._generators, self._begins_with)
            self._begins_with = []
        if dealt_count and state.get("parts"):
            raise RequestError(
                "workers with parts by weight had taken unequal numbers of batches when this was saved: continue "
                "from a "
                "state of an epoch's end"
            )
        if dealt_count:  # each its own number: there is no position in the order before which all is taken
            order = self._deal.order() if self._deal.explicit is None else self._deal.explicit
            self._deal.explicit = self._deal.not_dealt(order[state["before"] :], dealt_count)
            passed = 0
        return passed

    def _drawn_alone(self, state: dict[str, Any], batches: int) -> tuple[list[Any], int]:
        """Return the order of a single worker with its plain loader, and the number of items in `batches` batches."""
        plain = self._plain
        with GLOBAL_GENERATORS, torch.random.fork_rng(devices=[]):
            torch.set_rng_state(tensor_of(state["random"]["torch"]))
            set_generators(self._generators, state["generators"])
            chosen: dict[str, Any] = (
                {"batch_size": None, "sampler": plain.sampler}
                if plain.batch_sampler is None
                else {"batch_sampler": plain.batch_sampler}
            )
            found: list[Any] = list(
                DataLoader(_Positions(), collate_fn=_unchanged, generator=plain.generator, **chosen)
            )
        if plain.batch_size is None:
            return found, batches
        return [each for batch in found for each in batch], sum(map(len, found[:batches]))


class _Positions(Dataset[Any]):
    """Holds each index itself, so that a loader yields the indices of its sampler."""

    def __getitem__(self, index: Any) -> Any:
        return index


class _Gathered(Dataset[Any]):
    """A `TensorDataset` that gathers a batch at once: the values of `default_collate` in a quarter of the time."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: list[Any]) -> list[Tensor]:
        chosen = torch.tensor([int(index) for index in indices])
        return [tensor[chosen] for tensor in self._dataset.tensors]


def _gathers(dataset: Dataset[Any]) -> TypeGuard[TensorDataset]:
    """Return whether batches of a data set are gathered; of tensors in another order they would have other strides."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_contiguous()
        for tensor in dataset.tensors
    )


def _unchanged(batch: Any) -> Any:
    return batch


def _choice(
    loader: DataLoader[Any], workers: Posted, seed: int, drawing: Drawing | None, parts: Sequence[float]
) -> tuple[Deal, dict[str, Any]]:
    """Divide the loader's indices; return the arguments that make a loader take this worker's."""
    if loader.batch_size is not None:
        deal = Deal(loader.sampler, loader.batch_size, loader.drop_last, workers, seed, drawing, parts)
        return deal, {"batch_sampler": deal}
    if parts:
        raise RequestError(_NO_PARTS)
    if loader.batch_sampler is not None:
        deal = Deal(loader.batch_sampler, 1, False, workers, seed, drawing, size_of=len)
        return deal, {"batch_sampler": SingleItems(deal)}
    deal = Deal(loader.sampler, 1, False, workers, seed, drawing, size_of=_size_of_item)
    return deal, {"batch_size": None, "sampler": SingleItems(deal)}


def _size_of_item(item: Any) -> int:
    """Return the number of images of an item of a sampler, for a loader that makes no batches of its own."""
    return len(item) if isinstance(item, list) else 1


def _own_generator(seed: int, worker: int) -> torch.Generator:
    """Make the generator that seeds a worker's loading processes: their augmentations must differ."""
    return generator_for("loading of a shard", seed, worker)


def _agree_on_chance(loader: DataLoader[Any], workers: Posted) -> int:
    """Give all workers the same generators: worker 0's where the loader has some, else one seed."""
    for generator in _generators(loader):
        state = generator.get_state()
        workers.broadcast(state)
        generator.set_state(state)
    with GLOBAL_GENERATORS:
        seed = torch.empty((), dtype=torch.int64).random_()
    workers.broadcast(seed)
    return int(seed)


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators of a user's loader, each once."""
    sampler = (
        loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    )
    holders = (sampler, loader.batch_sampler, loader)
    found = {id(made): made for made in (getattr(holder, "generator", None) for holder in holders)}
    return [each for each in found.values() if isinstance(each, torch.Generator)]


class Batches(Protocol):
    """Batches that a shard hands out.

    Attributes:
        seat: share that is handed out.
    """

    seat: Seat

    def __len__(self) -> int:
        """Return the batches of an epoch; the mean over the workers where they draw them."""

    def share(self, epoch: int) -> int:
        """Return the number of this worker's batches of an epoch, as far as they have been dealt."""

    @property
    def draws(self) -> bool:
        """Whether workers draw their batches."""

    def epoch(self, epoch: int, *, leaves_repeats_out: bool = False) -> Iterator[tuple[Any, float]]:
        """Return the batches of an epoch, each with its weight in units of a full batch.

        Args:
            epoch: number of the epoch.
            leaves_repeats_out: whether a worker without images in the last step gets no batch there; else it gets a
                copy of another worker's batch, with weight 0.
        """

    def passed(self, dealt_count: int) -> int:
        """Return the length of an epoch's order that all workers have taken after `dealt_count` batches each."""

    def chance(self, *, under_way: bool) -> dict[str, Any]:
        """Return the state that determines the order of an epoch, JSON-able.

        Args:
            under_way: whether for the latest begun epoch; else for the next one.
        """

    def resume(self, state: dict[str, Any], random: RandomStateToRestore) -> int:
        """Draw the next epoch's order as in the run that is resumed.

        Args:
            state: result of `chance` in that run, with the length of the order that was `passed`.
            random: random state of this worker, to be restored once that length is skipped.

        Returns:
            The length of the order to skip.
        """


class Host(Protocol):
    """Loop to which a shard belongs."""

    def seat(self, shard: int, epoch: int) -> Seat:
        """Return this worker's share of an iteration that begins."""

    def left_out(self, batches: int) -> None:
        """Note that this number of batches of it need not be taken again."""

    def rest(self) -> None:
        """Note that an iteration for training begins."""

    def seat_again(self, taken: int, loader: DealtLoader) -> Seat | None:
        """Return this worker's share of the rest of an iteration for training, if it has changed; else None.

        Args:
            taken: batches taken of it.
            loader: loader of the batches.
        """

    def took(self, taken: int, of: int, batch: Any) -> None:
        """Note that one more batch of an epoch is taken for training, after `taken` others."""

    def through(self, of: int, *, broken_off: bool) -> None:
        """Note that no more of the share is taken for training: it has ended, or the user has left the loop."""


class EveryNth:
    """Each worker takes every N-th batch of a stream that is the same on all.

    Workers without a batch in the last round repeat the last batch, with weight 0.

    Args:
        stream: any iterable.
        worker: place of this worker's batch in every round.
        workers: number of batches in a round.

    Attributes:
        seat: share that is handed out.
    """

    def __init__(self, stream: Iterable[Any], worker: int, workers: int) -> None:
        self.seat = Seat(worker, workers)
        self._stream = stream
        self._generators = _generators(stream) if isinstance(stream, DataLoader) else []
        self._began: dict[str, Any] = {}
        self._resumed: tuple[dict[str, Any], RandomStateToRestore] | None = None

    def __len__(self) -> int:
        return -(-max(0, len(self._stream) - self.seat.passed) // self.seat.of)  # type: ignore[arg-type]

    def share(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return len(self)

    @property
    def draws(self) -> bool:
        """Return False: each worker has a fixed share."""
        return False

    def passed(self, dealt_count: int) -> int:
        """Return the number of batches of the stream that all workers have taken; see `Batches`."""
        return self.seat.passed + dealt_count * self.seat.of

    def chance(self, *, under_way: bool) -> dict[str, Any]:
        """Return the state that determines the stream; see `Batches`."""
        return {"dealt": False, **(self._began if under_way else self._drawing())}

    def resume(self, state: dict[str, Any], random: RandomStateToRestore) -> int:
        """Begin the stream as in the other run, and skip the batches taken there; see `Batches`."""
        if state["passed"]:
            self._resumed = state, random
        else:
            set_generators(self._generators, state["generators"])
        return int(state["passed"])

    def _drawing(self) -> dict[str, Any]:
        return {"random": random_state(torch.device("cpu")), "generators": generator_states(self._generators)}

    def epoch(self, epoch: int, *, leaves_repeats_out: bool = False) -> Iterator[tuple[Any, float]]:
        """Return this worker's batches; each counts the same, except for a repeated one."""
        mine, seat, random = None, self.seat, None
        position, batch = -1, None
        if self._resumed is not None:
            (state, random), self._resumed = self._resumed, None
            set_random_state(state["random"], torch.device("cpu"))
            set_generators(self._generators, state["generators"])
        self._began = self._drawing()
        for position, batch in enumerate(self._stream, -seat.passed):
            if position < 0:
                if position == -1 and random is not None:
                    random.restore()
                continue
            if position % seat.of == seat.place:
                mine = batch
            if position % seat.of == seat.of - 1 and position // seat.of >= seat.taken:
                yield mine, 1.0
        rest = (position + 1) % seat.of
        if position >= 0 and rest and position // seat.of >= seat.taken:
            if seat.place < rest:
                yield mine, 1.0
            elif not leaves_repeats_out:
                yield batch, 0.0


class Shard:
    """This worker's batches; each iteration is the next epoch.

    Args:
        batches: batches to hand out.
        weight: recorder of each batch's weight.
        host: loop to which the shard belongs.
        number: number of this shard in the loop.
        dealt: maker of dealt batches, where a single worker resumes a run of several.
        name: name of the data set or loader.

    Attributes:
        name: the argument of that name.
        epoch: epoch of the next iteration, from 0; set it to resume.
        weight: weight of the latest batch; 0 where this worker had none left, and repeats one of the others'.
        repeats: whether evaluations, too, give every worker the same number of batches, the last ones with weight 0.
    """

    def __init__(
        self,
        batches: Batches,
        weight: StepWeight,
        host: Host,
        number: int = 0,
        dealt: Callable[[], Batches] | None = None,
        name: str = "",
    ) -> None:
        self.epoch = 0
        self.name = name
        self.weight = 1.0
        self.repeats = False
        self._batches = batches
        self._step_weight = weight
        self._host = host
        self._number = number
        self._dealt = dealt
        self._taken: int | None = None
        self._passed = 0, 0
        self._random: RandomStateToRestore | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def state(self, *, ends: bool = False) -> dict[str, Any]:
        """Return the next or unfinished epoch, the passed length of its order, and the state that determines the order.

        Args:
            ends: whether an epoch is over with its last batch, though the loop has not requested another.

        Raises:
            RequestError: an epoch with dynamic batches is unfinished.
        """
        dealt_count, seat = self._taken, self._batches.seat
        if dealt_count is None or (ends and dealt_count == self.steps):
            return {"epoch": self.epoch, "passed": 0, **self._batches.chance(under_way=False)}
        if self._batches.draws:
            raise RequestError(
                f"a shard of {self.name or 'a loader'} that is drawn has no place of its own in the middle of an epoch:"
                " save after the loop over it, or leave batches='dynamic' out"
            )
        passed = self._batches.passed(dealt_count)
        place = {"epoch": self.epoch - 1, "passed": passed, "before": seat.passed, "handed": dealt_count}
        return place | self._batches.chance(under_way=True)

    def resume(self, state: dict[str, Any], random: RandomStateToRestore) -> None:
        """Resume a shard from its state, with the same number of workers or another.

        Args:
            state: result of `state`.
            random: random state of this worker, the same for all its shards.
        """
        with restoring("the saved place in the data"):
            for name in ("epoch", "passed", "before", "handed"):
                counted(state.get(name, 0), name)
            checked(state.get("generators", []), tuple[str, ...])
            checked(state.get("seed", 0), int)
            if state["dealt"] and self._dealt is not None and isinstance(self._batches, EveryNth):
                self._batches = self._dealt()
            self.epoch = state["epoch"]
            self._passed = self.epoch, self._batches.resume(state, random)
            self._random = random

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        seat = self._batches.seat = self._host.seat(self._number, epoch)
        if self._passed[0] == epoch:
            seat = self._batches.seat = seat._replace(passed=self._passed[1])
        trains = torch.is_grad_enabled()
        if trains:
            self._host.rest()
        if trains and self._random is not None:
            self._random.restore_once()
        if seat.taken:
            share = self._share(epoch)
            seat = self._batches.seat = seat._replace(taken=min(seat.taken, share or seat.taken))
            self._host.left_out(seat.taken)
        own: list[float] = []
        outer = self._step_weight.use(own)
        at_end = False
        self._taken = seat.taken
        try:
            for taken, (batch, weight) in enumerate(self._yielded(epoch, trains=trains), seat.taken):
                self._taken, self.weight = taken + 1, weight
                if trains:
                    self._host.took(taken, self._share(epoch), batch)
                    self._step_weight.batch = self._number, epoch, taken
                own.append(weight)
                self._step_weight.use(own)
                yield batch
            at_end = True
            if trains and 0.0 in own and len(own) == taken + 1 - seat.taken:
                print(
                    "polyrhythm: this worker saw an image of another worker again in the last step of a loop that took "
                    "no optimizer step: to test, go through the shard inside of torch.no_grad(), where each image "
                    "counts once",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            self._step_weight.use(outer)
            self._taken = None
            if trains:
                self._host.through(self._share(epoch), broken_off=not at_end)

    def _yielded(self, epoch: int, *, trains: bool) -> Iterator[tuple[Any, float]]:
        """Yield the batches of an epoch; for training, dealt again where workers have failed or joined."""
        loader, leaves_out = self._batches, not trains and not self.repeats
        if not trains or not isinstance(loader, DealtLoader) or loader.draws:
            yield from loader.epoch(epoch, leaves_repeats_out=leaves_out)
            return
        taken = loader.seat.taken
        batches: Iterator[tuple[Any, float]] | None = None
        while True:
            if (seat := self._host.seat_again(taken, loader)) is not None:
                loader.seat = seat._replace(taken=taken, passed=loader.seat.passed)
                batches = None
            if batches is None:
                batches = loader.epoch(epoch)
            if (batch := next(batches, None)) is None:
                return
            yield batch
            taken += 1

    @property
    def steps(self) -> int:
        """Number of batches; 0 where it is unknown."""
        return self._length()

    def _share(self, epoch: int) -> int:
        """Return the number of batches of this worker; 0 where it is unknown."""
        try:
            return self._batches.share(epoch)
        except TypeError:
            return 0

    def _length(self) -> int:
        try:
            return len(self._batches)
        except TypeError:
            return 0


def merged_places(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the place of a shard from which each worker had taken its own number of batches, for other workers.

    Args:
        states: results of `Shard.state` on all workers, in their order.

    Raises:
        RequestError: they were in different epochs.
    """
    first = states[0]
    if len({each["epoch"] for each in states}) > 1:
        raise RequestError(
            f"the workers were in different epochs when this was saved: continue with {len(states)} workers, or "
            "save at "
            "the end of an epoch"
        )
    dealt_count = [each.get("handed", 0) for each in states]
    if len(set(dealt_count)) == 1 or not first["dealt"]:
        return first
    return {**next(each for each in states if "before" in each), "handed_to_each": dealt_count}


_NO_PARTS = (
    "shard: weights are for a DataLoader with a batch_size over a map-style data set: give "
    "such a one, or leave weights out"
)


def shard_of(
    loader: Iterable[Any],
    workers: Posted,
    weight: StepWeight,
    host: Host,
    number: int,
    drawing: Drawing | None = None,
    parts: Sequence[float] = (),
) -> Shard:
    """Divide a loader among the workers; a single worker gets the loader's own batches, of any loader.

    Args:
        loader: loader of the user.
        workers: numbers that worker 0 posts, with the rank of this worker.
        weight: recorder of each batch's weight.
        host: loop to which the shard belongs.
        number: number of the shard in the loop.
        drawing: source of drawn batches; None: each worker has a fixed share.
        parts: relative share of each worker in every step; empty: equal.

    Raises:
        RequestError: drawn batches or unequal shares were requested without a map-style loader.
    """
    name = type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__
    dealt: Callable[[], Batches] | None = None
    batches: Batches
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if drawing is not None and workers.size > 1:
            raise RequestError(
                "batches can be drawn of a DataLoader over a map-style data set only: give such a one, or leave deal "
                "out"
            )
        if parts and workers.size > 1:
            raise RequestError(_NO_PARTS)
        batches = EveryNth(loader, workers.rank, workers.size)
    elif workers.size > 1:
        batches = DealtLoader(loader, workers, drawing, parts)
    else:
        batches, dealt = EveryNth(loader, 0, 1), partial(DealtLoader, loader, workers)
    return Shard(batches, weight, host, number, dealt, name)
