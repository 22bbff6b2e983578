"""Predicts the rows of the published tables from their rows with few workers, as a user would.

    python benchmarks/published/predict.py [--minutes 10] [--table NAME] [--page]

For every series: a cluster file of the source's hosts, `calibrate` on the rows to fit, `simulate --gradients none` for
the rows to predict. Results of `predictions.json` are not made again; `--page` prints the tables of PREDICTIONS.md.
Inputs are chosen by the description of hardware and algorithm alone, before any row is predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from polyrhythm.api.calibrate import calibrate
from polyrhythm.api.simulate import simulate
from polyrhythm.config.assemble import without_images
from polyrhythm.errors import PolyrhythmError
from polyrhythm.simulation.cluster import Cluster, cluster_text
from published import Row, Series, Table, tables

RESULTS = Path(__file__).with_name("predictions.json")
CAUSES = Path(__file__).with_name("causes.json")
CLASSES = 1000
"""Classes of ImageNet."""
MODELS = {
    "ResNet-50": ("resnet50", 224),
    "ResNet50": ("resnet50", 224),
    "ResNet50 V1.5": ("resnet50", 224),
    "ResNet-50 v1.5": ("resnet50", 224),
    "resnet (ImageNet)": ("resnet50", 224),
    "ResNet-152": ("resnet152", 224),
    "Resnet-152": ("resnet152", 224),
    "InceptionV3": ("inception_v3", 299),
    "Inception-v3": ("inception_v3", 299),
    "Alexnet": ("alexnet", 224),
    "VGG16": ("vgg16", 224),
    "ResNet18": ("resnet18", 224),
    "ResNet152": ("resnet152", 224),
    "WideResNet101_2": ("wide_resnet101_2", 224),
    "ConvNextLarge": ("convnext_large", 224),
    "EfficientNet v1-B0": ("efficientnet_b0", 224),
    "EfficientNet v1-B4": ("efficientnet_b4", 380),
    "efficientnet-b0": ("efficientnet_b0", 224),
    "efficientnet-b4": ("efficientnet_b4", 380),
    "BERT Base": ("sizes(parameters=1.1e8, layers=12)", 1),
    "BERT large, sequences of 128": ("sizes(parameters=3.3e8, layers=24)", 1),
    "BERT large, sequences of 512": ("sizes(parameters=3.3e8, layers=24)", 1),
    "RoBERTaXLM": ("sizes(parameters=5.601e8, layers=24)", 1),
}
"""Our model and its pixels a side; networks without a name here are given by the sizes of source or paper."""
GBIT = 1e9 / 8
LINKS = {
    "InfiniBand 100 Gb/sec (4X EDR)": (2e-6, 100 * GBIT),
    "InfiniBand 100 Gb/sec": (2e-6, 100 * GBIT),
    "20 Gbps ethernet": (5e-5, 20 * GBIT),
    "Aries, Dragonfly": (1.5e-6, 10e9),
    "2x ConnectX-6 IB HDR 200Gb/Sec": (2e-6, 400 * GBIT),
    "8x ConnectX-6 IB HDR 200Gb/Sec": (2e-6, 1600 * GBIT),
    "3.3 Gbits, 0.3 ms": (3e-4, 3.3 * GBIT),
    "6.90 Gbit/s, 0.66 ms": (6.6e-4, 6.9 * GBIT),
}
"""Latency in s and bandwidth in bytes/s of a host, by the source's words."""
HOSTS = {
    "LUMI": (2e-6, 800 * GBIT),  # 4 adapters of Slingshot 11
    "Mahti": (2e-6, 400 * GBIT),  # 2 of InfiniBand HDR
    "NVIDIA DGX A100": (2e-6, 1600 * GBIT),  # 8 of InfiniBand HDR
    "Amazon EC2 p2.8xlarge": (5e-5, 10 * GBIT),
}
"""The same of hosts whose network the source does not describe, as their makers or operators state it."""
OWN_LINKS = ("P100", "V100", "A100", "LUMI")
"""Accelerators with links of their own to the others of a host; others share one."""
OWN, SHARED = (5e-6, 1e11), (1e-5, 1e10)
"""First guess of the links inside a host; the bandwidth is fitted where a row has several workers in one."""
BUCKET_BYTES = 25 << 20
"""Size of buckets of PyTorch's DistributedDataParallel."""
TOGETHER = 32_768
"""Samples of all workers between two averages of Hivemind's runs."""


class Refused(Exception):
    """The tool has no model for this row or series."""


def halves(series: Series) -> bool:
    """Whether gradients have two bytes: wherever the source mixes precisions."""
    return bool(re.search(r"mixed|AMP|fp16|16 comp", f"{series.precision} {series.algorithm}", re.IGNORECASE))


def servers_of(row: Row, per_host: int) -> int:
    """Return the number of servers: as many as hosts where the source does not give one."""
    return max(1, row.servers or row.hosts or math.ceil(row.workers / per_host))


def spec_of(series: Series, row: Row, per_host: int) -> str:
    """Return the strategy of a row.

    Raises:
        Refused: there is none.
    """
    transfer = ", transfer=float16" if halves(series) else ""
    if series.family == "accumulation":
        return f"synchronous(bucket_bytes={1 << 30}, collective=direct{transfer})"
    if series.family == "all-reduce":
        hosts = math.ceil(row.workers / per_host)
        between = "ring" if hosts <= 4 else "rabenseifner"  # NCCL: rings, trees on many hosts
        ring = f"two_level(group={per_host}, between={between})" if hosts > 1 and per_host > 1 else between
        return f"synchronous(bucket_bytes={BUCKET_BYTES}, collective={ring}{transfer})"
    if series.family == "parameter server":
        servers = servers_of(row, per_host)
        if servers > row.workers:
            raise Refused("more servers than workers")
        # Gradients are summed inside a host before they are sent to servers.
        together = re.search("distributed_replicated|dist_device_sync", f"{row.algorithm} {series.algorithm}")
        if together and row.workers > 1 and per_host > 1:
            return (
                f"mixed(replicas={min(per_host, row.workers)}, servers={servers}, consistency=synchronous, "
                f"inside=synchronous(bucket_bytes={BUCKET_BYTES}, collective=ring))"
            )
        return f"parameter_server(consistency=synchronous, servers={servers})"
    raise Refused(f"{series.family}: no strategy here is the source's algorithm")


def steps_of(series: Series, row: Row) -> int:
    """Return the steps of a dry run; with servers the first and last ones differ."""
    if series.family != "parameter server":
        return 3
    return 12 if row.workers <= 32 else 5


def batch_of(series: Series, row: Row) -> int:
    """Return the batch of a worker between two exchanges.

    Raises:
        Refused: the source does not give it.
    """
    if series.family == "accumulation":
        return round(TOGETHER / row.workers)
    if series.batch_per_worker is not None:
        return series.batch_per_worker * (row.accumulated or 1)
    if row.batch is not None:
        return round(float(row.batch) / row.workers)
    raise Refused("the batch size per worker is unknown")


def cluster_of(table: Table, series: Series) -> tuple[Cluster, list[str]]:
    """Return the cluster before the fit, and the unknowns to fit.

    Raises:
        Refused: the source does not describe a network that rows to predict need.
    """
    hardware = table.hardware
    per_host = hardware.devices_per_host
    if per_host is None:
        raise Refused("the number of devices per host is unknown")
    across_fitted = any(row.workers > per_host for row in series.fitted)
    across = any(row.workers > per_host for row in series.predicted)
    between = LINKS.get(hardware.between or "") or HOSTS.get((hardware.host or "").split(",")[0])
    if across and between is None and not across_fitted:
        raise Refused("the network between hosts is unknown, and no row to fit uses it")
    own = any(each in f"{hardware.device} {hardware.host} {hardware.inside}" for each in OWN_LINKS)
    inside = OWN if own else SHARED
    unknowns = ["step_time"]
    if len(series.fitted) > 1 and any(row.workers > 1 for row in series.fitted):
        unknowns.append("nic_bandwidth" if across_fitted else "inside_bandwidth")
    hosts = math.ceil(max(row.workers for row in series.rows) / per_host)

    def link(values: tuple[float, float]) -> dict[str, float]:
        return {"latency_s": values[0], "bandwidth_bytes_per_s": values[1]}

    kind: dict[str, Any] = {"name": "host", "count": hosts, "cores": 128, "accelerators": per_host}
    kind["server_takes"] = 0.0  # servers have processors, workers accelerators
    if own and per_host > 1:
        kind["tree"] = [{"places": 1, **link(inside)}]
    described: dict[str, Any] = {
        "name": "published",
        "hosts": [kind],
        "nic": link(between or (5e-5, 1.25e9)),
        "inside": link(inside),
        "step_time": "constant(seconds=1)",
        "step_of": {"peak_multiply_adds_per_s": 1e13, "share_of_peak": 0.5},
    }
    return Cluster(**described), unknowns


def check(table: Table, series: Series) -> None:
    """Check that a series can be predicted.

    Raises:
        Refused: it cannot.
    """
    if table.quantity != "throughput":
        raise Refused("time of an epoch, with a batch that is not that of a worker")
    if "composition" in str([row.model_dump(exclude_none=True) for row in series.rows]):
        raise Refused("regions and kinds of machines differ by row")
    if series.network not in MODELS:
        raise Refused(f"{series.network}: neither built by name, nor are its sizes known")
    for row in series.rows:
        batch_of(series, row)
        spec_of(series, row, table.hardware.devices_per_host or 1)
    cluster_of(table, series)


def predicted(table: Table, series: Series, folder: Path, until: float) -> dict[str, Any]:
    """Fit a series, and predict its rows; return the record of both."""
    where, unknowns = cluster_of(table, series)
    per_host = table.hardware.devices_per_host or 1
    model, side = MODELS[series.network]
    common: dict[str, Any] = {"model": model, "data": without_images(CLASSES, side)}
    (folder / "cluster.yaml").write_text(cluster_text(where))
    began_s = time.process_time()
    found = calibrate(
        cluster=folder / "cluster.yaml",
        throughput=[
            f"{spec_of(series, row, per_host)}, {row.workers} workers, batch {batch_of(series, row)}: {row.figure}"
            for row in series.fitted
        ],
        unknowns=unknowns,
        batch_size=batch_of(series, series.fitted[0]),
        out=folder / "fitted.yaml",
        **common,
    )
    fitting_s = time.process_time() - began_s
    rows = []
    for row in series.predicted:
        each: dict[str, Any] = {"workers": row.workers, "servers": row.servers, "measured": row.figure}
        if time.monotonic() > until:
            raise TimeoutError
        try:
            run = simulate(
                cluster=folder / "fitted.yaml",
                gradients="none",
                steps=steps_of(series, row),
                strategy=spec_of(series, row, per_host),
                workers=row.workers,
                batch_size=batch_of(series, row),
                out=folder / f"run{len(rows)}",
                **common,
            )
            each["predicted"] = run.figures["images_per_s"]
        except PolyrhythmError as error:
            each["refused"] = str(error)
        each["linear"] = linear(series.fitted, row.workers)
        each["amdahl"] = amdahl(series.fitted, row.workers)
        rows.append(each)
    keys = ("name", "value", "told")
    return {
        "fitting_s": round(fitting_s, 1),
        "fitted": [{key: each[key] for key in keys} for each in found["unknowns"]],
        "rows": rows,
    }


def linear(fitted: Sequence[Row], workers: int) -> float:
    """Return the throughput with that of a worker of the largest fitted row."""
    largest = max(fitted, key=lambda row: row.workers)
    return workers * largest.figure / largest.workers


def amdahl(fitted: Sequence[Row], workers: int) -> float:
    """Return the throughput N x / (1 + s (N - 1)) of the x and s >= 0 that fit best: Amdahl's law."""

    def rate(count: int, serial: float) -> float:
        return count / (1 + serial * (count - 1))

    def fit(serial: float) -> tuple[float, float]:
        logs = [math.log(row.figure / rate(row.workers, serial)) for row in fitted]
        middle = sum(logs) / len(logs)
        return sum((each - middle) ** 2 for each in logs), middle

    several = len({row.workers for row in fitted}) > 1
    serials = [0.0, *(10 ** (-5 + place / 100) for place in range(501))] if several else [0.0]
    serial = min(serials, key=lambda each: fit(each)[0])
    return math.exp(fit(serial)[1]) * rate(workers, serial)


def title_of(table: Table, series: Series) -> str:
    """Return the table and the series in words."""
    algorithm = None if series.algorithm is None else series.algorithm.split(":")[0]
    batch = None if series.batch_per_worker is None else f"batch {series.batch_per_worker}"
    return ", ".join(filter(None, (table.title, series.network, series.precision, batch, algorithm)))


def percent(errors: Sequence[float], of: Any = max) -> str:
    """Return the median of errors, or the one that is largest, as text."""
    if not errors:
        return ""
    return f"{100 * max(errors, key=abs):+.1f} %" if of is max else f"{100 * median(map(abs, errors)):.1f} %"


def page(results: dict[str, Any]) -> str:
    """Return errors by table, rows that are off by more than a tenth with their causes, and refused rows."""
    causes: dict[str, str] = json.loads(CAUSES.read_text()) if CAUSES.exists() else {}
    lines = [
        "| table | predicted rows | workers | median error | worst | median of linear | of Amdahl | refused rows |",
        "|---|---|---|---|---|---|---|---|",
    ]
    far = ["| series | workers | measured | predicted | error | cause |", "|---|---|---|---|---|---|"]
    reasons: dict[str, int] = {}
    every: dict[str, list[float]] = {"predicted": [], "linear": [], "amdahl": []}
    for name, table in tables().items():
        errors: dict[str, list[float]] = {"predicted": [], "linear": [], "amdahl": []}
        refused, workers = 0, []
        for number, series in enumerate(table.series):
            kept = results.get(f"{name}/{number}")
            if kept is None:
                continue
            if "refused" in kept:
                refused += len(series.predicted)
                reasons[kept["refused"]] = reasons.get(kept["refused"], 0) + len(series.predicted)
                continue
            for row in kept["rows"]:
                if "predicted" not in row:
                    refused += 1
                    reasons[row["refused"]] = reasons.get(row["refused"], 0) + 1
                    continue
                for kind, found in errors.items():
                    found.append(row[kind] / row["measured"] - 1)
                workers.append(row["workers"])
                error = errors["predicted"][-1]
                if abs(error) > 0.1:
                    cause = causes.get(f"{name}/{number}", causes.get(name, "**not explained**"))
                    cells = (title_of(table, series), row["workers"], f"{row['measured']:.0f}")
                    cells = (*cells, f"{row['predicted']:.0f}", f"{100 * error:+.1f} %", cause)
                    far.append(f"| {' | '.join(map(str, cells))} |")
        for kind, found in errors.items():
            every[kind] += found
        if workers or refused:
            several = [percent(errors[kind], median) for kind in errors]
            worst, count = percent(errors["predicted"]), len(errors["predicted"])
            span = f"{min(workers)} to {max(workers)}" if workers else ""
            cells = (table.title, count, span, several[0], worst, *several[1:], refused)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    several = [percent(found, median) for found in every.values()]
    cells = ("**all**", len(every["predicted"]), "", several[0], percent(every["predicted"]), *several[1:])
    lines.append(f"| {' | '.join(map(str, cells))} | {sum(reasons.values())} |")
    told = ["| reason | rows |", "|---|---|", *(f"| {why} | {count} |" for why, count in reasons.items())]
    return "\n".join([*lines, "", *far, "", *told])


def write(results: dict[str, Any]) -> None:
    """Write the predictions, a series a line."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in results.items())
    RESULTS.write_text(f"{{\n{lines}\n}}\n")


def main() -> None:
    """Predict the series that have no result yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--table", action="append")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if given.page:
        print(page(results))
        return
    until = time.monotonic() + 60 * given.minutes
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for name, table in tables().items():
        for number, series in enumerate(table.series):
            key = f"{name}/{number}"
            if key in results or (given.table and name not in given.table):
                continue
            try:
                check(table, series)
            except Refused as error:
                results[key] = {"refused": str(error)}
                continue
            if time.monotonic() > until:
                continue
            began_s = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    kept = predicted(table, series, Path(folder), until)
                except TimeoutError:
                    continue
                except PolyrhythmError as error:
                    kept = {"refused": str(error)}
            results[key] = {"commit": commit, **kept}
            write(results)
            print(f"{key}: {time.monotonic() - began_s:.0f} s: {kept}", flush=True)
    write(results)


if __name__ == "__main__":
    main()
