"""Table 2 of Mullapudi, UT Austin 2017: seconds of an epoch of Downpour SGD and DC-ASGD on 4, 8 and 12 machines.

    python benchmarks/ut-austin/measure.py [--seeds 3] [--out benchmarks/ut-austin]

Real gradients in virtual time on `ut_austin`: the network and images of `figure16.py`, one epoch. One machine is the
server, so 3, 7 and 11 are workers. The last column is without a network: messages take no time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from figure16 import BATCH, PAPER_S, STEPS, epochs_of, pictures

from polyrhythm.simulation.cluster import Cluster, Link, open_cluster


def without_network() -> Cluster:
    """Return their machines with links that take no time."""
    instant = Link(latency_s=1e-12, bandwidth_bytes_per_s=1e15)
    return open_cluster("ut_austin").model_copy(update={"nic": instant, "inside": instant})


def row_of(strategy: str, machines: int, seeds: int) -> dict[str, Any]:
    """Return the figures of a strategy on some machines."""
    workers = machines - 1
    data = pictures(None, STEPS * BATCH * workers)
    full = STEPS / -(-len(data.train) // (BATCH * workers))  # 11 workers would need 61,952 of 60,000 images
    seconds, top1s = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            [epoch_s], top1 = epochs_of(strategy, workers, 1, data, Path(folder) / str(seed), seed)
            seconds.append(full * epoch_s)
            top1s.append(100 * top1)
        cluster = without_network()
        [instant_s], _ = epochs_of(strategy, workers, 1, data, Path(folder) / "instant", 0, cluster)
    return {
        "strategy": strategy,
        "machines": machines,
        "workers": workers,
        "paper_s": PAPER_S[strategy][machines],
        "seconds": statistics.mean(seconds),
        "deviation_s": statistics.stdev(seconds) if seeds > 1 else 0.0,
        "top1": statistics.mean(top1s),
        "without_network_s": full * instant_s,
    }


HEAD = (
    "| strategy | machines | paper, s | simulated, s | than 4 machines | paper | than Downpour | paper | top-1 "
    "| without a network, s |\n" + "|---" * 10 + "|"
)


def line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return a row as Markdown, next to those before it."""
    [four] = [other for other in rows if other["strategy"] == row["strategy"] and other["machines"] == 4]
    [plain] = [
        other for other in rows if other["strategy"] == "downpour" and other["machines"] == row["machines"]
    ]
    more = [
        f"{100 * (row[key] / other[key] - 1):+.1f} %"
        for other in (four, plain)
        for key in ("seconds", "paper_s")
    ]
    cells = [
        f"`{row['strategy']}`",
        str(row["machines"]),
        f"{row['paper_s']:.2f}",
        f"{row['seconds']:.3f} ± {row['deviation_s']:.3f}",
        *more,
        f"{row['top1']:.1f} %",
        f"{row['without_network_s']:.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Simulate all rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    print(HEAD, flush=True)
    rows: list[dict[str, Any]] = []
    lines = [f"`{' '.join(['python', *sys.argv])}`", "", HEAD]
    for strategy, known in PAPER_S.items():
        for machines in known:
            rows.append(row_of(strategy, machines, chosen.seeds))
            lines.append(line(rows[-1], rows))
            print(lines[-1], flush=True)
    if chosen.out is not None:
        (chosen.out / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (chosen.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
