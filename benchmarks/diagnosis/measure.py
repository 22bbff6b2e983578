"""Whether `why` names a planted cause of slowness, and predicts what its absence and its remedy then gain.

    python benchmarks/diagnosis/measure.py [--only "one bad NIC"] [--out FILE]

Every case is a cluster with one fault. `why` sees the run on it alone; the truth is a run on the same cluster without
the fault, and a run with the remedy. All are dry runs in virtual time but those under REAL, which are runs on this
machine. Cases that the file has already are not measured again unless they are named.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyrhythm.api.simulate import simulate
from polyrhythm.api.train import train
from polyrhythm.api.why import Cause, Why, why
from polyrhythm.simulation.cluster import Cluster

SLOWER, UNEVEN, NETWORK, SERVERS = (
    "slower workers",
    "steps of unequal length",
    "the network",
    "the servers",
)
PROCESSOR = "other processes on the same cores"
QUICK = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1.25e9}
THIN = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 2e6}
SERVED = "parameter_server(consistency=synchronous, servers=1, placement=dedicated)"
ASYNCHRONOUS = "parameter_server(servers=1, placement=dedicated)"
WORKERS = [{"name": "worker", "count": 4}]
WITH_SERVER = [{"name": "worker", "count": 4}, {"name": "server", "count": 1}]


def described(**changed: Any) -> dict[str, Any]:
    """Return a cluster of four even hosts on quick links, whose steps take 50 ms."""
    values = {
        "name": "planted",
        "hosts": WORKERS,
        "nic": QUICK,
        "inside": QUICK,
        "step_time": "constant(seconds=0.05)",
    }
    return {**values, **changed}


@dataclass(frozen=True)
class Case:
    """One planted cause.

    Attributes:
        cause: as `why` should name it.
        ill: what is described otherwise than in `well`.
        well: what of the healthy cluster is described otherwise than by `described`.
        job: options of the run.
    """

    cause: str
    ill: Mapping[str, Any]
    well: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)


def hosts(*changed: dict[str, Any], server: bool = False) -> list[dict[str, Any]]:
    """Return four hosts of a worker each, the last ones changed so, and perhaps one for a server."""
    even = [{"name": f"worker{number}", "count": 1} for number in range(4 - len(changed))]
    others = [{"name": f"other{number}", "count": 1, **each} for number, each in enumerate(changed)]
    return [*even, *others, *([{"name": "server", "count": 1}] if server else [])]


CASES: dict[str, Case] = {
    "one worker at a third of the speed": Case(SLOWER, {"slow": {2: 3.0}}),
    "one host of an older kind": Case(SLOWER, {"hosts": hosts({"speed": 0.6})}),
    "two hosts of an older kind, of eight": Case(
        SLOWER,
        {"hosts": [{"name": "new", "count": 6}, {"name": "old", "count": 2, "speed": 0.5}]},
        {"hosts": [{"name": "new", "count": 8}]},
        {"workers": 8},
    ),
    "a noisy neighbor on one host": Case(
        SLOWER, {"passing_slowness": [{"rank": 1, "from_s": 0, "to_s": 1e6, "factor": 2.5}]}
    ),
    "one slow worker before a server": Case(
        SLOWER, {"hosts": WITH_SERVER, "slow": {1: 2.5}}, {"hosts": WITH_SERVER}, {"strategy": SERVED}
    ),
    "steps with a long tail": Case(UNEVEN, {"step_time": "shifted_exponential(shift=0.02, mean=0.03)"}),
    "hosts with good and bad times": Case(UNEVEN, {"shared_slowness": {"sigma": 0.5, "lasts_s": 2.0}}),
    "thin links": Case(NETWORK, {"nic": THIN}),
    "one bad NIC": Case(NETWORK, {"hosts": hosts({"nic": THIN})}),
    "oversubscribed racks": Case(
        NETWORK, {"racks": {"hosts": 2, "uplink_bandwidth_bytes_per_s": 4e6, "latency_s": 1e-4}}
    ),
    "links of high latency": Case(NETWORK, {"nic": {"latency_s": 2e-2, "bandwidth_bytes_per_s": 1.25e9}}),
    "a batch too small for the links": Case(
        NETWORK,
        {"nic": {"latency_s": 2e-3, "bandwidth_bytes_per_s": 1.25e8}, "step_time": "constant(seconds=0.005)"},
        {"step_time": "constant(seconds=0.005)"},
        {"batch_size": 8},
    ),
    "a far server": Case(
        NETWORK,
        {"hosts": [*WORKERS, {"name": "far", "count": 1, "nic": {**QUICK, "latency_s": 5e-2}}]},
        {"hosts": WITH_SERVER},
        {"strategy": SERVED},
    ),
    "a server behind a thin link": Case(
        NETWORK,
        {"hosts": [*WORKERS, {"name": "thin", "count": 1, "nic": {**QUICK, "bandwidth_bytes_per_s": 5e6}}]},
        {"hosts": WITH_SERVER},
        {"strategy": ASYNCHRONOUS},
    ),
    "a hot server, asynchronous": Case(
        SERVERS,
        {"hosts": WITH_SERVER, "server_update": {"seconds": 3e-2, "bandwidth_bytes_per_s": 1e9}},
        {"hosts": WITH_SERVER},
        {"strategy": ASYNCHRONOUS},
    ),
    "a server that copies slowly": Case(
        SERVERS,
        {"hosts": WITH_SERVER, "server_bandwidth_bytes_per_s": 5e6},
        {"hosts": WITH_SERVER},
        {"strategy": SERVED},
    ),
    "a server on the core of a worker": Case(
        SERVERS,
        {"hosts": [{"name": "worker", "count": 4, "cores": 1, "workers": 1, "server_takes": 0.5}]},
        {"hosts": [{"name": "worker", "count": 4, "cores": 1, "workers": 1, "server_takes": 0.0}]},
        {"strategy": "parameter_server(consistency=synchronous, servers=1)"},
    ),
}
JOB: dict[str, Any] = {
    "data": "digits",
    "model": "mlp(hidden=256)",
    "strategy": "synchronous",
    "workers": 4,
    "batch_size": 32,
    "balance": "off",
}
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "more processes than cores": (PROCESSOR, {"workers": 6, "epochs": 2, "threads": 1}),
}
REAL_JOB: dict[str, Any] = {
    "data": "fashion-mnist",
    "model": "mlp(hidden=512)",
    "strategy": "synchronous",
    "batch_size": 128,
    "balance": "off",
}


@dataclass(frozen=True)
class Row:
    """A line of the table; gains in images/s as shares, None where there is nothing to compare with."""

    case: str
    planted: str
    named: str
    predicted: float
    truth: float | None
    remedy: str
    remedy_predicted: float
    remedy_truth: float | None


def rate(where: dict[str, Any], options: Mapping[str, Any], folder: Path) -> float:
    """Return images/s of a dry run of 400 steps."""
    run = simulate(cluster=Cluster(**where), gradients="none", steps=400, out=folder, **options)
    return float(run.figures["images_per_s"])


def simulated(name: str, case: Case, folder: Path) -> Row:
    """Plant a cause, ask `why`, and find out what its absence and its remedy gain."""
    options = {**JOB, **case.job}
    well = described(**case.well)
    ill = {**well, **case.ill}
    before = rate(ill, options, folder / "ill")
    found = why(folder / "ill")
    first = found.causes[0]
    changed = remedy_of(found, first)
    after = rate(ill, {**options, **changed}, folder / "remedy") if first.remedy else None
    return Row(
        case=name,
        planted=case.cause,
        named=first.what,
        predicted=first.gain,
        truth=rate(well, options, folder / "well") / before - 1,
        remedy=first.remedy,
        remedy_predicted=first.remedy_gain,
        remedy_truth=None if after is None else after / before - 1,
    )


def remedy_of(found: Why, cause: Cause) -> dict[str, Any]:
    """Return the options of a cause's remedy."""
    return next((dict(each.options) for each in found.changes if each.what == cause.remedy), {})


def real(name: str, folder: Path) -> Row:
    """Train for real with a planted cause; its absence cannot be had, its remedy can."""
    planted, changed = REAL[name]
    options = {**REAL_JOB, **changed}
    run = train(out=folder / "ill", start_method="fork", **options)
    assert run is not None
    found = why(folder / "ill")
    first = found.causes[0]
    after = None
    if first.remedy:
        other = train(out=folder / "remedy", start_method="fork", **{**options, **remedy_of(found, first)})
        assert other is not None
        after = other.figures["images_per_s"] / run.figures["images_per_s"] - 1
    return Row(name, planted, first.what, first.gain, None, first.remedy, first.remedy_gain, after)


def table(rows: list[Row]) -> str:
    """Return the table of the page."""
    lines = [
        "| planted | named | its absence: predicted | is | remedy | predicted | is |",
        "|---|---|---|---|---|---|---|",
    ]

    def said(gain: float | None) -> str:
        return "" if gain is None else f"{100 * gain:+.0f} %"

    for row in rows:
        named = row.named if row.named == row.planted else f"**{row.named}** ({row.planted})"
        remedy = said(row.remedy_predicted) if row.remedy else ""
        lines.append(
            f"| {row.case} | {named} | {said(row.predicted)} | {said(row.truth)} | {row.remedy} | {remedy} "
            f"| {said(row.remedy_truth)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the cases that are not in the file yet, or those that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", choices=[*CASES, *REAL], help="a case to measure again")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    given = parser.parse_args()
    rows = (
        {row["case"]: Row(**row) for row in json.loads(given.out.read_text())} if given.out.exists() else {}
    )
    for name in given.only or [name for name in (*CASES, *REAL) if name not in rows]:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = (
                simulated(name, CASES[name], Path(folder)) if name in CASES else real(name, Path(folder))
            )
        every = [rows[each] for each in (*CASES, *REAL) if each in rows]
        given.out.write_text(json.dumps([asdict(row) for row in every], indent=1) + "\n")
    print(table([rows[each] for each in (*CASES, *REAL) if each in rows]))


if __name__ == "__main__":
    main()
