"""Balance: per-worker shares of a global batch of fixed size, according to the workers' speeds.

    t_i(b) = s_i (a_i + c_i b)      seconds of worker i for b images; a_i, c_i: its shape, s_i: how slow it is now
    T = (B + sum_i a_i / c_i) / sum_i 1 / (s_i c_i),    b_i = (T / s_i - a_i) / c_i,    sum_i b_i = B

`Controller` tracks the speeds. s_i is a mean of measured seconds over the seconds that the shape predicts: of
all measurements at first, later a running mean. It jumps to the latest measurement after two consecutive
deviations of more than a fifth. An unknown shape is estimated from the times before and after a change: with
shares in proportion to speed alone, each step would leave the share a / t of the error.
Parts change only where the slowest worker's time falls by more than the dead band: by a twentieth, or once parts have
stayed as they are for a while by a hundredth, and by as many standard errors e of those means as noise alone rarely
makes:

    P(any of N means is off by z e) < N exp(-z^2 / 2) = 1 / 20        z = sqrt(2 ln 20 N)

Small corrections take back what a slow while of a machine has left behind; each is followed by a longer rest, so that
they do not oscillate. A careful controller, where no option asks for other shares, needs a gain of a fiftieth, and
1 / 20 above is 1e-6. A deviation then has to exceed noise as well, and counts only once a second one has followed.

It is a pure function of what it observes, so ranks that observe the same decide the same.

C. Chen, Q. Weng, W. Wang, B. Li, B. Li, "Semi-dynamic load balancing: efficient distributed learning in non-dedicated
environments", SoCC 2020; S. Tyagi, P. Sharma, "Taming resource heterogeneity in distributed ML training with dynamic
batching", ACSOS 2020. The latter scales every worker's batch by itself, so that the global batch drifts; here it is
exactly B, by largest remainders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log, sqrt
from typing import ClassVar, Literal

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

BALANCES = "polyrhythm.data.balances"
"""The folder that lists the choices."""

BAND = 0.05
"""Least gain for which parts change at once."""
_SMALL, _SMALL_CAREFUL = 0.01, 0.02
"""Least gain once parts have stayed as they are for a while."""
_REST, _LONGER = 10, 3
"""Measurements after a change until a small gain counts, and the factor by which they grow with each such change."""
_BY_CHANCE, _BY_CHANCE_CAREFUL = 1 / 20, 1e-6
"""Upper bound of the probability that noise alone exceeds the dead band."""
_MOST_KEPT = 0.8
_OFF = 1.2
_NOISE_KEPT, _NOISE_AT_FIRST = 0.8, 0.08
_LEARNED_FROM = 0.1
_FIT_KEPT = 0.8

Part = Literal["images", "steps"]
"""Meaning of a larger share: more images in a step, or more local steps."""


class Balance(Config):
    """A rule for the workers' parts of a global batch.

    Attributes:
        follows: whether parts follow measured speeds.
        optional: whether equal parts will do where the rule cannot be followed.
    """

    follows: ClassVar[bool] = False
    optional: ClassVar[bool] = False

    def parts(self, step: int) -> tuple[float, ...]:
        """Return the relative shares of all workers after `step` steps; empty: all alike, or as measured."""
        return ()

    @property
    def begins_with(self) -> tuple[float, ...]:
        """Relative parts of all workers until speeds have been measured, where parts follow them; empty: all alike."""
        return ()

    @property
    def by_steps(self) -> bool:
        """Whether a worker with a larger part takes more steps of its own with it, where models are averaged."""
        return False

    def check(self, workers: int, batch: int) -> None:
        """Reject a balance that does not work for this number of workers and this global batch size.

        Raises:
            RequestError: the balance is not supported; the message has the reason and the alternatives.
        """
        if batch < workers and not self.optional:
            raise RequestError(
                f"balance {self}: a global batch of {batch} cannot be shared by {workers} workers: "
                f"give at least {workers} images"
            )


def check_weights(balance: Balance, weights: Sequence[float], workers: int, batch: int) -> None:
    """Reject weights that leave a worker without images.

    Args:
        balance: balance for which they were given.
        weights: one for each worker.
        workers: number of workers.
        batch: images of a global batch.

    Raises:
        RequestError: the weights are not supported; the message has the reason and the alternatives.
    """
    if len(weights) != workers:
        raise RequestError(
            f"balance {balance}: {len(weights)} weights are not one for each of {workers} workers: give {workers}"
        )
    for worker, weight in enumerate(weights):
        if not (isfinite(weight) and weight > 0):
            raise RequestError(
                f"balance {balance}: the weight {weight:g} of worker {worker} is not above 0: give its speed over "
                "that of the others, or leave the worker out"
            )
    for worker, images in enumerate(split(batch, weights)):
        if images == 0:
            raise RequestError(
                f"balance {balance}: worker {worker} would have none of the {batch} images of a global batch: give "
                "it a larger weight, or all a larger batch_size"
            )


class Decided(Balance):
    """Parts that an earlier run has decided on.

    Attributes:
        changes: pairs of a number of steps and the shares from then on, oldest first; 0 for workers that a
            change does not concern.
        by: meaning of a larger share, as in the earlier run.
    """

    changes: tuple[tuple[int, tuple[int, ...]], ...]
    by: Part = "images"

    @property
    def by_steps(self) -> bool:
        return self.by == "steps"

    def parts(self, step: int) -> tuple[float, ...]:
        found = [sizes for since, sizes in reversed(self.changes) if since <= step]
        return tuple(next(filter(None, column), 0) for column in zip(*found, strict=True))


def split(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide a whole number in proportion to weights, by largest remainders; of equal ones the first is rounded up.

    Args:
        total: number to divide, at least 0.
        weights: weights, at least 0 each, with a positive sum.
    """
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda place: (parts[place] - exact[place], place))
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return tuple(parts)


@dataclass(frozen=True)
class Shape:
    """Seconds of a worker's step as a function of its images, up to a factor.

    Attributes:
        fixed: seconds of a step without images.
        per_image: additional seconds of each image.
    """

    fixed: float = 0.0
    per_image: float = 1.0

    def seconds(self, images: float) -> float:
        """Return the seconds of a step of `images` images."""
        return self.fixed + self.per_image * images


class Controller:
    """The parts of a global batch, which follow the workers' speeds.

    Args:
        batch: B, images of a global batch; at least one a worker.
        workers: number of workers.
        band: minimum gain for an immediate change, regardless of its certainty.
        least: minimum number of images of a worker, as far as there are enough.
        shapes: shapes of the workers; empty: seconds are proportional to images.
        weights: relative parts to begin with; empty: all alike.
        careful: whether a change needs more certainty and gain.

    Attributes:
        sizes: images of each worker in a global batch; they sum to `batch`.
        most: limit of each worker, from its memory.
    """

    def __init__(
        self,
        batch: int,
        workers: int,
        *,
        band: float = BAND,
        least: int = 1,
        shapes: Sequence[Shape] = (),
        weights: Sequence[float] = (),
        careful: bool = False,
    ) -> None:
        self.batch = batch
        self.sizes = split(batch, weights or [1.0] * workers)
        self.most = [inf] * workers
        self._band = band
        self._small = _SMALL_CAREFUL if careful else _SMALL
        by_chance = _BY_CHANCE_CAREFUL if careful else _BY_CHANCE
        self._certainty = sqrt(2 * log(workers / by_chance))
        # Two deviations in turn are as rare as one that is certain.
        self._outlier = self._certainty * sqrt(0.5) if careful else 0.0
        self._careful = careful
        self._least = min(least, batch // workers)
        self._learns = not shapes
        self._shapes = list(shapes) or [Shape()] * workers
        self._fits = [(0.0, 0.0)] * workers
        self._before: list[tuple[float, float]] = []
        self._slowness: list[float] = []
        self._off = [0] * workers
        self._noise = [_NOISE_AT_FIRST] * workers
        self._since, self._rest = 0, _REST
        self._variance = [1.0] * workers
        """Variance of each running mean, relative to that of one measurement."""

    def resize(self, batch: int) -> None:
        """Continue with another global batch, shared in the same proportion."""
        if batch != self.batch:
            self.sizes = split(batch, self.sizes)
            self.batch = batch

    def observe(self, seconds: Sequence[float], images: Sequence[float]) -> bool:
        """Record the times of the workers' steps, and decide on the shares.

        Args:
            seconds: seconds of computing, a step of each worker.
            images: number of its images.

        Returns:
            Whether parts have changed.
        """
        observed = list(zip(seconds, images, strict=True))
        if self._learns and self._before:
            for worker, (before, after) in enumerate(zip(self._before, observed, strict=True)):
                self._learn(worker, before, after)
        self._before = observed
        found = [t / shape.seconds(b) for (t, b), shape in zip(observed, self._shapes, strict=True)]
        if self._slowness:
            for worker, now in enumerate(found):
                self._follow(worker, now)
        else:
            self._slowness = found
        wanted = self._solved()
        now_s, then_s = self._slowest(self.sizes), self._slowest(wanted)
        too_large = any(size > most for size, most in zip(self.sizes, self.most, strict=True))
        gain = now_s / then_s - 1
        error = max(noise * sqrt(part) for noise, part in zip(self._noise, self._variance, strict=True))
        sure = self._certainty * error
        self._since += 1
        large = gain >= max(self._band, sure)
        small = gain >= max(self._small, sure) and self._since >= self._rest
        if wanted == self.sizes or not (too_large or large or small):
            return False
        self._rest = _REST if too_large or large else _LONGER * self._rest
        self._since = 0
        self.sizes = wanted
        return True

    @property
    def doubts(self) -> bool:
        """Whether the next measurement decides on a deviation of the last one."""
        return self._careful and any(self._off)

    @property
    def unevenness(self) -> float:
        """By what share the slowest worker's image takes longer than the fastest one's."""
        each = [slow * shape.per_image for slow, shape in zip(self._slowness, self._shapes, strict=True)]
        return max(each) / min(each) - 1 if each else 0.0

    def _follow(self, worker: int, now: float) -> None:
        ratio = now / self._slowness[worker]
        off = max(_OFF, 1 + self._outlier * max(self._noise))
        direction = (ratio > off) - (ratio < 1 / off)
        if direction and direction == self._off[worker]:
            self._begin_with(worker, now)
            return
        self._off[worker] = direction
        if direction and self._careful:  # perhaps an interruption: the next measurement decides
            return
        if not direction:
            self._noise[worker] = _NOISE_KEPT * self._noise[worker] + (1 - _NOISE_KEPT) * abs(ratio - 1)
        variance = self._variance[worker]
        new = max(1 - _MOST_KEPT, variance / (variance + 1))
        self._slowness[worker] += new * (now - self._slowness[worker])
        self._variance[worker] = (1 - new) ** 2 * variance + new**2

    def _begin_with(self, worker: int, slowness: float) -> None:
        self._slowness[worker], self._variance[worker], self._off[worker] = slowness, 1.0, 0

    def _learn(self, worker: int, before: tuple[float, float], after: tuple[float, float]) -> None:
        """Fit a worker's shape, r + b, to its times before and after its part changed: t'/t = (r + b')/(r + b)."""
        (t0, b0), (t1, b1) = before, after
        if abs(b1 / b0 - 1) < _LEARNED_FROM:
            return
        change, rest = t1 / t0 - 1, b1 - t1 / t0 * b0
        products, squares = (_FIT_KEPT * each for each in self._fits[worker])
        products, squares = products + change * rest, squares + change**2
        self._fits[worker] = products, squares
        most = 2 * self.batch / len(self.sizes)
        self._shapes[worker] = shape = Shape(min(most, max(0.0, products / squares)) if squares else 0.0)
        self._begin_with(worker, t1 / shape.seconds(b1))

    def _slowest(self, sizes: Sequence[int]) -> float:
        whole = zip(self._slowness, self._shapes, sizes, strict=True)
        return max(slow * shape.seconds(size) for slow, shape, size in whole)

    def _solved(self) -> tuple[int, ...]:
        """Return the parts for which all take equally long, within their limits."""
        fixed: dict[int, float] = {}
        while True:
            free = [worker for worker in range(len(self.sizes)) if worker not in fixed]
            left = self.batch - sum(fixed.values())
            exact = dict(fixed) | self._level(free, left)
            outside = {
                worker: bound
                for worker in free
                if (bound := min(max(exact[worker], self._least), self.most[worker])) != exact[worker]
            }
            if not outside:
                break
            # Limits of one kind at a time: the kind with the larger total excess or lack.
            over = sum(exact[worker] - bound for worker, bound in outside.items())
            kept = {
                worker: bound for worker, bound in outside.items() if (exact[worker] > bound) == (over >= 0)
            }
            fixed |= kept or outside
            if len(fixed) == len(self.sizes):  # limits leave no choice: the difference is spread
                exact = {worker: float(fixed[worker]) for worker in fixed}
                break
        return split(self.batch, [max(exact[worker], 1e-9) for worker in range(len(self.sizes))])

    def _level(self, free: Sequence[int], images: float) -> dict[int, float]:
        rates = {worker: 1 / (self._slowness[worker] * self._shapes[worker].per_image) for worker in free}
        starts = {worker: self._slowness[worker] * self._shapes[worker].fixed for worker in free}
        seconds = (images + sum(starts[each] * rates[each] for each in free)) / sum(rates.values())
        return {worker: (seconds - starts[worker]) * rates[worker] for worker in free}
