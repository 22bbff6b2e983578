"""A value of the test set that training is to reach, such as `top1=0.9`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated

METRICS = ("top1", "top5", "loss")
IMAGES = "images"
"""A number of trained images in place of a metric, for plans that train nothing."""


@dataclass(frozen=True)
class Target:
    """A value of the test set that is to be reached.

    Attributes:
        metric: `top1`, `top5` or `loss`; `images` where no test decides.
        value: minimum value (maximum, for `loss`), or number of images.
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `top1=0.9` or `loss=0.3`.

        Raises:
            RequestError: the text is neither, or no network can reach the value.
        """
        metric, _, number = (part.strip() for part in text.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if metric not in METRICS or not (0 < value < math.inf) or (metric != "loss" and value > 1):
            raise RequestError(
                f"cannot read the target {text!r}: write top1=0.9, top5=0.99 (fractions) or loss=0.3"
            )
        return cls(metric, value)

    def reached(self, *, loss: float, top1: float, top5: float) -> bool:
        """Whether a test with these results has reached it."""
        if self.metric == "loss":
            return loss <= self.value
        return (top1 if self.metric == "top1" else top5) >= self.value

    def reached_by(self, test: Evaluated) -> bool:
        """Whether an announced test has reached it."""
        return self.reached(loss=test.test_loss, top1=test.test_top1, top5=test.test_top5)

    def __str__(self) -> str:
        """Return it as people read it."""
        if self.metric == IMAGES:
            return f"{self.value:,.0f} images"
        if self.metric == "loss":
            return f"loss {self.value:g}"
        return f"{self.metric.replace('top', 'top-')} {100 * self.value:.1f} %"
