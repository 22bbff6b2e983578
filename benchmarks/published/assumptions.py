"""Asks of series that are predicted badly which single assumption would have to change, and by how much.

    python benchmarks/published/assumptions.py SERIES ...

SERIES is a table and a number, `dlperf-bert-base-fp32/2`. Each is fitted again with one assumption changed, and its
rows of up to 64 workers are predicted: gradients that are exchanged after the backward pass, gradients of four bytes,
an own link for each accelerator inside a host, or links inside a host that cost nothing (*free inside*: the step time
is then that of the largest row to fit). *Link*: the share of the bandwidth between hosts with which the first predicted
row is met; the others then show whether that is the cause. *Missing*: seconds by which a measured step is longer than
the predicted one. Nothing of this enters `predictions.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import predict
import yaml

from polyrhythm.api.calibrate import calibrate
from polyrhythm.api.simulate import simulate
from polyrhythm.config.assemble import without_images
from polyrhythm.simulation.cluster import Cluster, cluster_text
from published import Row, Series, Table, tables

_MOST_WORKERS = 64
_FREE = (1e-6, 1e14)
_TRIES, _LEAST, _MOST = 7, 0.02, 2.0


@contextmanager
def assuming(**changed: Any) -> Iterator[None]:
    """Replace names of `predict` inside a block."""
    before = {name: getattr(predict, name) for name in changed}
    try:
        for name, value in changed.items():
            setattr(predict, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(predict, name, value)


class Fitted:
    """A series on its fitted cluster."""

    def __init__(self, table: Table, series: Series, folder: Path) -> None:
        self.series, self.folder = series, folder
        self.per_host = table.hardware.devices_per_host or 1
        model, side = predict.MODELS[series.network]
        self.common: dict[str, Any] = {"model": model, "data": without_images(predict.CLASSES, side)}
        where, unknowns = predict.cluster_of(table, series)
        self.file = folder / "fitted.yaml"
        (folder / "cluster.yaml").write_text(cluster_text(where))
        calibrate(
            cluster=folder / "cluster.yaml",
            throughput=[
                f"{self.spec(row)}, {row.workers} workers, batch {predict.batch_of(series, row)}: {row.figure}"
                for row in series.fitted
            ],
            unknowns=unknowns,
            batch_size=predict.batch_of(series, series.fitted[0]),
            out=self.file,
            **self.common,
        )

    def spec(self, row: Row) -> str:
        """Return the strategy of a row."""
        return predict.spec_of(self.series, row, self.per_host)

    def error(self, row: Row, share: float = 1.0) -> float:
        """Return the relative error of a row, with a share of the bandwidth between hosts."""
        described = yaml.safe_load(self.file.read_text())
        described["nic"]["bandwidth_bytes_per_s"] *= share
        (self.folder / "changed.yaml").write_text(yaml.safe_dump(described))
        with tempfile.TemporaryDirectory() as folder:
            run = simulate(
                cluster=self.folder / "changed.yaml",
                gradients="none",
                steps=predict.steps_of(self.series, row),
                strategy=self.spec(row),
                workers=row.workers,
                batch_size=predict.batch_of(self.series, row),
                out=Path(folder) / "run",
                **self.common,
            )
        return float(run.figures["images_per_s"]) / row.figure - 1

    def share(self, row: Row) -> float:
        """Return the share of the bandwidth between hosts with which a row is met."""
        low, high = math.log(_LEAST), math.log(_MOST)
        for _ in range(_TRIES):
            middle = (low + high) / 2
            low, high = (low, middle) if self.error(row, math.exp(middle)) > 0 else (middle, high)
        return math.exp((low + high) / 2)


def after_the_pass(spec_of: Callable[..., str]) -> Callable[..., str]:
    """Return a function that makes the same strategies with a single bucket, hence without overlap."""

    def whole(series: Series, row: Row, per_host: int) -> str:
        return re.sub(r"bucket_bytes=\d+", f"bucket_bytes={1 << 30}", spec_of(series, row, per_host))

    return whole


def missing(series: Series, results: dict[str, Any]) -> str:
    """Return by how many seconds the steps of the rows are longer than predicted."""
    found = []
    for row, kept in zip(series.predicted, results["rows"], strict=True):
        if "predicted" in kept:
            images = row.workers * predict.batch_of(series, row)
            found.append(f"{row.workers}: {images / row.figure - images / kept['predicted']:+.3f} s")
    return ", ".join(found)


def errors(table: Table, series: Series, *, link: bool = False) -> str:
    """Return the errors of the rows of a series; with `link`, at the share of the link that meets the first one."""
    rows = [row for row in series.predicted if row.workers <= _MOST_WORKERS]
    with tempfile.TemporaryDirectory() as folder:
        fitted = Fitted(table, series, Path(folder))
        share = fitted.share(rows[0]) if link else 1.0
        found = ", ".join(f"{row.workers}: {100 * fitted.error(row, share):+.1f} %" for row in rows)
    return (f"at {share:.2f}, " if link else "") + found


def free_inside(series: Series) -> tuple[Series, Callable[..., Any]]:
    """Return a series with its largest fitted row only, and a `cluster_of` that fits the step time alone."""
    largest = max(series.fitted, key=lambda row: row.workers)
    cluster_of = predict.cluster_of

    def without(table: Table, series: Series) -> tuple[Cluster, list[str]]:
        return cluster_of(table, series)[0], ["step_time"]

    return series.model_copy(update={"rows": [largest, *series.predicted]}), without


def report(table: Table, series: Series, wanted: str) -> str:
    """Return the errors of a series with one assumption changed; empty where it does not apply."""
    hosts = any(row.workers > (table.hardware.devices_per_host or 1) for row in series.predicted)
    device = f"{table.hardware.device} {table.hardware.host} {table.hardware.inside}"
    owned = any(each in device for each in predict.OWN_LINKS)
    match wanted:
        case "as predicted":
            return errors(table, series)
        case "link" if hosts:
            return errors(table, series, link=True)
        case "no overlap" | "no overlap, link" if hosts or "link" not in wanted:
            with assuming(spec_of=after_the_pass(predict.spec_of)):
                return errors(table, series, link="link" in wanted)
        case "four bytes" if predict.halves(series):
            with assuming(halves=lambda series: False):
                return errors(table, series)
        case "own links" if not owned:
            with assuming(OWN_LINKS=(*predict.OWN_LINKS, str(table.hardware.device)), OWN=predict.SHARED):
                return errors(table, series)
        case "free inside" if hosts:
            fewer, without = free_inside(series)
            with assuming(cluster_of=without, OWN=_FREE, SHARED=_FREE):
                return errors(table, fewer)
        case _:
            return ""


ASSUMPTIONS = (
    "as predicted",
    "link",
    "no overlap",
    "no overlap, link",
    "four bytes",
    "own links",
    "free inside",
)


def main() -> None:
    """Print the errors of each series with each assumption."""
    parser = argparse.ArgumentParser()
    parser.add_argument("series", nargs="+")
    parser.add_argument("--only", choices=ASSUMPTIONS)
    given = parser.parse_args()
    results = json.loads(predict.RESULTS.read_text())
    for key in given.series:
        name, number = key.split("/")
        table = tables()[name]
        series = table.series[int(number)]
        print(f"{key}: missing: {missing(series, results[key])}", flush=True)
        for wanted in [given.only] if given.only else ASSUMPTIONS:
            if found := report(table, series, wanted):
                print(f"{key}: {wanted}: {found}", flush=True)


if __name__ == "__main__":
    main()
