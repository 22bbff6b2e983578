"""Parts follow the workers' measured speeds, from the first steps on."""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.data.balance import Balance, Part, check_weights
from polyrhythm.errors import RequestError


class Measured(Balance):
    """Parts by speed; see `data/balance.py`.

    Attributes:
        weights: relative parts of all workers to begin with; default: all alike.
        profile: alternative to `weights`: a cluster file written by `polyrhythm profile`; the hosts' speeds
            are the weights of their workers, host by host.
        by: meaning of a larger share: more images of a step, or, where models are averaged, more local steps.
    """

    follows: ClassVar[bool] = True

    weights: tuple[float, ...] = ()
    profile: str = ""
    by: Part = "images"

    @property
    def by_steps(self) -> bool:
        return self.by == "steps"

    @property
    def begins_with(self) -> tuple[float, ...]:
        return self.weights

    def check(self, workers: int, batch: int) -> None:
        super().check(workers, batch)
        if self.weights and self.profile:
            raise RequestError(
                f"balance {self}: weights and a profile both set the initial sizes: give one of them"
            )
        if self.weights:
            check_weights(self, self.weights, workers, batch)
