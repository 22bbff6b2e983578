"""Counter-based random numbers per sample: an image changes alike in any batch, on any worker or device.

    number k of a sample = mix(mix(key) + k * golden)       mix: splitmix64's finalizer

With a sequential generator, an image's change would depend on the images before it. Here every sample has a key,
and its k-th number is a pure function of key and k: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011, for the idea; Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, for
the mixing.
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
    """Random numbers for a batch; every call returns the next number of each sample.

    Args:
        keys: (B,) int64, on the CPU; equal keys yield equal numbers.
    """

    def __init__(self, keys: Tensor) -> None:
        self._state = [_mixed(keys)]
        self._fractions: list[Tensor] = []
        self._samples = slice(len(keys))
        self._given = 0

    def of(self, samples: slice) -> Draws:
        """Return the draws of some samples, starting at the first number; the numbers are computed once and shared."""
        part = copy(self)
        # Starting over at number 0 keeps a sample's numbers independent of how its batch is divided.
        part._samples, part._given = samples, 0
        return part

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return (B,) float64 numbers, uniform in [low, high)."""
        # parts of a batch share both lists, so that a number is computed once for all of them
        while len(self._fractions) <= self._given:
            self._state[0] = self._state[0] + _GOLDEN
            bits = _shifted(_mixed(self._state[0]), 64 - _FRACTION_BITS)
            self._fractions.append(bits.to(torch.float64) * 2.0**-_FRACTION_BITS)
        fraction = self._fractions[self._given][self._samples]
        self._given += 1
        return low + (high - low) * fraction

    def integers(self, low: int, high: int) -> Tensor:
        """Return (B,) int64 numbers, uniform in {low, …, high}."""
        return (low + (self.uniform() * (high - low + 1)).floor()).to(torch.int64)

    def chance(self, probability: float) -> Tensor:
        """Return (B,) bool, true with the given probability."""
        return self.uniform() < probability


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift right as unsigned integers: torch's shift copies the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


class RecordedDraws(Draws):
    """The same draws, with what was drawn of each sample as texts: `no` or `yes`, or a number in the unit of its range.

    Args:
        keys: see `Draws`.

    Attributes:
        texts: (B,) lists of texts, in the order of the draws.
    """

    def __init__(self, keys: Tensor) -> None:
        super().__init__(keys)
        self.texts: list[list[str]] = [[] for _ in keys]

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        drawn = super().uniform(low, high)
        self._note([f"{value:.2g}" for value in drawn.tolist()])
        return drawn

    def integers(self, low: int, high: int) -> Tensor:
        drawn = (low + (super().uniform() * (high - low + 1)).floor()).to(torch.int64)
        self._note([str(value) for value in drawn.tolist()])
        return drawn

    def chance(self, probability: float) -> Tensor:
        drawn = super().uniform() < probability
        self._note(["yes" if value else "no" for value in drawn.tolist()])
        return drawn

    def _note(self, texts: list[str]) -> None:
        for own, text in zip(self.texts, texts, strict=True):
            own.append(text)
