"""A cluster file fitted to measured throughputs, for the verb `calibrate`, with how well these determine it.

    minimise  Σ ln²(predicted / measured)  over the logarithms of the unknowns        (Levenberg-Marquardt)
    interval  exp(± 1.96 sqrt(diag s² (JᵀJ)⁻¹)),  s² = Σ ln² / (measurements - unknowns)

With as many unknowns as measurements nothing tells their error: 5 % is assumed. An unknown that hardly moves any
prediction is left as it is, and said to be undetermined.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.api.simulate import laid_out
from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.dry_run import shapes_of, sizes_for
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError, unknown
from polyrhythm.planning.analysis import step_multiply_adds
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.cluster import Cluster, cluster_text, open_cluster
from polyrhythm.simulation.run import simulate_dry_on
from polyrhythm.simulation.step_times.log_normal import LogNormal
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.user_files import check_new_file

_STEPS, _ROUNDS, _MOST_STEPS = 60, 4, 400
_FEW = 8
"""Measurements up to which each is also predicted from all others."""
Numbers = NDArray[np.float64]
Predict = Callable[[Numbers], Numbers]
ASSUMED_ERROR = 0.05
_STEP = 0.05  # of a logarithm: rehearsals with drawn times are not smooth far below that
_FARTHEST = 1.5  # a logarithm moves at most so much in an iteration
_FELT = 0.02  # by what a prediction must move when an unknown changes e-fold
_ENOUGH, _ITERATIONS = 1e-3, 12


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measured throughput.

    Attributes:
        strategy: its spec.
        workers: how many trained.
        images_per_s: of all of them.
    """

    strategy: str
    workers: int
    images_per_s: float

    @classmethod
    def parse(cls, text: str, strategy: str) -> Measurement:
        """Read `8 workers: 378 images/s`, or with the strategy first, as `easgd, 8 workers: 378`.

        Args:
            text: what was measured.
            strategy: where the text names none.

        Raises:
            RequestError: it cannot be read.
        """
        found = re.fullmatch(
            r"\s*(?:(.+?),)?\s*(\d+) workers?\s*:\s*([0-9.,]*\d(?:[eE][+-]?\d+)?)\s*(?:images/s|img/s)?\s*",
            text,
        )
        if found is None:
            raise RequestError(
                f"cannot read the throughput {text!r}: write '8 workers: 378 images/s', or with a strategy "
                "'parameter_server(servers=2), 8 workers: 378 images/s'"
            )
        try:
            rate = float(found[3].replace(",", ""))
        except ValueError:
            rate = 0.0
        workers = int(found[2])
        if rate <= 0 or workers < 1:
            raise RequestError(f"the throughput {text!r} must be above 0, of at least one worker")
        return cls(strategy=(found[1] or strategy).strip(), workers=workers, images_per_s=rate)

    def __str__(self) -> str:
        """Return it in words, without what was measured."""
        return f"{self.strategy}, {self.workers} worker{'s' * (self.workers != 1)}"


def calibrate(
    *,
    cluster: str | Path,
    throughput: Sequence[str],
    unknowns: Sequence[str],
    model: Any = "lenet5",
    data: Any = "fashion-mnist",
    batch_size: int = 64,
    strategy: str = "synchronous",
    classes: int | None = None,
    image_size: int | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Fit what a cluster file leaves open to measured throughputs.

    Args:
        cluster: a ready cluster or a cluster file; its values are where the fit begins.
        throughput: measurements, as `8 workers: 378 images/s` or `easgd, 8 workers: 378 images/s`.
        unknowns: what to fit, of `UNKNOWNS`.
        model: that was trained.
        data: gives classes and pictures, unless `classes` and `image_size` do.
        batch_size: of a worker.
        strategy: of measurements that name none.
        classes: instead of the data's.
        image_size: pixels a side, instead of the data's.
        out: the cluster file to write, which must not exist; None: none is.

    Returns:
        A JSON-able dict: `unknowns` with values and intervals, `measurements` with what is predicted for each, also
        from all others (`left_out`) where there are enough, and `file`.

    Raises:
        RequestError: something of it is wrong, or there are fewer measurements than unknowns.
    """
    where = open_cluster(cluster)
    seen = [Measurement.parse(text, strategy) for text in throughput]
    names = list(dict.fromkeys(unknowns))
    for name in names:
        if name not in UNKNOWNS:
            raise unknown("unknown to fit", name, UNKNOWNS)
    if not names:
        raise RequestError(f"say what to fit: {', '.join(UNKNOWNS)}")
    if len(seen) < len(names):
        raise RequestError(
            f"{len(names)} unknowns ({', '.join(names)}) cannot be told from {len(seen)} measurements: give at least "
            "as many --throughput as unknowns"
        )
    if out is not None:
        check_new_file(Path(out))
    if classes is not None and image_size is not None:
        count, shape = classes, (3, image_size, image_size)
    else:
        dataset = open_data(data, image_size=image_size)
        count, shape = classes or len(dataset.classes), dataset.image_shape
    shapes = shapes_of(model, count, shape)
    if where.step_of is not None and where.step_of.factor(1.0) is not None:
        work = step_multiply_adds(copy.deepcopy(shapes), shape, batch_size)
        where = where.model_copy(update={"step_factor": where.step_of.factor(work)})
    sizes = {
        each: sizes_for(copy.deepcopy(shapes), shape, strategy_from(each.strategy), each.workers)
        for each in seen
    }
    start = [value_of(where, name) for name in names]

    def predicted(of: Sequence[Measurement]) -> Any:
        def predict(values: Numbers) -> Numbers:
            made = with_values(where, dict(zip(names, map(float, values), strict=True)))
            return np.asarray([_rehearse(made, each, sizes[each], batch_size) for each in of])

        return predict

    rates = [each.images_per_s for each in seen]
    found, rehearsed = fit(names, start, predicted(seen), rates)
    values = [each.value for each in found]
    told: list[dict[str, Any]] = []
    for place, each in enumerate(seen):
        told.append(
            {
                "what": str(each),
                "images_per_s": each.images_per_s,
                "predicted": float(rehearsed[place]),
                "left_out": None,
            }
        )
        if len(names) < len(seen) <= _FEW:
            others = [*seen[:place], *seen[place + 1 :]]
            without, _ = fit(names, values, predicted(others), [other.images_per_s for other in others])
            alone = predicted([each])(np.asarray([one.value for one in without]))
            told[-1]["left_out"] = float(alone[0])
    if out is not None:
        fitted = with_values(where, dict(zip(names, values, strict=True)))
        source = f"{fitted.source} Fitted to {len(seen)} throughputs: {', '.join(names)}.".strip()
        Path(out).write_text(cluster_text(fitted.model_copy(update={"source": source})), encoding="utf-8")
    return {
        "cluster": where.name,
        "unknowns": [
            {key: value if value not in (float("inf"), 0.0) else None for key, value in asdict(each).items()}
            for each in found
        ],
        "measurements": told,
        "file": None if out is None else str(out),
    }


def _rehearse(where: Cluster, what: Measurement, sizes: ModelSizes, batch_size: int) -> float:
    strategy = strategy_from(what.strategy)
    strategy.check(what.workers)
    every = strategy.traits(what.workers).exchange_every
    dry_run = DryRun(
        strategy=strategy,
        workers=what.workers,
        sizes=sizes,
        steps=min(_MOST_STEPS, max(_STEPS, _ROUNDS * every)),
        batch_size=batch_size,
    )
    figures = RunFigures()
    simulate_dry_on(laid_out(where.model_copy(update={"faults": ()}), dry_run), dry_run, figures.add)
    return figures.images_per_s


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """An unknown after the fit.

    Attributes:
        name: of the unknown.
        before: its value in the file.
        value: that fits best; `before` where it cannot be told.
        low: lower end of its interval of 95 %.
        high: upper end.
        told: whether the measurements determine it at all.
    """

    name: str
    before: float
    value: float
    low: float
    high: float
    told: bool


def fit(
    names: Sequence[str], before: Sequence[float], predict: Predict, measured: Sequence[float]
) -> tuple[list[Fitted], Numbers]:
    """Fit unknowns to measurements.

    Args:
        names: of the unknowns.
        before: their values to begin with, positive.
        predict: returns what would be measured, from values of the unknowns.
        measured: positive.

    Returns:
        The unknowns, and what is predicted for every measurement.
    """
    start = np.log(np.asarray(before, dtype=np.float64))
    seen = np.log(np.asarray(measured, dtype=np.float64))

    def residuals(logs: Numbers) -> Numbers:
        found: Numbers = np.log(predict(np.exp(logs))) - seen
        return found

    at, missed = start.copy(), residuals(start)
    slopes = _slopes(residuals, at, missed)
    damping = 1e-2
    for _ in range(_ITERATIONS):
        felt = _felt(slopes)
        square = slopes[:, felt].T @ slopes[:, felt]
        if not felt.any():
            break
        lean = square + damping * np.diag(np.diag(square))
        move = np.zeros_like(at)
        move[felt] = np.clip(-np.linalg.solve(lean, slopes[:, felt].T @ missed), -_FARTHEST, _FARTHEST)
        tried = residuals(at + move)
        if tried @ tried < missed @ missed:
            better = 1 - (tried @ tried) / (missed @ missed)
            at, missed, damping = at + move, tried, damping / 10
            if better < _ENOUGH or float(missed @ missed) < 1e-10:
                break
            slopes = _slopes(residuals, at, missed)
        else:
            damping *= 10
            if damping > 1e4:
                break
    slopes = _slopes(residuals, at, missed)
    return _told(names, before, at, slopes, missed), np.exp(missed + seen)


def _slopes(residuals: Callable[[Numbers], Numbers], at: Numbers, here: Numbers) -> Numbers:
    columns = []
    for place in range(len(at)):
        step = np.zeros_like(at)
        step[place] = _STEP
        columns.append((residuals(at + step) - here) / _STEP)
    return np.stack(columns, axis=1)


def _felt(slopes: Numbers) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.abs(slopes).max(axis=0) > _FELT
    return found


def _told(
    names: Sequence[str], before: Sequence[float], at: Numbers, slopes: Numbers, missed: Numbers
) -> list[Fitted]:
    felt = _felt(slopes)
    spare = len(missed) - int(felt.sum())
    variance = float(missed @ missed) / spare if spare > 0 else ASSUMED_ERROR**2
    own = slopes[:, felt]
    errors = np.full(len(at), math.inf)
    if felt.any():
        errors[felt] = np.sqrt(np.diag(np.linalg.pinv(own.T @ own, rcond=1e-6)) * variance)
        # Directions that the measurements do not tell apart vanish in a pseudo-inverse: their variance is infinite.
        if np.linalg.matrix_rank(own, tol=_FELT * float(np.linalg.norm(own, 2))) < own.shape[1]:
            errors[felt] = math.inf
    found = []
    for place, name in enumerate(names):
        told = bool(felt[place] and math.isfinite(errors[place]))
        value = float(np.exp(at[place])) if felt[place] else before[place]
        wide = math.exp(min(1.96 * errors[place], 50.0)) if told else math.inf
        found.append(
            Fitted(
                name=name, before=before[place], value=value, low=value / wide, high=value * wide, told=told
            )
        )
    return found


UNKNOWNS = (
    "step_time",
    "spread",
    "nic_bandwidth",
    "nic_latency",
    "inside_bandwidth",
    "server_bandwidth",
    "server_update",
)
"""What can be fitted: by how much steps are longer than the file says, the rest in its own units."""


def value_of(cluster: Cluster, unknown: str) -> float:
    """Return the value of an unknown in a cluster to begin with.

    Raises:
        RequestError: the cluster has none, and there is nothing to begin with.
    """
    match unknown:
        case "step_time":
            return 1.0
        case "spread":
            if not isinstance(cluster.step_time, LogNormal) or not cluster.step_time.sigma:
                raise RequestError(
                    "the spread of steps is fitted for step_time: log_normal(…, sigma=…) above 0"
                )
            return cluster.step_time.sigma
        case "nic_bandwidth":
            return cluster.nic.bandwidth_bytes_per_s
        case "nic_latency":
            if not cluster.nic.latency_s:
                raise RequestError("nic_latency is 0 in the cluster file: give a guess to begin with")
            return cluster.nic.latency_s
        case "inside_bandwidth":
            return cluster.inside.bandwidth_bytes_per_s
        case "server_update":
            if cluster.server_update is None:
                raise RequestError("server_update is not in the cluster file: give a guess to begin with")
            return cluster.server_update.bandwidth_bytes_per_s
        case _:
            return cluster.server_bandwidth_bytes_per_s or cluster.nic.bandwidth_bytes_per_s


def with_values(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """Return a cluster with values of unknowns."""
    changed: dict[str, object] = {}
    if "step_time" in values:
        changed |= _paced(cluster, values["step_time"])
    if "spread" in values:
        assert isinstance(cluster.step_time, LogNormal)
        changed["step_time"] = cluster.step_time.model_copy(update={"sigma": values["spread"]})
    links = {"bandwidth_bytes_per_s": values.get("nic_bandwidth"), "latency_s": values.get("nic_latency")}
    if given := {key: value for key, value in links.items() if value is not None}:
        changed["nic"] = cluster.nic.model_copy(update=given)
    if "inside_bandwidth" in values:
        inside = {"bandwidth_bytes_per_s": values["inside_bandwidth"]}
        changed["inside"] = cluster.inside.model_copy(update=inside)
    if "server_bandwidth" in values:
        changed["server_bandwidth_bytes_per_s"] = values["server_bandwidth"]
    if "server_update" in values:
        assert cluster.server_update is not None
        update = {"bandwidth_bytes_per_s": values["server_update"]}
        changed["server_update"] = cluster.server_update.model_copy(update=update)
    return cluster.model_copy(update=changed)


def _paced(cluster: Cluster, factor: float) -> dict[str, object]:
    """Return what makes steps longer by a factor; where it follows from arithmetic, that is told of less of it."""
    of, scaled = cluster.step_of, {"step_factor": cluster.step_factor * factor}
    if of is None or of.factor(1.0) is None:
        return dict(scaled)
    if of.multiply_adds is not None:
        return {**scaled, "step_of": of.model_copy(update={"multiply_adds": of.multiply_adds / factor})}
    assert of.share_of_peak is not None
    return {**scaled, "step_of": of.model_copy(update={"share_of_peak": of.share_of_peak / factor})}
