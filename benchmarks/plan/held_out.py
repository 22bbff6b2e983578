"""Plans held against what then happens: times of a plan's trials, and of runs with seeds that it has not seen.

    python benchmarks/plan/held_out.py [--target top1=0.88] [--seeds 2] [--out FILE]

Every case is a strategy with a number of workers on a cluster. `plan` races them to the target; then the same cases run
to the target in simulation, with seeds that `plan` has not seen. `covered` is the share of their times within the
plan's 80 % intervals. Both clocks are virtual, so a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from polyrhythm.api.compare import Plan as Runs
from polyrhythm.api.compare import carry_out
from polyrhythm.api.plan import plan
from polyrhythm.evaluation.target import Target
from polyrhythm.reporting.comparison import throughput, time_to

CLUSTERS = ("office", "ut_austin")
STRATEGIES = ("synchronous", "parameter_server(servers=1)", "local_sgd(steps=4)", "easgd")
WORKERS = (2, 4)
EPOCHS, MOST_EPOCHS, FIRST_UNSEEN_SEED = 20, 80, 100
JOB: dict[str, Any] = {"data": "digits", "model": "mlp", "batch_size": 32}


def kendall_tau(first: Sequence[float], second: Sequence[float], noise: float = 0.0) -> float:
    """Return τ_b; values that differ by less than `noise`, as a share, are ties."""
    agreeing = ties_first = ties_second = 0
    pairs = list(combinations(range(len(first)), 2))
    for a, b in pairs:
        signs = []
        for values in (first, second):
            gap = values[a] - values[b]
            signs.append(0 if abs(gap) <= noise * max(values[a], values[b]) else (1 if gap > 0 else -1))
        agreeing += signs[0] * signs[1]
        ties_first += signs[0] == 0
        ties_second += signs[1] == 0
    return agreeing / math.sqrt((len(pairs) - ties_first) * (len(pairs) - ties_second))


def held_out(cluster: str, target: str, seeds: int, folder: Path) -> dict[str, object]:
    """Plan on a cluster, run every choice to the target, and return both."""
    planned = plan(
        cluster=cluster,
        target=target,
        strategies=STRATEGIES,
        workers=WORKERS,
        trials=len(STRATEGIES) * len(WORKERS),
        seeds=seeds,
        epochs=EPOCHS,
        trial_epochs=MOST_EPOCHS,
        out=folder / "plan",
        **JOB,
    )
    every = [*planned.choices, *planned.others]
    runs = Runs(
        strategies=[],
        workers=[],
        seeds=list(range(FIRST_UNSEEN_SEED, FIRST_UNSEEN_SEED + seeds)),
        grid={},
        options=JOB,
        simulation={"cluster": cluster},
        until=target,
        cases=[
            {
                "strategy": each.candidate.strategy,
                "workers": each.candidate.workers,
                "epochs": each.epochs if each.reached else MOST_EPOCHS,
            }
            for each in every
        ],
    )
    goal = Target.parse(target)
    truth = {
        (row.strategy, row.workers): row for row in carry_out(runs, out=folder / "truth").comparison.rows
    }
    cases: list[dict[str, Any]] = []
    for each in every:
        row = truth[each.candidate.strategy, each.candidate.workers]
        cases.append(
            {
                "case": f"{each.candidate.strategy}, {each.candidate.workers}w",
                "trials_that_reached_it": each.reached,
                "predicted_images_per_s": each.candidate.images_per_s,
                "images_per_s": row.mean(throughput),
                "predicted_s": each.seconds[0] if math.isfinite(each.seconds[0]) else None,
                "low_s": each.seconds[1] if math.isfinite(each.seconds[1]) else None,
                "high_s": each.seconds[2] if math.isfinite(each.seconds[2]) else None,
                "seconds": statistics.fmean(time_to(goal)(run) for run in row.runs),
                "covered": sum(each.seconds[1] < time_to(goal)(run) < each.seconds[2] for run in row.runs),
                "unseen": len(row.runs) if math.isfinite(each.seconds[1]) else 0,
            }
        )
    covered = sum(each["covered"] for each in cases) / max(1, sum(each["unseen"] for each in cases))
    return {"cluster": cluster, "target": target, "covered": covered, "cases": cases, **summary(cases)}


def summary(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Return errors, τ and regret over the cases of a cluster; never to arrive counts as wrong."""
    predicted = [float(each["predicted_s"] or math.inf) for each in cases]
    actual = [float(each["seconds"]) for each in cases]
    rates = [(float(each["predicted_images_per_s"]), float(each["images_per_s"])) for each in cases]
    chosen = actual[min(range(len(cases)), key=lambda place: predicted[place])]
    return {
        "throughput_error": statistics.median(abs(told / seen - 1) for told, seen in rates),
        "time_error": statistics.median(
            abs(told / seen - 1) if math.isfinite(told) else 1.0
            for told, seen in zip(predicted, actual, strict=True)
        ),
        "kendall_tau": kendall_tau([min(each, 1e12) for each in predicted], actual, noise=0.05),
        "regret": chosen / min(actual) - 1,
    }


def main() -> None:
    """Run both clusters and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="top1=0.88")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "held_out.json")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [
            held_out(cluster, chosen.target, chosen.seeds, Path(folder) / cluster) for cluster in CLUSTERS
        ]
    chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for each in found:
        print(json.dumps(each, indent=1))


if __name__ == "__main__":
    main()
