"""Pick a strategy for a cluster before anything is bought or waited for.

    python examples/pick_a_strategy.py
    python examples/pick_a_strategy.py --cluster my-machines.yaml --until top1=0.95

Every candidate is rehearsed with real gradients in virtual time; the first to reach the target is taken.
"""

from __future__ import annotations

import argparse

import polyrhythm

CANDIDATES = "synchronous; parameter_server(servers=1); local_sgd(steps=8); easgd"


def main() -> None:
    """Rehearse all candidates, and print the command that runs the best."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--cluster", default="office", help="a ready cluster, or a file")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--until", default="top1=0.9")
    options.add_argument("--out", default=None, help="the folder of all runs and the report")
    chosen = options.parse_args()
    compared = polyrhythm.compare(
        strategies=CANDIDATES,
        workers=[chosen.workers],
        cluster=chosen.cluster,
        until=chosen.until,
        data="digits",
        model="mlp",
        batch_size=16,
        epochs=chosen.epochs,
        out=chosen.out,
    )
    for line in compared.comparison.verdict():
        print(line)
    best = compared.comparison.fastest()
    if best is not None:
        command = f"polyrhythm train --data digits --model mlp --batch-size 16 --workers {chosen.workers}"
        print(f"{command} --strategy '{best.strategy}'")


if __name__ == "__main__":
    main()
