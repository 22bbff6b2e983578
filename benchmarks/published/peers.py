"""Predicts the same rows with the models of others: a roofline, Paleo's, Pollux's and Amdahl's law.

    python benchmarks/published/peers.py

A row of the result is a table with the median and the largest error of each predictor, over the rows that
`predictions.json` has. All are given the same rows to fit, and links as `predict.py` describes them. t is the time of a
step of the smallest fitted row, M the size of the gradients, B the bandwidth of the slowest link that a row uses.

    linear     t of the largest fitted row
    Amdahl     N x / (1 + s (N - 1))
    roofline   max(t, busiest link's bytes / B)                  S. Williams, A. Waterman, D. Patterson, CACM 2009
    Paleo      t + 2 ceil(log2 N) M / B; servers: t + 2 (N - 1) M / B
                                                                 H. Qi, E. Sparks, A. Talwalkar, ICLR 2017
    Pollux     (g^c + s^c)^(1 / c), 1 <= c <= 10; s = 0 for one worker, else a + b (N - 2), with other a and b
               for one host than for several                     A. Qiao et al., OSDI 2021, section 3.2

g, a, b and c are fitted to the logarithms of the steps; as in the paper, a and b are 0 where no fitted row has several
hosts, or several workers on one, and b where none has more than two workers. A small penalty on c - 1 and b / a decides
where several values fit equally well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
from predict import CLASSES, MODELS, RESULTS, amdahl, batch_of, cluster_of, halves, linear, servers_of
from scipy.optimize import minimize

from polyrhythm.config.assemble import without_images
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.recipe import configure
from published import Row, Series, Table, tables

_MOST_OVERLAP = 10.0
_PENALTY_OF_OVERLAP, _PENALTY_OF_SLOPE = 1e-3, 1e-2
_LEAST_S = 1e-8


class Predictor:
    """Roofline, Paleo's and Pollux's model of one series."""

    def __init__(self, table: Table, series: Series) -> None:
        self.series = series
        self.per_host = table.hardware.devices_per_host or 1
        where, _ = cluster_of(table, series)
        self.between = where.nic.bandwidth_bytes_per_s
        self.inside = where.inside.bandwidth_bytes_per_s
        self.gradient_bytes = (2 if halves(series) else 4) * parameters_of(series)
        first = min(series.fitted, key=lambda row: row.workers)
        self.image_s = first.workers / first.figure
        self._pollux = self._fitted()

    def hosts(self, row: Row) -> int:
        """Return the number of hosts."""
        return row.hosts or math.ceil(row.workers / self.per_host)

    def step_s(self, row: Row) -> float:
        """Return the measured seconds of a step."""
        return row.workers * batch_of(self.series, row) / row.figure

    def alone_s(self, row: Row) -> float:
        """Return the seconds of a step of this batch without an exchange."""
        return self.image_s * batch_of(self.series, row)

    def rate(self, row: Row, step_s: float) -> float:
        """Return the throughput for the seconds of a step."""
        return row.workers * batch_of(self.series, row) / step_s

    def bandwidth(self, row: Row) -> float:
        """Return the bandwidth of the slowest link that a row uses."""
        return self.between if self.hosts(row) > 1 else self.inside

    def roofline(self, row: Row) -> float:
        """Return the throughput that the busiest resource allows."""
        senders = self.hosts(row) if self.hosts(row) > 1 else row.workers
        if self.series.family == "parameter server":
            if not re.search(
                "distributed_replicated|dist_device_sync", f"{row.algorithm} {self.series.algorithm}"
            ):
                senders = row.workers
            links = self.hosts(row) if self.hosts(row) > 1 else 1
            of_hosts = senders / links
            moved = self.gradient_bytes * max(of_hosts, senders / servers_of(row, self.per_host))
        else:
            moved = 2 * (senders - 1) / senders * self.gradient_bytes
        exchange_s = moved / self.bandwidth(row) if row.workers > 1 else 0.0
        return self.rate(row, max(self.alone_s(row), exchange_s))

    def paleo(self, row: Row) -> float:
        """Return the throughput of computing followed by an exchange over a tree, or with one server."""
        served = self.series.family == "parameter server"
        rounds = row.workers - 1 if served else math.ceil(math.log2(row.workers))
        exchange_s = 2 * rounds * self.gradient_bytes / self.bandwidth(row)
        return self.rate(row, self.alone_s(row) + exchange_s)

    def pollux(self, row: Row) -> float:
        """Return the throughput by the fit."""
        return self.rate(row, self._pollux_step_s(self._pollux, row))

    def _pollux_step_s(self, values: Sequence[float], row: Row) -> float:
        image_s, inside, inside_slope, between, between_slope, overlap = values
        compute_s = image_s * batch_of(self.series, row)
        sync_s = 0.0
        if row.workers > 1:
            base, slope = (between, between_slope) if self.hosts(row) > 1 else (inside, inside_slope)
            sync_s = base + slope * max(0, row.workers - 2)
        most = max(compute_s, sync_s)
        return most * ((compute_s / most) ** overlap + (sync_s / most) ** overlap) ** (1 / overlap)

    def _fitted(self) -> list[float]:
        rows = self.series.fitted
        several = any(self.hosts(row) > 1 for row in rows)
        one = any(self.hosts(row) == 1 and row.workers > 1 for row in rows)
        beyond = any(row.workers > 2 for row in rows)
        scale = self.alone_s(rows[0])
        unknown = [True, one, one and beyond, several, several and beyond, several or one]
        fixed = [self.image_s, 0.0, 0.0, 0.0, 0.0, 1.0]
        places = [place for place, free in enumerate(unknown) if free]

        def filled(found: Sequence[float]) -> list[float]:
            values = list(fixed)
            for place, value in zip(places, found, strict=True):
                values[place] = float(np.exp(value)) if place < 5 else float(value)
            return values

        def loss(found: Sequence[float]) -> float:
            values = filled(found)
            errors = [math.log(self._pollux_step_s(values, row) / self.step_s(row)) for row in rows]
            slopes = [
                (values[slope] / max(values[slope - 1], _LEAST_S)) ** 2 for slope in (2, 4) if unknown[slope]
            ]
            penalty = _PENALTY_OF_OVERLAP * (values[5] - 1) ** 2 + _PENALTY_OF_SLOPE * sum(slopes)
            return math.sqrt(sum(each**2 for each in errors) / len(errors)) + penalty

        lower = math.log(_LEAST_S * scale)
        bounds = [(lower, math.log(100 * scale)) if place < 5 else (1.0, _MOST_OVERLAP) for place in places]
        bounds[0] = (math.log(self.image_s / 100), math.log(self.image_s * 100))
        best = None
        for share in (0.01, 0.1, 0.5):
            for overlap in (1.1, 3.0):
                start = [math.log(share * scale) if place < 5 else overlap for place in places]
                start[0] = math.log(self.image_s)
                found = minimize(loss, start, method="Nelder-Mead", bounds=bounds, options={"maxiter": 4000})
                if best is None or found.fun < best.fun:
                    best = found
        assert best is not None
        return filled(best.x)


def parameters_of(series: Series) -> int:
    """Return the trained numbers of a network."""
    model, side = MODELS[series.network]
    dry_run, _ = assemble_dry_run(configure({}, {"model": model, "data": without_images(CLASSES, side)}), 1)
    return sum(math.prod(shape) for shape in dry_run.sizes.shapes)


PREDICTORS: dict[str, Callable[[Predictor, Row], float]] = {
    "linear": lambda one, row: linear(one.series.fitted, row.workers),
    "Amdahl": lambda one, row: amdahl(one.series.fitted, row.workers),
    "roofline": Predictor.roofline,
    "Paleo": Predictor.paleo,
    "Pollux": Predictor.pollux,
}


def shown(errors: Sequence[float]) -> str:
    """Write the median and the largest of errors."""
    return f"{100 * median(map(abs, errors)):.1f} %, {100 * max(errors, key=abs):+.0f} %"


def main() -> None:
    """Print the errors of all predictors, by table."""
    results = json.loads(RESULTS.read_text())
    names = ["ours", *PREDICTORS]
    every: dict[str, list[float]] = {name: [] for name in names}
    print(f"| table | rows | {' | '.join(names)} |\n|{'---|' * (len(names) + 2)}")
    for key, table in tables().items():
        errors: dict[str, list[float]] = {name: [] for name in names}
        for number, series in enumerate(table.series):
            kept = {row["workers"]: row for row in results.get(f"{key}/{number}", {}).get("rows", [])}
            if not any("predicted" in row for row in kept.values()):
                continue
            one = Predictor(table, series)
            for row, record in zip(series.predicted, results[f"{key}/{number}"]["rows"], strict=True):
                if "predicted" not in record:
                    continue
                errors["ours"].append(record["predicted"] / row.figure - 1)
                for name, predictor in PREDICTORS.items():
                    errors[name].append(predictor(one, row) / row.figure - 1)
        if errors["ours"]:
            print(
                f"| {table.title} | {len(errors['ours'])} | {' | '.join(map(shown, errors.values()))} |",
                flush=True,
            )
        for name, found in errors.items():
            every[name] += found
    print(f"| **all** | {len(every['ours'])} | {' | '.join(map(shown, every.values()))} |")
    for name, found in every.items():
        print(f"{name}: {sum(abs(each) > 0.1 for each in found)} of {len(found)} rows beyond 10 %")


if __name__ == "__main__":
    main()
