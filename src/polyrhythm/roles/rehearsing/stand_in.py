"""A few numbers that stand for a whole model, so that strategies can be rehearsed on thousands of ranks.

    the model     [   bucket 2   |        bucket 1        | bucket 0 ]     n numbers
    the stand-in  [  k2 numbers  |       k1 numbers       |    k0    ]     E of them; each stands for n/E

Strategies run on the stand-in unchanged; only the bytes of what they send are counted as if all n numbers were there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, lcm

import torch
from torch import nn

from polyrhythm.communication.message import HEADER_BYTES, Kind, Message
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import ModelSizes

FEWEST_NUMBERS = 1024
"""Shards of servers are then true to 0.1 %."""
NUMBERS_OF_A_SLICE = 512
"""So the two numbers that travel with bucket 0, which fall to two of its slices, weigh 0.2 % of a slice."""
MOST_NUMBERS_TOGETHER = 1 << 24
"""Of all workers: 64 MiB of parameters, and as much of gradients."""
_HANDED_ON = frozenset([Kind.PUSH, Kind.PARAMETERS, Kind.EVENT])


@dataclass(frozen=True)
class StandIn:
    """The few numbers.

    Attributes:
        buckets: how many numbers each bucket has, in the order in which the backward pass fills them.
        scale: how many numbers of the model each of them stands for.
        dtype: of the model's numbers, and of these.
    """

    buckets: tuple[int, ...]
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    @classmethod
    def whole(cls, sizes: ModelSizes) -> StandIn:
        """Lets every number stand for itself, as real networks need it."""
        return cls(sizes.buckets, dtype=sizes.dtype)

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
        return cls(tuple(part * slices for part in parts), sizes.parameters / numbers, sizes.dtype)

    @property
    def numbers(self) -> int:
        """How many there are."""
        return sum(self.buckets)

    def flat(self) -> FlatParameters:
        """Makes one worker's copy: zeros, with a parameter a bucket."""
        return self._pattern.another()

    @cached_property
    def _pattern(self) -> FlatParameters:
        last_first = nn.ParameterList(
            torch.zeros(count, dtype=self.dtype) for count in reversed(self.buckets)
        )
        return FlatParameters(last_first, bucket_bytes=0, stands_for=self.scale)

    def nbytes(self, message: Message) -> int:
        """Gives the bytes that a message of the model would have; text in it counts as it is."""
        tensor = message.tensor
        if tensor is None or not tensor.is_floating_point():
            return message.nbytes
        return HEADER_BYTES + round(tensor.nbytes * self.scale)


def as_it_was_sent(message: Message) -> Message:
    """Gives what arrives of a message where all gradients and parameters are zeros, and nobody changes them.

    A copy of those would be the same, and of a small message is most of its cost; so it is of events, whose text is
    only read. All else is copied: vectors of collectives hold numbers that count workers, and are added up where they
    are.
    """
    return message if message.kind in _HANDED_ON else message.received()


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
