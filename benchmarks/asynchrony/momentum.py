"""What momentum=auto wins back of what asynchrony costs.

    python benchmarks/asynchrony/momentum.py [--seeds 3] [--workers 8] [--rates 0.01,0.03] [--images N] [--out DIR]

`lenet5(widths=[8, 16], hidden=64)` on `digits` in batches of 16, or on the first N images of Fashion-MNIST,
in virtual time with real gradients: one worker alone, 8 asynchronous ones with the same momentum of 0.9 and the same
rate of a gradient, 8 with less of it, and 8 whose server corrects the momentum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from dial import cluster
from study import job_of, run, spread

SETTINGS = {
    "one worker": (1, "0.9"),
    "asynchronous, momentum 0.9": (0, "0.9"),
    "asynchronous, momentum 0": (0, "0"),
    "asynchronous, momentum 0.6": (0, "0.6"),
    "asynchronous, momentum 0.8": (0, "0.8"),
    "asynchronous, momentum=auto": (0, "auto"),
    "asynchronous, momentum=auto, estimate=median": (0, "auto, estimate=median"),
}


def accuracies(setting: str, rate: float, chosen: argparse.Namespace) -> list[float]:
    """Trains with every seed; gives the test accuracies in percent, 10 where the loss was not finite any more."""
    workers, momentum = SETTINGS[setting]
    found = []
    for seed in range(chosen.seeds):
        options = {
            "data": "fashion-mnist" if chosen.images else "digits",
            "model": "lenet5(widths=[8, 16], hidden=64)",
            "strategy": "parameter_server(placement=dedicated)",
            "workers": workers or chosen.workers,
            "optimizer": f"sgd(lr={rate}, momentum={momentum})",
            "schedule": "constant",
            "batch_size": 16,
            "epochs": chosen.epochs,
            "seed": seed,
        }
        outcome = run(job_of(options, chosen.images, 2_000), cluster(workers or chosen.workers))
        found.append(10.0 if outcome is None else 100 * outcome.top1)
        print(f"{setting}, rate {rate:g}, seed {seed}: {found[-1]:.1f}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rates", default="0.01,0.02,0.04")
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    began_s = time.process_time()
    rates = [float(rate) for rate in chosen.rates.split(",")]
    found = {setting: {rate: accuracies(setting, rate, chosen) for rate in rates} for setting in SETTINGS}
    lines = [
        "| setting | " + " | ".join(f"rate {rate:g}" for rate in rates) + " |",
        "|---" * (len(rates) + 1) + "|",
    ]
    for setting, of_rates in found.items():
        lines.append(f"| {setting} | " + " | ".join(f"{spread(of_rates[rate])} %" for rate in rates) + " |")
    means = {s: {rate: statistics.mean(values) for rate, values in each.items()} for s, each in found.items()}
    alone, stale, auto = (
        means[name] for name in ("one worker", "asynchronous, momentum 0.9", "asynchronous, momentum=auto")
    )
    worst = max(rates, key=lambda rate: alone[rate] - stale[rate])
    cost, won = alone[worst] - stale[worst], auto[worst] - stale[worst]
    lines.append(
        f"\nAt rate {worst:g} asynchrony costs {cost:.1f} points of top-1, of which momentum=auto wins {won:.1f} back. "
        f"{chosen.seeds} seeds, {time.process_time() - began_s:.0f} s of processor."
    )
    print("\n".join(lines))
    if chosen.out is not None:
        (chosen.out / "momentum.md").write_text("\n".join(lines) + "\n")
        (chosen.out / "momentum.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
