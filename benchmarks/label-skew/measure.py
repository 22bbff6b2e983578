"""Test accuracy of strategies where workers have different classes.

python benchmarks/label-skew/measure.py --out benchmarks/label-skew/results.json    add the rows that are missing
python benchmarks/label-skew/measure.py --out benchmarks/label-skew/results.json --table
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import polyrhythm

STRATEGIES = (
    "synchronous",
    "local_sgd(steps=24)",
    "diloco(steps=24)",
    "admm(steps=24)",
    "scaffold(steps=24)",
)
RATES = (0.1, 0.3, 1.0)
SEEDS = (1, 2, 3)
SKEWS = (0.1, None)


def measured(strategy: str, rate: float, seed: int, skew: float | None) -> dict[str, object]:
    """Train for 20 epochs, and return the test accuracy with what it was trained with."""
    with TemporaryDirectory() as scratch:
        run = polyrhythm.simulate(
            cluster="ut_austin",
            data="digits",
            model="mlp",
            strategy=strategy,
            workers=8,
            epochs=20,
            batch_size=15,
            optimizer=f"sgd(lr={rate}, momentum=0)",
            schedule="constant",
            label_skew=skew,
            seed=seed,
            keep_checkpoints=0,
            out=Path(scratch, "run"),
        )
        top1 = round(float(run.figures["test_top1"]), 4)
    return {"strategy": strategy, "rate": rate, "seed": seed, "skew": skew, "top1": top1}


def table(rows: list[dict[str, object]]) -> str:
    """Return the mean accuracy and range over seeds at the best rate of each strategy, as Markdown."""
    lines = ["| strategy | classes differ (0.1) | rate | all classes alike | rate |", "|---|---|---|---|---|"]
    for strategy in STRATEGIES:
        cells = []
        for skew in SKEWS:
            found: dict[object, list[float]] = defaultdict(list)
            for row in rows:
                if (row["strategy"], row["skew"]) == (strategy, skew):
                    found[row["rate"]].append(float(str(row["top1"])))
            rate, best = max(found.items(), key=lambda each: mean(each[1]))
            cells.append(f"{mean(best):.3f} ({min(best):.3f} to {max(best):.3f}) | {rate}")
        lines.append(f"| `{strategy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    rows = json.loads(asked.out.read_text()) if asked.out.exists() else []
    if asked.table:
        print(table(rows))
        return
    known = {(row["strategy"], row["rate"], row["seed"], row["skew"]) for row in rows}
    for seed, skew, rate, strategy in product(SEEDS, SKEWS, RATES, STRATEGIES):
        if (strategy, rate, seed, skew) not in known:
            rows.append(measured(strategy, rate, seed, skew))
            asked.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
