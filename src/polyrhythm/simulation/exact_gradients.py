"""Gradients of whole numbers, of which every sum and mean is exact, so that one that is lost or doubled shows."""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

_ROWS, _LARGEST = 61, 3
_EXACT = 1 << 24
"""Up to here float32 holds every whole number."""


class ExactGradients:
    """A table of random rows; every worker's step takes its own.

    Numbers are multiples of all counts up to the number of workers, so the mean of any of them is a whole number.

    Args:
        numbers: of a gradient.
        workers: how many there are.
    """

    def __init__(self, numbers: int, workers: int) -> None:
        generator = torch.Generator().manual_seed(numbers)
        rows = torch.randint(-_LARGEST, _LARGEST, (_ROWS, numbers), generator=generator)
        rows += rows >= 0  # none is zero, so a lost one always shows
        self._rows = rows.float() * lcm(*range(1, workers + 1))

    @staticmethod
    def possible(workers: int, steps: int) -> bool:
        """Whether all sums stay exact in float32."""
        return workers < 20 and lcm(*range(1, workers + 1)) * _LARGEST * workers * steps < _EXACT

    def __call__(self, worker: int, step: int) -> Tensor:
        """Gives a worker's gradient, `(numbers,)`; not to be changed."""
        return self._rows[(17 * worker + step) % _ROWS]

    def fill(self, worker: int, step: int, gradients: Tensor) -> None:
        """Writes a worker's gradient."""
        gradients.copy_(self(worker, step))
