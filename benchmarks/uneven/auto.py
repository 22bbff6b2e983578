"""What the default balance reaches, beside `off` and `measured`: one epoch each.

    python benchmarks/uneven/auto.py [--seeds 3] [--only STRATEGY …]

Simulated: four workers on 1 Gb/s, one epoch of 60,000 small images in batches of 64 (235 steps), a step of 0.1 s with a
spread of 5 %. One worker is slower by the factor of its column; `slows down`: it becomes three times slower after half
of the even epoch. Seconds of virtual time, medians of seeds, and by what share `auto` takes longer than the better of
the other two. *Noticed*: steps of the slowed worker until shares change, the most of all seeds. *Changes*: seeds in
which `auto` changed the shares of even workers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from even import STRATEGIES

from polyrhythm.api.simulate import simulate
from polyrhythm.events import BatchesBalanced

HERE = Path(__file__).parent
CLUSTER = """
name: auto
hosts:
  - {name: fast, count: 3, cores: 8, server_takes: 0}
  - {name: slow, count: 1, cores: 8, server_takes: 0, speed: SPEED}
nic: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 1.17e8}
inside: {latency_s: 2.0e-5, bandwidth_bytes_per_s: 4.0e9}
step_time: log_normal(mean=0.1, sigma=0.05)
"""
DATA = "synthetic(classes=10, size=28, channels=1, train=60000, test=10)"
CASES = {"even": 1, "2:1": 2, "3:1": 3, "5:1": 5, "slows down": 1}
SLOWS_S = 12.0
BALANCES = ("off", "measured", "auto")


class Changes:
    """The changes of shares of a run."""

    def __init__(self) -> None:
        self.events: list[BatchesBalanced] = []

    def on_event(self, event: object) -> None:
        if isinstance(event, BatchesBalanced):
            self.events.append(event)

    def close(self) -> None:
        pass


def run(strategy: str, case: str, balance: str, seed: int) -> dict[str, Any]:
    """Return the seconds of an epoch, the number of changes of shares, and the steps until the first."""
    faults = f"slow(rank=3, factor=3, from_s={SLOWS_S}, to_s=1000)" if case == "slows down" else ""
    changes = Changes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(CLUSTER.replace("SPEED", str(1 / CASES[case])))
        figures = simulate(
            cluster=path,
            out=Path(folder) / "run",
            gradients="none",
            strategy=strategy,
            balance=balance,
            data=DATA,
            model="mlp",
            workers=4,
            epochs=1,
            seed=seed,
            observers=[changes],
            **({"faults": faults} if faults else {}),
        ).figures
    first = next((event.time_s for event in changes.events if event.time_s >= SLOWS_S), None)
    return {
        "seconds": figures["seconds"],
        "changes": len(changes.events),
        "noticed_steps": None if first is None else (first - SLOWS_S) / 0.3,
    }


def simulated(strategy: str, seeds: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for case in CASES:
        runs = {
            balance: [run(strategy, case, balance, seed) for seed in range(seeds)] for balance in BALANCES
        }
        cell: dict[str, Any] = {
            balance: round(statistics.median(each["seconds"] for each in runs[balance]), 2)
            for balance in BALANCES
        }
        cell["longer_than_better"] = round(cell["auto"] / min(cell["off"], cell["measured"]) - 1, 4)
        if case == "even":
            cell["seeds_with_changes"] = sum(each["changes"] > 0 for each in runs["auto"])
        if case == "slows down":
            noticed = [each["noticed_steps"] for each in runs["auto"]]
            cell["noticed_steps"] = None if None in noticed else round(max(noticed), 1)
        row[case] = cell
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=STRATEGIES)
    asked = parser.parse_args()
    path = HERE / "auto.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for strategy in asked.only:
        kept.setdefault("simulated", {})[strategy] = row = simulated(strategy, asked.seeds)
        for case, cell in row.items():
            print(strategy, case, cell, flush=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
