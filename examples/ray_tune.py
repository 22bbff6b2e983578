"""Ray Tune compares strategies, each at several learning rates, side by side on a Ray cluster; the worse end early.

    pip install "polyrhythm[ray]"
    python examples/ray_tune.py

A trial is a run of Polyrhythm, which tells Ray of each test; Ray's scheduler says after every one which trials go on.
`polyrhythm tune` and `polyrhythm compare --tune lr` do the like without Ray.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    """Read the options, make the trials, and print what was best."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    from polyrhythm.adapters.ray_tune import trainable

    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--strategies", default="synchronous; local_sgd(steps=8)")
    options.add_argument("--rates", default="0.01,0.03,0.1")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--at-once", type=int, help="trials; as many as the cluster has cores for")
    options.add_argument("--out", default="runs/ray-tune")
    given = options.parse_args()
    out = Path(given.out).absolute()
    trial = trainable(
        data="digits", model="mlp", workers=given.workers, epochs=given.epochs, out=out / "trials"
    )
    space = {
        "strategy": tune.grid_search([each.strip() for each in given.strategies.split(";")]),
        "lr": tune.grid_search([float(rate) for rate in given.rates.split(",")]),
    }
    scheduler = ASHAScheduler(time_attr="epoch", max_t=given.epochs, grace_period=1, reduction_factor=2)
    found = tune.Tuner(
        trial,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="top1",
            mode="max",
            scheduler=scheduler,
            max_concurrent_trials=given.at_once,
            reuse_actors=True,  # one takes seconds to start
        ),
        run_config=tune.RunConfig(name="ray", storage_path=str(out)),
    ).fit()
    for each in found:
        told = each.metrics
        said = f"{told['config']['strategy']:22} lr {told['config']['lr']:<6g} epoch {told['epoch']:2}"
        print(f"{said}  top-1 {100 * told['top1']:.1f} %")
    best = found.get_best_result(scope="all").config
    print(f"best: {best['strategy']} with a rate of {best['lr']:g}")
    print(f"one report of all: polyrhythm compare {given.out}/trials/*")


if __name__ == "__main__":
    main()
