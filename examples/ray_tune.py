"""Ray Tune chooses: strategies and learning rates, tried side by side on a Ray cluster, the worse ones ended early.

    pip install "polyrhythm[ray]"
    python examples/ray_tune.py --trials 6

A trial is a `polyrhythm.train` that reports each test to Ray, whose scheduler says after every one which trials go on.
`polyrhythm tune` and `polyrhythm compare --tune lr` do the like without Ray.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

STRATEGIES = ("synchronous", "local_sgd(steps=4)", "parameter_server")


class Reports:
    """Hands each test of a run to Ray Tune."""

    def on_event(self, event: Any) -> None:
        from ray import tune

        from polyrhythm.events import Evaluated

        if isinstance(event, Evaluated):
            tune.report({"top1": event.test_top1, "epoch": event.epoch})

    def close(self) -> None:
        """Nothing is held back."""


def trial(settings: dict[str, Any]) -> None:
    """What Ray Tune runs for each choice."""
    from ray import tune

    import polyrhythm

    out = Path(settings.pop("out")) / tune.get_context().get_trial_id()
    polyrhythm.train(
        data="digits", model="mlp", workers=2, threads=1, out=out, observers=[Reports()], **settings
    )


def main() -> None:
    """Read the options, search, and print what was best."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--trials", type=int, default=6)
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--out", default="runs/ray-tune")
    chosen = options.parse_args()
    space = {
        "strategy": tune.choice(STRATEGIES),
        "lr": tune.loguniform(0.001, 0.3),
        "epochs": chosen.epochs,
        "out": str(Path(chosen.out).resolve()),  # Ray's workers have another working directory
    }
    settings = tune.TuneConfig(
        metric="top1",
        mode="max",
        num_samples=chosen.trials,
        scheduler=ASHAScheduler(time_attr="epoch", max_t=chosen.epochs, grace_period=2),
    )
    found = tune.Tuner(tune.with_resources(trial, {"CPU": 1}), param_space=space, tune_config=settings).fit()
    best = found.get_best_result()
    ended = sum(each.metrics["epoch"] < chosen.epochs for each in found)
    print(f"{len(found)} trials, {ended} ended early")
    print(
        f"best: {best.config['strategy']}, lr {best.config['lr']:.3g}, top-1 {100 * best.metrics['top1']:.1f} %"
    )


if __name__ == "__main__":
    main()
