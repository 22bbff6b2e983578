"""CPU or K80 (table 1): what an epoch takes and costs on each machine of the price list, in virtual time.

    python benchmarks/ut-austin/prices.py [--out benchmarks/ut-austin]

`plan` on cluster `ut_austin`: 3 workers and a server of its own, the paper's network and strategy, prices of 2017. An
epoch is 352 steps of every worker, as in `measure.py`. Each worker has a GPU where there are some, so two machines with
several GPUs are enough, one of them for the server.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import polyrhythm

STEPS, WORKERS, BATCH = 352, 3, 16
OWN = "n1-standard-4"
"""Machine of the cluster file, on which the paper trained."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as place:
        plan = polyrhythm.plan(
            cluster="ut_austin",
            target="top1=0.8",
            machines="all",
            data="digits",
            model="mlp(hidden=[64, 64], dropout=0.2)",
            strategies="downpour(placement=dedicated)",
            workers=[WORKERS],
            batch_size=BATCH,
            seeds=1,
            out=Path(place) / "plan",
        )
    rows = []
    for choice in (*plan.choices, *plan.others):
        assert choice.price is not None
        seconds = STEPS * WORKERS * BATCH / choice.candidate.images_per_s
        per_s = choice.price / choice.seconds[0]
        rows.append(
            {
                "machine": choice.candidate.machine or OWN,
                "hosts": choice.candidate.hosts,
                "epoch_s": seconds,
                "epoch_usd": seconds * per_s,
                "year_usd": per_s * 365 * 86400,
            }
        )
    rows.sort(key=lambda row: row["epoch_usd"])
    lines = ["| machine | machines | epoch, s | epoch, USD | a year of them, USD |", "|---|---|---|---|---|"]
    lines += [
        f"| `{row['machine']}` | {row['hosts']} | {row['epoch_s']:.3g} | {row['epoch_usd']:.2g} | "
        f"{row['year_usd']:,.0f} |"
        for row in rows
    ]
    print("\n".join(lines))
    if given.out is not None:
        command = "python benchmarks/ut-austin/prices.py"
        text = json.dumps({"command": command, "rows": rows}, indent=1)
        (given.out / "prices.json").write_text(text + "\n", encoding="utf-8")
        (given.out / "prices.md").write_text("\n".join([f"`{command}`", "", *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
