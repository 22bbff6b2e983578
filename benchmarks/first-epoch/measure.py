"""What every strategy learns in its first epoch with nothing but defaults: `lenet5`, Fashion-MNIST, 3 workers.

    python benchmarks/first-epoch/measure.py --out benchmarks/first-epoch/results.json [--only NAME …] [--seed N]

Real gradients in virtual time, one process. Results that the file has already are not measured again, so that the table
may be made in pieces; without `--only` all strategies are measured that are missing. `--table` prints it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import polyrhythm

WORKERS = 3
ASKED = 0.80
CLUSTER = "office"
OF_ONE_HOST = "h100_pair"
"""Three workers fit into the first of its hosts, and so may share memory."""


def measured(strategy: str, seed: int) -> dict[str, object]:
    """Train for an epoch, and return test accuracy, what it trained with, and seconds of this machine."""
    began = monotonic()
    with TemporaryDirectory() as scratch:
        run = polyrhythm.simulate(
            cluster=OF_ONE_HOST if strategy == "hogwild" else CLUSTER,
            data="fashion-mnist",
            model="lenet5",
            strategy=strategy,
            workers=WORKERS,
            epochs=1,
            seed=seed,
            keep_checkpoints=0,
            out=Path(scratch, "run"),
        )
        figures = run.figures
    return {
        "strategy": strategy,
        "seed": seed,
        "top1": round(float(figures["test_top1"]), 4),
        "loss": round(float(figures["test_loss"]), 4),
        "steps": figures["steps"],
        "seconds": round(monotonic() - began),
    }


def table(found: list[dict[str, object]]) -> str:
    """Return the results as Markdown, the best first."""
    rows = sorted(found, key=lambda each: (-float(str(each["top1"])), str(each["strategy"])))
    lines = [
        f"| `{each['strategy']}` | {each['top1']:.3f} | {each['loss']:.3f} | {each['steps']} |"
        for each in rows
    ]
    return "\n".join(
        ["| strategy | test top-1 | test loss | steps of a worker |", "|---|---|---|---|", *lines]
    )


def main() -> None:
    """Measure what is missing, and keep every result as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[each["name"] for each in polyrhythm.strategies()])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print what is there, and measure nothing")
    arguments = parser.parse_args()
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    if not arguments.table:
        known = {(each["strategy"], each["seed"]) for each in found}
        for strategy in arguments.only:
            if (strategy, arguments.seed) not in known:
                found.append(measured(strategy, arguments.seed))
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")
                print(json.dumps(found[-1]), flush=True)
    print(table([each for each in found if each["seed"] == arguments.seed]))
    short = [each["strategy"] for each in found if float(str(each["top1"])) < ASKED]
    print(f"below {ASKED}: {', '.join(map(str, short)) or 'none'}")


if __name__ == "__main__":
    main()
