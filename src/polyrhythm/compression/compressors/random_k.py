"""k numbers at random, the same ones on all ranks.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018, arXiv 1809.07599; Wangni, Wang, Liu, Zhang,
"Gradient sparsification for communication-efficient distributed optimization", NeurIPS 2018, arXiv 1710.09854, for the
scaled form.

    d_j = p_j for k indices j drawn without repetition, else 0        with feedback
    d_j = (n / k) p_j                                                 scaled: unbiased, variance (n/k - 1) |p|^2

All ranks draw the same indices from the seed, the step and the section, so only values travel, and their sum has as
many.

Payload: k values, in the order of their indices, which follow from the payload's step.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor

from polyrhythm.compression.compressor import Compressor, Place, bytes_of, check_length, values_of
from polyrhythm.compression.compressors.top_k import Density
from polyrhythm.compression.sparse import count_of
from polyrhythm.errors import RequestError

_MOST_DRAWN = 0.25
"""Share of the numbers up to which indices are drawn one by one; of more, a permutation of all takes less time."""


class RandomK(Compressor):
    """Few numbers travel, drawn by lot.

    Attributes:
        density: share of the numbers that travel.
        scaled: whether they are multiplied, so that the mean over all draws is right; then there is no feedback.
        seed: seed of the draws.
    """

    biased: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    density: Density = 0.01
    scaled: bool = False
    seed: int = 0

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("scaled") is True:
            if given.get("feedback"):
                raise RequestError(
                    "random_k: feedback of scaled numbers would make them grow: leave scaled or feedback out"
                )
            return {**given, "feedback": False}
        return given

    @property
    def is_biased(self) -> bool:
        return not self.scaled

    @property
    def loud(self) -> bool:
        return self.scaled and self.density < 1 / 2

    def nbytes(self, place: Place) -> int:
        return count_of(place.numbers, self.density) * place.dtype.itemsize

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        values = vector[self._indices(place)]
        return bytes_of(values * (place.numbers / max(1, values.numel())) if self.scaled else values)

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        total = torch.zeros(place.numbers, dtype=place.dtype)
        self.add_to(total, payload, place)
        return total

    def add_to(self, total: Tensor, payload: Tensor, place: Place) -> None:
        check_length(self.name, payload, self.nbytes(place))
        total[self._indices(place)] += values_of(payload, place.dtype)

    def _indices(self, place: Place) -> Tensor:
        draws = place.draws(self.seed, shared=True)
        return drawn(place.numbers, count_of(place.numbers, self.density), draws)


def drawn(numbers: int, count: int, draws: torch.Generator) -> Tensor:
    """Return `count` different indices below `numbers`, ascending; all sets of as many are equally likely."""
    if count >= numbers * _MOST_DRAWN:
        return torch.randperm(numbers, generator=draws)[:count].sort().values
    # The first `count` distinct values of a row of draws with few repetitions: without a pass over the
    # vector.
    found = torch.empty(0, dtype=torch.int64)
    while True:
        found = torch.cat([found, torch.randint(numbers, (count + count // 4 + 8,), generator=draws)])
        ordered, places = found.sort(stable=True)
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        ordered, places = ordered[first], places[first]
        if len(ordered) >= count:
            return ordered[places <= places.kthvalue(count).values]
