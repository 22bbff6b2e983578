"""How true the simulation is: throughput on hosts that exist against its prediction.

    python benchmarks/simulator-fidelity/measure.py [--megabits 100,200,1000] [--hosts 2,3,4] [--seconds 3] [--out DIR]

Hosts are network namespaces with shaped links. Of each rate, one link between two hosts, one inside a host and one
worker alone are measured, and nothing else is told to the simulation. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # no name server knows the namespaces, and it says so at length

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from cells import Calibration, Cell, calibrate

from namespaces import Host, shaped_hosts
from ranks import RanksFailed

STRATEGIES = {  # and the workers on each host
    "synchronous(collective=ring)": 1,
    "synchronous": 1,
    "parameter_server(servers=1, consistency=synchronous)": 1,
    "parameter_server(servers=2, consistency=synchronous)": 1,
    "parameter_server(servers=1)": 1,
    "parameter_server(servers=2)": 1,
    "mixed(replicas=2, inside=synchronous(collective=ring))": 2,
}
ONE_WAY_S = 0.04
"""A whole model alone on a link: about as long as a step computes, so that both count."""

MOST_MODEL_BYTES = 4_000_000
"""More would measure two cores copying, not links."""


@dataclass(frozen=True)
class Row:
    """A line of the table; steps are those of all workers together."""

    megabits_per_s: int
    hosts: int
    strategy: str
    measured_steps_per_s: float
    simulated_steps_per_s: float

    @property
    def error(self) -> float:
        """Of the simulation, as a fraction of what was measured."""
        return self.simulated_steps_per_s / self.measured_steps_per_s - 1

    def line(self) -> str:
        """As a line of Markdown."""
        return (
            f"| {self.megabits_per_s} Mb/s | {self.hosts} | `{self.strategy}` | {self.measured_steps_per_s:.2f} "
            f"| {self.simulated_steps_per_s:.2f} | {100 * self.error:+.1f} % |"
        )


HEAD = "| link | hosts | strategy | measured steps/s | simulated steps/s | error |\n|---|---|---|---|---|---|"


def main() -> None:
    chosen = _options()
    rows: list[Row] = []
    calibrations: dict[str, Any] = {}
    started_at = time.monotonic()
    print(HEAD, flush=True)
    for megabits in chosen.megabits:
        model_bytes = _model_bytes(megabits)
        with shaped_hosts(max(chosen.hosts), megabits * 1e6) as hosts:
            calibration = calibrate(hosts, model_bytes, chosen.seconds)
            calibrations[f"{megabits} Mb/s"] = {"model_bytes": model_bytes, **asdict(calibration)}
            print(f"{megabits} Mb/s: {calibration}", file=sys.stderr, flush=True)
            for count in chosen.hosts:
                for strategy in chosen.strategies:
                    cell = Cell(
                        strategy, count, STRATEGIES.get(strategy, 1), model_bytes, chosen.seconds, chosen.seed
                    )
                    row = _row(megabits, cell, hosts[:count], calibration)
                    if row is not None:
                        rows.append(row)
                        print(row.line(), flush=True)
    facts = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"Linux {platform.release()}, torch {torch.__version__}",
        "seed": chosen.seed,
        "seconds": round(time.monotonic() - started_at, 1),
        "calibrations": calibrations,
    }
    _report(facts, rows, chosen.out)


def _row(megabits: int, cell: Cell, hosts: list[Host], calibration: Calibration) -> Row | None:
    try:
        measured = cell.measured(hosts)
    except (RanksFailed, ValueError) as error:
        print(f"{megabits} Mb/s, {cell.hosts} hosts, {cell.strategy}: {error}", file=sys.stderr, flush=True)
        return None
    return Row(megabits, cell.hosts, cell.strategy, measured, cell.simulated(calibration))


def _model_bytes(megabits: int) -> int:
    """Of a whole number of elements that divides among 2 buckets and up to 4 hosts."""
    return min(MOST_MODEL_BYTES, round(megabits * 1e6 / 8 * ONE_WAY_S)) // 192 * 192


def _report(facts: dict[str, Any], rows: list[Row], out: Path | None) -> None:
    errors = [abs(row.error) for row in rows]
    within = sum(error <= 0.1 for error in errors)
    summary = f"{within} of {len(rows)} within 10 %, largest error {100 * max(errors):.1f} %, in {facts['seconds']} s"
    print(f"\n{summary}")
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    table = [{**asdict(row), "error": row.error} for row in rows]
    (out / "results.json").write_text(json.dumps({**facts, "rows": table}, indent=1) + "\n", encoding="utf-8")
    lines = [f"`{facts['command']}`, {facts['machine']}, seed {facts['seed']}: {summary}.", "", HEAD]
    (out / "results.md").write_text(
        "\n".join([*lines, *(row.line() for row in rows)]) + "\n", encoding="utf-8"
    )


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--megabits", type=_numbers, default=[100, 200, 1000])
    options.add_argument("--hosts", type=_numbers, default=[2, 3, 4])
    options.add_argument("--strategies", type=lambda text: text.split(";"), default=list(STRATEGIES))
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=None)
    return options.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts are removed then too
    torch.set_num_threads(1)  # before ranks are forked: they must not inherit other threads
    main()
