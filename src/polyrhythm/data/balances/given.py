"""Parts in proportion to weights that the user gives."""

from __future__ import annotations

from math import isfinite

from polyrhythm.data.balance import Balance, split
from polyrhythm.errors import RequestError


class Given(Balance):
    """Parts by weight, as in `given(weights=[3, 1, 1])`.

    Attributes:
        weights: of each worker, above 0.
    """

    weights: tuple[float, ...]

    def check(self, workers: int, batch: int) -> None:
        super().check(workers, batch)
        if len(self.weights) != workers:
            raise RequestError(
                f"balance {self}: {len(self.weights)} weights are not one for each of {workers} workers: "
                f"give {workers}"
            )
        for worker, weight in enumerate(self.weights):
            if not (isfinite(weight) and weight > 0):
                raise RequestError(
                    f"balance {self}: the weight {weight:g} of worker {worker} is not above 0: give its speed over "
                    "that of the others, or leave the worker out"
                )
        for worker, images in enumerate(split(batch, self.weights)):
            if images == 0:
                raise RequestError(
                    f"balance {self}: worker {worker} would have none of the {batch} images of a global batch: give "
                    "it a larger weight, or all a larger batch_size"
                )

    def parts(self, step: int) -> tuple[float, ...]:
        return self.weights
