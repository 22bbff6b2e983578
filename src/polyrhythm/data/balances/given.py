"""Parts in proportion to weights that the user gives."""

from __future__ import annotations

from polyrhythm.data.balance import Balance, Part, check_weights


class Given(Balance):
    """Parts by weight, as in `given(weights=[3, 1, 1])`.

    Attributes:
        weights: weights of each worker, above 0.
        by: meaning of a larger share: more images of a step, or, where models are averaged, more local steps.
    """

    weights: tuple[float, ...]
    by: Part = "images"

    @property
    def by_steps(self) -> bool:
        return self.by == "steps"

    def check(self, workers: int, batch: int) -> None:
        super().check(workers, batch)
        check_weights(self, self.weights, workers, batch)

    def parts(self, step: int) -> tuple[float, ...]:
        return self.weights
