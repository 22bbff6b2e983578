"""A dry run: what is run without a model, data or results, so that only time and traffic are left.

A few numbers stand for the whole model, so that strategies can be run dry on thousands of ranks.

    the model     [   bucket 2   |        bucket 1        | bucket 0 ]     n numbers
    the stand-in  [  k2 numbers  |       k1 numbers       |    k0    ]     E of them; each stands for n/E

Strategies run on the stand-in unchanged; only the bytes of what they send are counted as if all n numbers
were there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, lcm

import torch
from torch import Tensor, nn

from polyrhythm.communication.message import HEADER_BYTES, Kind, Message, is_bare
from polyrhythm.data.balance import Balance
from polyrhythm.data.balances.off import Off
from polyrhythm.data.dealer import Dealer, Deck
from polyrhythm.data.dealing import batch_images, images_dealt, places_of, steps_per_epoch
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.strategy import Strategy, Traits
from polyrhythm.training.flat_parameters import FlatParameters, WeightlessParameters
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizer_plan import OptimizerPlan

FEWEST_NUMBERS = 1024
"""Shards of servers are then true to 0.1 %."""
NUMBERS_OF_A_SLICE = 512
"""So the two numbers that travel with bucket 0, which fall to two of its slices, weigh 0.2 % of a slice."""
MOST_NUMBERS_TOGETHER = 1 << 24
"""Of all workers: 64 MiB of parameters, and as much of gradients."""
_HANDED_ON = frozenset([Kind.PUSH, Kind.PART, Kind.PARAMETERS, Kind.EVENT])


@dataclass(frozen=True)
class StandIn:
    """The few numbers.

    Attributes:
        buckets: how many numbers each bucket has, in the order in which the backward pass fills them.
        scale: how many numbers of the model each of them stands for.
        dtype: of the model's numbers, and of these.
        shapes: of the model's parameters; empty: a matrix of one row for each bucket.
    """

    buckets: tuple[int, ...]
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def whole(cls, sizes: ModelSizes) -> StandIn:
        """Return a stand-in in which every number stands for itself, as real networks need it."""
        return cls(sizes.buckets, dtype=sizes.dtype, shapes=sizes.shapes)

    @classmethod
    def small(cls, sizes: ModelSizes, workers: int, servers: int, slices: int) -> StandIn:
        """Chooses so few numbers that thousands of workers find room, and so many that sizes stay true.

        The vector divides by the servers and each bucket by the slices, as those of a large model very nearly do.

        Args:
            sizes: of the model; a model that is small itself stands for itself.
            workers: how many hold a copy.
            servers: how many cut the vector into shards.
            slices: into how many pieces messages cut a bucket.
        """
        buckets = len(sizes.buckets)
        room = max(FEWEST_NUMBERS, MOST_NUMBERS_TOGETHER // workers)
        wanted = max(FEWEST_NUMBERS, NUMBERS_OF_A_SLICE * slices * buckets if slices > 1 else 0)
        step = lcm(slices, max(1, servers))
        numbers = step * ceil(max(min(wanted, room), slices * buckets) / step)
        if numbers >= sizes.parameters:
            return cls.whole(sizes)
        parts = _shared_out(numbers // slices, sizes.buckets)
        cut = tuple(part * slices for part in parts)
        return cls(cut, sizes.parameters / numbers, sizes.dtype, sizes.shapes)

    @property
    def numbers(self) -> int:
        """How many there are."""
        return sum(self.buckets)

    def flat(self, *, still: bool = False) -> FlatParameters:
        """Return one worker's copy: zeros, with a parameter a bucket.

        Args:
            still: whether nothing ever changes them.
        """
        return (self._still if still else self._pattern).another()

    @cached_property
    def _pattern(self) -> FlatParameters:
        return self._made(FlatParameters)

    @cached_property
    def _still(self) -> FlatParameters:
        return self._made(WeightlessParameters)

    def _made(self, kind: type[FlatParameters]) -> FlatParameters:
        last_first = nn.ParameterList(
            torch.zeros(count, dtype=self.dtype) for count in reversed(self.buckets)
        )
        shapes = self.shapes or tuple((1, round(count * self.scale)) for count in reversed(self.buckets))
        return kind(last_first, bucket_bytes=0, stands_for=self.scale, shapes=shapes)

    def nbytes(self, message: Message) -> int:
        """Return the bytes that a message of the model would have; text in it counts as it is."""
        tensor = message.tensor
        if tensor is None or not tensor.is_floating_point():
            return message.nbytes
        return HEADER_BYTES + round(tensor.nbytes * self.scale)


def as_it_was_sent(message: Message) -> Message:
    """Return what arrives of a message where all gradients and parameters are zeros, and nobody changes them.

    A copy of those would be the same, and of a small message is most of its cost; so it is of events, whose text is
    only read, and of compressed vectors, of which only the bytes are there. All else is copied: vectors of collectives
    hold numbers that count workers, and are added up where they are.
    """
    return message if message.kind in _HANDED_ON or is_bare(message.tensor) else message.received()


def _shared_out(parts: int, sizes: tuple[int, ...]) -> list[int]:
    """Shares out parts in proportion to sizes, at least one each."""
    whole = sum(sizes)
    exact = [parts * size / whole for size in sizes]
    shares = [max(1, int(share)) for share in exact]
    places = range(len(sizes))
    while sum(shares) < parts:
        shares[max(places, key=lambda place: exact[place] - shares[place])] += 1
    while sum(shares) > parts:
        shares[max(places, key=lambda place: (shares[place] > 1, shares[place] - exact[place]))] -= 1
    return shares


Gradient = Callable[[int, int, Tensor], None]
_REPORTS, _REPORTS_OF_A_WORKER = 4000, 20


def leave_zeros(worker: int, step: int, gradients: Tensor) -> None:
    """Leaves the gradients zero, as they are before every step."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A dry run: what is run, and for how long.

    Attributes:
        strategy: how the workers share the work.
        workers: how many there are.
        sizes: of the model.
        steps: that every worker takes.
        batch_size: of one worker, for counting images.
        epoch_images: after which an epoch is over, in steps that differ by at most one as in training; 0: all batches
            are full, and there is one epoch.
        drop_last: whether what makes no full step of an epoch is left out.
        optimizer: that the strategy runs on the stand-in, whose time is not modelled; None changes nothing.
        gradient: fills the flat gradients of a worker's step in place, given its index, the step and `(E,)` zeros.
        seed: of the times that steps take, where they are drawn.
        exact: whether every number of the model is there, as real networks need it.
        timings: whether workers tell where their steps go.
        draws: whether workers draw their batches from a common deal, as many as they would take with equal shares.
        still: whether all numbers are zeros that nothing changes, so that nobody need look at them or make them anew.
        balance: how a global batch is shared among workers that take their steps together.
        data: its name, for people.
        model: its name, for people.
    """

    strategy: Strategy
    workers: int
    sizes: ModelSizes
    steps: int
    batch_size: int = 64
    epoch_images: int = 0
    drop_last: bool = False
    optimizer: OptimizerConfig | None = None
    gradient: Gradient = leave_zeros
    seed: int = 0
    exact: bool = False
    timings: bool = False
    draws: bool = False
    still: bool = False
    balance: Balance = field(default_factory=Off)
    data: str = ""
    model: str = ""

    @cached_property
    def traits(self) -> Traits:
        """What holds for runs of this strategy with so many workers."""
        return self.strategy.traits(self.workers)

    @cached_property
    def faults(self) -> FaultPolicy:
        """What such a run does when a rank is lost."""
        return self.strategy.faults(self.workers)

    @cached_property
    def stand_in(self) -> StandIn:
        """The numbers that stand for the model on every worker."""
        if self.exact:
            return StandIn.whole(self.sizes)
        return StandIn.small(self.sizes, self.workers, self.traits.servers, self.traits.slices)

    @property
    def computes_nothing(self) -> bool:
        """Whether gradients are zero, and nothing is made of them."""
        return self.gradient is leave_zeros and self.optimizer is None

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps that every worker takes in an epoch."""
        if not self.epoch_images:
            return self.steps
        return steps_per_epoch(self._dealt(0), self.workers, self.batch_size)

    @property
    def epochs(self) -> int:
        """Epochs, the last one perhaps not whole."""
        return -(-self.steps // self.steps_per_epoch)

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The workers that draw batches together, a unit each."""
        return self.traits.units(self.workers)

    def dealer(self) -> Dealer:
        """Return what decides who gets which batches, where workers draw."""
        if not self.epoch_images:  # all batches are full: what is counted is batches, not images
            return Dealer(Deck((self.steps * len(self.units),), (1,)), [1] * len(self.units))
        dealt = tuple(self._dealt(epoch) for epoch in range(self.epochs))
        return Dealer(Deck(dealt, (self.batch_size,) * self.epochs), [len(unit) for unit in self.units])

    def largest_drawn(self, epoch: int, members: int) -> int:
        """Return the images of the largest batch that a unit of so many workers draws in an epoch."""
        together = members * self.batch_size
        return len(places_of(self._dealt(epoch), 0, together)) if self.epoch_images else together

    @property
    def images_drawn(self) -> int:
        """Images of the whole run, where workers draw their batches; else 0."""
        if not self.draws:
            return 0
        if not self.epoch_images:
            return self.steps * self.workers * self.batch_size
        return sum(self._dealt(epoch) for epoch in range(self.epochs))

    @cached_property
    def steps_per_report(self) -> int:
        """After how many steps a worker says what it has done: a bounded number of events, however many workers."""
        reports = min(_REPORTS_OF_A_WORKER, max(1, _REPORTS // self.workers))
        return -(-self.steps // reports)

    @cached_property
    def learning_rate(self) -> float:
        """Of every step."""
        return self.optimizer.lr if self.optimizer is not None else 0.0

    def images(self, worker: int, step: int) -> int:
        """Return the images in a worker's batch."""
        if not self.epoch_images:
            return self.batch_size
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        return batch_images(self._dealt(epoch), in_epoch, worker, self.workers, self.batch_size)

    def images_of_pipeline(self, step: int, pipeline: int, pipelines: int) -> int:
        """Return the images of one of the pipelines' batches of a step."""
        together = self.workers * self.batch_size
        if not self.epoch_images:
            return together // pipelines
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        return batch_images(self._dealt(epoch), in_epoch, pipeline, pipelines, together // pipelines)

    def images_together(self, step: int) -> int:
        """Return the images of all workers' batches of a step."""
        together = self.workers * self.batch_size
        if not self.epoch_images:
            return together
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        return len(places_of(self._dealt(epoch), in_epoch, together))

    def _dealt(self, epoch: int) -> int:
        """Return the images that an epoch deals."""
        together = self.workers * self.batch_size
        whole = images_dealt(self.epoch_images, [together], drop_last=self.drop_last)[0]
        before = epoch * steps_per_epoch(whole, 1, together)
        return min(whole, max(0, self.steps - before) * together)

    def plan(self, flat: FlatParameters) -> OptimizerPlan:
        """Return the plan of the optimiser."""
        if self.optimizer is None:
            return OptimizerPlan("SGD", (), 0.0)
        parameters = [view.parameter for view in flat.views]
        return OptimizerPlan.of(self.optimizer.create(parameters), flat)
