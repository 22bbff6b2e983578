"""How much of a plan's miss is the seeds': the cases of `real.py` with both sets of seeds, all in simulation.

    python benchmarks/plan/seeds.py [--target top1=0.88] [--seeds 2] [--bits 1e8]

The simulator has the same step times and links for both, so what is left between seeds 0, 1, … (a plan's trials) and
100, 101, … (the runs that it is held against) is what no prediction from other seeds can know: here a test, an epoch,
earlier or later.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "simulator-fidelity"))

from held_out import FIRST_UNSEEN_SEED, JOB, summary
from real import MOST_EPOCHS, STRATEGIES, WORKERS, Setting, described

from polyrhythm.api.simulate import simulate
from polyrhythm.evaluation.target import Target
from polyrhythm.reporting.comparison import read_run, throughput, time_to
from polyrhythm.simulation.cluster import Link

LATENCY_S, OVERHEAD_S = 2e-4, 2e-3


def main() -> None:
    """Run all cases with both sets of seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="top1=0.88")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--bits", type=float, default=1e8)
    chosen = parser.parse_args()
    between = Link(latency_s=LATENCY_S, bandwidth_bytes_per_s=chosen.bits / 8)
    inside = Link(latency_s=LATENCY_S / 10, bandwidth_bytes_per_s=1e9)
    setting = Setting("even hosts", (1.0, 1.0, 1.0, 1.0), chosen.bits)
    cluster, goal = described(setting, between, inside, OVERHEAD_S), Target.parse(chosen.target)
    cases: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy in STRATEGIES:
            for workers in WORKERS:
                means: list[list[float]] = []
                for first in (0, FIRST_UNSEEN_SEED):
                    found = []
                    for seed in range(first, first + chosen.seeds):
                        out = Path(folder) / f"{len(cases)}-{seed}"
                        simulate(
                            cluster=cluster,
                            strategy=strategy,
                            workers=workers,
                            seed=seed,
                            epochs=MOST_EPOCHS,
                            schedule="constant",
                            until=chosen.target,
                            out=out,
                            **JOB,
                        )
                        run = read_run(out)
                        found.append((throughput(run), time_to(goal)(run)))
                    means.append([statistics.fmean(each) for each in zip(*found, strict=True)])
                (rate, seconds), (unseen_rate, unseen) = means
                cases.append(
                    {
                        "case": f"{strategy}, {workers}w",
                        "predicted_images_per_s": rate,
                        "images_per_s": unseen_rate,
                        "predicted_s": seconds,
                        "seconds": unseen,
                    }
                )
                print(f"{cases[-1]['case']}: {seconds:.2f} s, {unseen:.2f} s with unseen seeds", flush=True)
    print(summary(cases))


if __name__ == "__main__":
    main()
