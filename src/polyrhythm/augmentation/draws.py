"""Random numbers of each sample's own: the same picture changes alike, whatever batch, worker or device it is in.

    number k of a sample = mix(mix(key) + k * golden)       mix: splitmix64's finaliser

A generator that hands numbers out in turn would tie a picture's change to the pictures before it. Here every sample has
a key, and its k-th number is a pure function of key and k: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as
easy as 1, 2, 3", SC 2011, for the idea; Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014, for the mixing.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_FRACTION_BITS = 53


class Draws:
    """Hands out random numbers, one a sample at a time; every call gives the next.

    Args:
        keys: (B,) int64, on the CPU; equal keys give equal numbers.
    """

    def __init__(self, keys: Tensor) -> None:
        self._stream = _Stream(keys)
        self._samples = slice(len(keys))
        self._given = 0

    def of(self, samples: slice) -> Draws:
        """Gives the draws of some of the samples, from the first number on; numbers are worked out once for all."""
        part = copy(self)
        part._samples, part._given = samples, 0
        return part

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Gives (B,) float64 numbers, even between `low` (included) and `high`."""
        fraction = self._stream.fraction(self._given)[self._samples]
        self._given += 1
        return low + (high - low) * fraction

    def integers(self, low: int, high: int) -> Tensor:
        """Gives (B,) int64 numbers, each from `low` to `high`, both included."""
        return (low + (self.uniform() * (high - low + 1)).floor()).to(torch.int64)

    def chance(self, probability: float) -> Tensor:
        """Gives (B,) bool, true with a probability."""
        return self.uniform() < probability


class _Stream:
    """All samples' numbers, one after the other, each worked out when it is first asked for."""

    def __init__(self, keys: Tensor) -> None:
        self._state = _mixed(keys)
        self._fractions: list[Tensor] = []

    def fraction(self, number: int) -> Tensor:
        """Gives every sample's number of that place, (B,) float64 from 0 to below 1."""
        while len(self._fractions) <= number:
            self._state = self._state + _GOLDEN
            bits = _shifted(_mixed(self._state), 64 - _FRACTION_BITS)
            self._fractions.append(bits.to(torch.float64) * 2.0**-_FRACTION_BITS)
        return self._fractions[number]


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shifts to the right as unsigned numbers: torch's shift copies the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
