"""Fits what a cluster file leaves open to measured throughputs, and says how well they determine it.

    minimise  Σ ln²(predicted / measured)  over the logarithms of the unknowns        (Levenberg-Marquardt)
    interval  exp(± 1.96 sqrt(diag s² (JᵀJ)⁻¹)),  s² = Σ ln² / (measurements - unknowns)

With as many unknowns as measurements nothing tells their error: 5 % is assumed. An unknown that hardly moves any
prediction is left as it is, and said to be undetermined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.step_times.log_normal import LogNormal

Numbers = NDArray[np.float64]
Predict = Callable[[Numbers], Numbers]
ASSUMED_ERROR = 0.05
_STEP = 0.05  # of a logarithm: rehearsals with drawn times are not smooth far below that
_FARTHEST = 1.5  # a logarithm moves at most so much in an iteration
_FELT = 0.02  # by what a prediction must move when an unknown changes e-fold
_ENOUGH, _ITERATIONS = 1e-3, 12


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
