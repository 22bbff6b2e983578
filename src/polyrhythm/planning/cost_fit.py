"""Costs fitted to measured seconds, with few evaluations of an expensive simulation and a cheap model between them.

In virtual time a step is a longest path, so its seconds are nearly a maximum of sums of costs:

    T_i(x) ~ a_i max_k (T_ik + g_ik . (x - x_k))     x: costs (step seconds, latencies, 1 / bandwidths), more is slower
                                                     k: points at which the simulation and its slopes g are known
    minimize  sum_i ln²(T_i(x) / measured_i)         on the model (Levenberg-Marquardt), then simulate at the minimum,
                                                     set a_i so that the model is exact there, and repeat
    interval  of x_j: where the minimum over all other costs stays below  SSE + t² s²     (profile likelihood, 80 %)

J. E. Kelley, "The cutting-plane method for solving convex programs", SIAM 1960; J. Bandler et al., "Space mapping
technique for electromagnetic optimization", IEEE MTT 1994; A. Raue et al., "Structural and practical identifiability
analysis of partially observed dynamical models by exploiting the profile likelihood", Bioinformatics 2009.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from polyrhythm.planning.intervals import t_quantile

Numbers = NDArray[np.float64]
Simulate = Callable[[int, Numbers], float]
"""Returns the seconds of a measured set-up, by its place, at some costs relative to the first guess."""
Ask = tuple[int, Numbers]
SimulateAll = Callable[[Sequence[Ask]], Sequence[float]]
"""As `Simulate` for several set-ups and costs, which do not depend on each other."""

ASSUMED_ERROR = 0.05
"""Relative error of a measurement, where there are as many unknowns as measurements."""
_LEAST_ERROR = 0.005  # dry runs with drawn step times are no more exact
_STEP = 0.3  # in logarithms, for slopes: where arrival decides, seconds jump by a percent or two
_EXACT, _SURPRISE = 5e-4, 0.05  # in logarithms: the fit is exact; slopes are computed again
_TRUSTED = 0.2  # share of what is missed: a change of seconds that the model is trusted with
_ROUNDS, _FULL_ROUNDS = 6, 2  # shorter and full simulations at a minimum of the models
_EXACT_ROUNDS = 16  # full ones with as many unknowns as measurements
_SHARES = (1.0, 0.5, 1.5, 0.25, 2.0, 0.75, 3.0)  # shares of the way to the model's minimum, tried in turn
_FAILURES = 2  # rounds in a row without a gain, with more measurements than unknowns
_GAIN = 0.03  # share of the squared error that another round must promise to take away
_ABOVE = 0.02
_FARTHEST = 2.0  # a logarithm moves at most so much between two simulations
_FELT = 0.02  # slope in logarithms
_FIRST_FELT = (1.5, 3.0, 4.5, 6.0, 7.5, 9.0)  # larger logarithms at which a cost that overlaps is first felt
_PROBES = (math.log(4), math.log(32))
_WIDEST = math.log(1000)


@dataclass(frozen=True)
class _Plane:
    """Seconds and their slopes at one point."""

    at: Numbers
    seconds: float
    slopes: Numbers

    def feels(self, place: int) -> bool:
        """Return whether a cost changes the seconds enough for the search to move it."""
        return bool(self.slopes[place] * self.at[place] > _FELT / 10 * self.seconds)

    def seconds_at(self, costs: Numbers) -> float:
        """Return the seconds of the plane at some costs."""
        return self.seconds + float(self.slopes @ (costs - self.at))


@dataclass
class _Response:
    """The cheap model of one set-up's seconds."""

    planes: list[_Plane] = field(default_factory=list)
    factor: float = 1.0

    def seconds(self, costs: Numbers) -> float:
        """Return its seconds at some costs."""
        raw = max(plane.seconds_at(costs) for plane in self.planes)
        return self.factor * max(raw, 1e-3 * self.planes[-1].seconds)

    def pin(self, costs: Numbers, seconds: float) -> None:
        """Make it exact at a point; planes that are above it there, as chords over a bend are, are dropped."""
        low = [plane for plane in self.planes if plane.seconds_at(costs) <= (1 + _ABOVE) * seconds]
        self.planes = low or self.planes
        self.factor = 1.0
        self.factor = seconds / self.seconds(costs)


@dataclass(frozen=True, kw_only=True)
class CostFit:
    """Fitted costs, relative to the first guess.

    Attributes:
        costs: costs that fit best; 1 where the measurements leave that open.
        low: lower end of the interval of each; 0 where there is none.
        high: upper end; infinite where there is none.
        seconds: simulated for every measurement at `costs`.
        left_out: seconds of every measurement by a fit to all others; not a number where those are too few.
        slopes: (measurements, costs) of the logarithms of seconds.
        error: standard deviation of a measurement's logarithm that the intervals assume.
    """

    costs: Numbers
    low: Numbers
    high: Numbers
    seconds: Numbers
    left_out: Numbers
    slopes: Numbers
    error: float

    @property
    def determined(self) -> NDArray[np.bool_]:
        """Whether each cost has an interval with two ends."""
        found: NDArray[np.bool_] = (self.low > 0) & np.isfinite(self.high)
        return found


def fit_costs(
    simulate: Simulate,
    measured: Sequence[float],
    matters: NDArray[np.bool_],
    *,
    simulate_all: SimulateAll | None = None,
    compare_all: SimulateAll | None = None,
    same_as: Sequence[int] | None = None,
) -> CostFit:
    """Fit costs to measured seconds.

    Args:
        simulate: the expensive simulation.
        measured: seconds, positive.
        matters: (measurements, costs); False where a cost cannot change a set-up's seconds.
        simulate_all: the same for several at a time; None: one after another.
        compare_all: seconds of shorter simulations, for ratios alone; None: `simulate_all`.
        same_as: place of the first measurement of the same set-up, for every measurement; None: all differ.
    """
    places = range(len(measured)) if same_as is None else same_as
    runs = _Runs(simulate_all or (lambda asks: [simulate(*ask) for ask in asks]), matters, places)
    ratios = runs if compare_all is None else _Runs(compare_all, matters, places)
    return _Fit(runs, ratios, np.asarray(measured, dtype=np.float64), matters).result()


class _Runs:
    """Simulated seconds by set-up and costs, so that none is simulated twice."""

    def __init__(self, simulate_all: SimulateAll, matters: NDArray[np.bool_], same_as: Sequence[int]) -> None:
        self._simulate_all = simulate_all
        self._matters = matters
        self._same_as = same_as
        self._known: dict[tuple[int, bytes], float] = {}

    def seconds(self, asks: Sequence[tuple[int, Numbers]]) -> Numbers:
        """Return the seconds of set-ups at logarithms of costs."""
        keys = [self._key(*ask) for ask in asks]
        missing = {key: ask for key, ask in zip(keys, asks, strict=True) if key not in self._known}
        found = self._simulate_all([(self._same_as[row], np.exp(logs)) for row, logs in missing.values()])
        self._known.update(zip(missing, found, strict=True))
        return np.asarray([self._known[key] for key in keys])

    def _key(self, row: int, logs: Numbers) -> tuple[int, bytes]:
        return self._same_as[row], np.where(self._matters[row], logs, 0.0).tobytes()


class _Fit:
    """One fit: its models and the best point that was simulated."""

    def __init__(self, runs: _Runs, ratios: _Runs, measured: Numbers, matters: NDArray[np.bool_]) -> None:
        self._runs = runs
        self._ratios = ratios
        self._measured = measured
        self._matters = matters
        self._rows = range(len(measured))
        self._longer = np.ones(len(measured))  # seconds of the simulations over those of the shorter ones
        self._models = [_Response() for _ in self._rows]

    def result(self) -> CostFit:
        """Fit, and find the intervals."""
        start = np.zeros(self._matters.shape[1])
        seconds = self._simulated(start)
        self._longer = seconds / self._ratios.seconds([(row, start) for row in self._rows])
        self._learn(self._rows, start, seconds)
        logs, seconds = self._search(self._where_costs_are_felt(start))
        again = self._where_costs_are_felt(logs)
        if (again != logs).any():  # at the first guess, another cost that is too large hid one
            found, there = self._search(again)
            if _squares(there / self._measured) < _squares(seconds / self._measured):
                logs, seconds = found, there
        felt = np.abs(self._slopes(logs)).max(axis=0) > _FELT
        missed = np.log(seconds / self._measured)
        spare = len(missed) - int(felt.sum())
        error = max(math.sqrt(float(missed @ missed) / spare), _LEAST_ERROR) if spare > 0 else ASSUMED_ERROR
        low, high = self._intervals(logs, (t_quantile(spare) * error) ** 2)
        undetermined = np.flatnonzero(((low == 0) | np.isinf(high)) & (logs != 0))
        kept = self._with_guesses(logs, undetermined)
        kept_seconds = self._simulated(kept)
        if _squares(kept_seconds / self._measured) <= float(missed @ missed) + _unseen(len(missed)):
            logs, seconds = kept, kept_seconds
        slopes = self._slopes(logs)
        return CostFit(
            costs=np.exp(logs),
            low=low,
            high=high,
            seconds=seconds,
            left_out=np.asarray([self._without(row, len(logs)) for row in self._rows]),
            slopes=slopes,
            error=error,
        )

    def _with_guesses(self, logs: Numbers, undetermined: NDArray[np.intp]) -> Numbers:
        """Return logarithms that fit as well, with as many of the undetermined ones as may be at the first guess."""
        free = np.ones(len(logs), dtype=bool)
        missed = self._missed(logs, self._rows)
        for place in undetermined:
            free[place] = False
            tried = self._minimum(np.where(free, logs, 0.0), free, self._rows)
            left = self._missed(tried, self._rows)
            if float(left @ left) <= float(missed @ missed) + _unseen(len(left)):
                logs = tried
            else:
                free[place] = True
        return logs

    def _where_costs_are_felt(self, start: Numbers) -> Numbers:
        """Return costs at which every cost changes some set-up that is too fast at the start, as far as they are found.

        Only costs that have changed nothing so far are made larger.
        """
        logs, base = start, self._simulated(start)
        known = self._ratios.seconds([(row, start) for row in self._rows])
        faster = [row for row in self._rows if base[row] < (1 - _FELT) * self._measured[row]]
        unfelt = [
            place
            for place in range(len(start))
            if not any(plane.feels(place) for model in self._models for plane in model.planes)
        ]
        for place in unfelt:
            rows = [row for row in faster if self._matters[row, place]]

            tried = [_moved(logs, place, probe) for probe in _FIRST_FELT]
            limits = (1 + _FELT) * known[rows]
            first = bisect_left(tried, True, key=partial(self._exceeds, rows, limits))
            if first < len(tried):
                logs = tried[first]
        if logs is not start:
            self._learn(self._rows, logs, self._estimated(logs))
        return logs

    def _exceeds(self, rows: Sequence[int], limits: Numbers, logs: Numbers) -> bool:
        return bool((self._ratios.seconds([(row, logs) for row in rows]) > limits).any())

    def _search(self, logs: Numbers) -> tuple[Numbers, Numbers]:
        """Return the best logarithms of costs that were simulated, and the seconds there.

        With more measurements than unknowns, the search begins with shorter simulations.
        """
        if len(self._rows) > len(logs):
            logs = self._improved(logs, self._estimated, _ROUNDS)
        best = self._improved(logs, self._simulated, _FULL_ROUNDS)
        return best, self._simulated(best)

    def _improved(self, logs: Numbers, simulated: Callable[..., Numbers], rounds: int) -> Numbers:
        """Return the best logarithms of costs after some rounds of simulations at the minimum of the models."""
        exact = len(self._rows) == len(logs)
        best, best_seconds, failures = logs, simulated(logs), 0
        best_missed = np.log(best_seconds / self._measured)
        for _ in range(_EXACT_ROUNDS if exact else rounds):
            if np.abs(best_missed).max() < _EXACT:
                break
            self._pin(best, best_seconds)
            proposed = self._minimum(best, np.ones(len(logs), dtype=bool), self._rows)
            promised = self._missed(proposed, self._rows)
            miss = float(best_missed @ best_missed)
            enough = not failures and miss - float(promised @ promised) <= _GAIN * miss
            if enough or (failures >= _FAILURES and not exact):
                break
            share = _SHARES[failures % len(_SHARES)]
            logs = best + share * np.clip(proposed - best, -_FARTHEST, _FARTHEST)
            expected = np.exp(self._missed(logs, self._rows)) * self._measured
            seconds = expected.copy()
            trusted = min(_TRUSTED * math.sqrt(miss / len(self._rows)), _LEAST_ERROR)
            moved = [
                row
                for row in self._rows
                if exact or abs(math.log(expected[row] / best_seconds[row])) > trusted
            ]
            seconds[moved] = simulated(logs, moved)
            surprising = np.abs(np.log(seconds / expected)) > _SURPRISE
            self._learn([row for row in self._rows if surprising[row]], logs, seconds)
            missed = np.log(seconds / self._measured)
            if float(missed @ missed) < miss:
                best, best_seconds, best_missed, failures = logs, seconds, missed, 0
            else:
                failures += 1
        self._pin(best, simulated(best))
        return best

    def _simulated(self, logs: Numbers, rows: Sequence[int] | None = None) -> Numbers:
        return self._runs.seconds([(row, logs) for row in (self._rows if rows is None else rows)])

    def _estimated(self, logs: Numbers, rows: Sequence[int] | None = None) -> Numbers:
        """Return the seconds of shorter simulations, as much longer as at the first guess."""
        rows = list(self._rows if rows is None else rows)
        return self._longer[rows] * self._ratios.seconds([(row, logs) for row in rows])

    def _pin(self, logs: Numbers, seconds: Numbers) -> None:
        for row in self._rows:
            self._models[row].pin(np.exp(logs), seconds[row])

    def _learn(self, rows: Sequence[int], logs: Numbers, seconds: Numbers) -> None:
        """Add the seconds and slopes of set-ups at a point to their models."""
        steps = _STEP * np.eye(len(logs))
        sides = [(row, place) for row in rows for place in np.flatnonzero(self._matters[row])]
        at, beyond = np.split(
            self._ratios.seconds(
                [(row, logs) for row, _ in sides] + [(row, logs + steps[place]) for row, place in sides]
            ),
            2,
        )
        slopes = np.zeros((len(seconds), len(logs)))
        for (row, place), times in zip(sides, beyond / at, strict=True):
            grown = (times - 1) * seconds[row]
            slopes[row, place] = max(0.0, grown / (math.exp(logs[place] + _STEP) - math.exp(logs[place])))
        for row in rows:
            self._models[row].planes.append(_Plane(np.exp(logs), seconds[row], slopes[row]))

    def _missed(self, logs: Numbers, rows: Sequence[int]) -> Numbers:
        costs = np.exp(logs)
        return np.asarray([math.log(self._models[row].seconds(costs) / self._measured[row]) for row in rows])

    def _minimum(self, logs: Numbers, free: NDArray[np.bool_], rows: Sequence[int]) -> Numbers:
        """Return the minimum on the model over the free costs, from a start."""
        at, missed, damping = logs.copy(), self._missed(logs, rows), 1e-3
        places = np.flatnonzero(free)
        for _ in range(60):
            columns = []
            for place in places:
                moved = at.copy()
                moved[place] += 1e-4
                columns.append((self._missed(moved, rows) - missed) / 1e-4)
            if not columns:
                break
            slopes = np.stack(columns, axis=1)
            felt = np.abs(slopes).max(axis=0) > _FELT / 10
            if not felt.any():
                break
            own = slopes[:, felt]
            square = own.T @ own
            move = np.zeros_like(at)
            move[places[felt]] = np.clip(
                -np.linalg.solve(square + damping * np.diag(np.diag(square)), own.T @ missed), -1.0, 1.0
            )
            tried = self._missed(at + move, rows)
            if tried @ tried < missed @ missed:
                close = float(np.abs(move).max()) < 1e-7
                at, missed, damping = at + move, tried, damping / 10
                if close:
                    break
            else:
                damping *= 10
                if damping > 1e6:
                    break
        return at

    def _slopes(self, logs: Numbers) -> Numbers:
        columns = []
        for place in range(len(logs)):
            moved = logs.copy()
            moved[place] += 1e-4
            columns.append((self._missed(moved, self._rows) - self._missed(logs, self._rows)) / 1e-4)
        return np.stack(columns, axis=1)

    def _without(self, row: int, count: int) -> float:
        """Return a measurement's seconds by a fit to all others, which begins at the first guess."""
        others = [other for other in self._rows if other != row]
        if len(others) < count:
            return math.nan
        found = self._minimum(np.zeros(count), np.ones(count, dtype=bool), others)
        return self._models[row].seconds(np.exp(found))

    def _intervals(self, logs: Numbers, limit: float) -> tuple[Numbers, Numbers]:
        low, high = np.zeros(len(logs)), np.full(len(logs), math.inf)
        for place in range(len(logs)):
            low[place] = self._end(logs, place, -1.0, limit, 0.0)
            high[place] = self._end(logs, place, 1.0, limit, math.inf)
            if math.isinf(high[place]):
                self._probe(logs, place)
                high[place] = self._end(logs, place, 1.0, limit, math.inf)
        return low, high

    def _probe(self, logs: Numbers, place: int) -> None:
        """Learn what a cost does where it is much larger than the fitted one."""
        for probe, row in (
            (probe, row) for probe in _PROBES for row in self._rows if self._matters[row, place]
        ):
            at, beyond = logs.copy(), logs.copy()
            at[place] += probe
            beyond[place] += probe + _STEP
            model = self._models[row]
            base, here, there = self._ratios.seconds([(row, logs), (row, at), (row, beyond)])
            here, there = np.asarray([here, there]) / base * model.seconds(np.exp(logs)) / model.factor
            slopes = np.zeros(len(logs))
            slopes[place] = max(0.0, (there - here) / (math.exp(beyond[place]) - math.exp(at[place])))
            if slopes[place] > 0:
                model.planes.insert(0, _Plane(np.exp(at), here, slopes))

    def _end(self, logs: Numbers, place: int, side: float, limit: float, none: float) -> float:
        """Return where the profile of a cost rises above its minimum by a limit; `none` if it does nowhere."""
        free = np.ones(len(logs), dtype=bool)
        free[place] = False
        base = self._missed(logs, self._rows)
        ceiling = float(base @ base) + limit

        def above(distance: float, start: Numbers) -> tuple[bool, Numbers]:
            at = start.copy()
            at[place] = logs[place] + side * distance
            at = self._minimum(at, free, self._rows)
            missed = self._missed(at, self._rows)
            return float(missed @ missed) > ceiling, at

        inside, step, start = 0.0, 0.02, logs
        while True:
            outside = min(inside + step, _WIDEST)
            beyond, reached = above(outside, start)
            if beyond:
                break
            if outside >= _WIDEST:
                return none
            inside, step, start = outside, 1.6 * step, reached
        for _ in range(12):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if above(middle, start)[0] else (middle, outside)
        return math.exp(logs[place] + side * (inside + outside) / 2)


def _moved(logs: Numbers, place: int, to: float) -> Numbers:
    """Return logarithms with another one at a place."""
    moved = logs.copy()
    moved[place] = to
    return moved


def _squares(ratios: Numbers) -> float:
    """Return the sum of the squared logarithms."""
    logs = np.log(ratios)
    return float(logs @ logs)


def _unseen(count: int) -> float:
    """Return a growth of the squared error that dry runs are not exact enough to show."""
    return count * _LEAST_ERROR**2 / 4
