"""Polyrhythm inside Ray Train: Ray starts and places the workers, and what each of them does is `polyrhythm.train`.

    pip install "polyrhythm[ray]"
    python examples/ray_train.py --workers 2

Ray's TorchTrainer sets torchrun's variables and hosts the store in which ranks meet, so the call is the same as under
torchrun. `polyrhythm submit --engine ray` needs no script, and makes lost ranks again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def train(settings: dict[str, str]) -> None:
    """What every worker of Ray Train does."""
    import polyrhythm

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # Ray's worker 0 hosts the store already
    run = polyrhythm.train(data="digits", model="mlp", epochs=3, threads=1, **settings)
    if run is not None:  # on worker 0
        print(f"test top-1 {100 * run.figures['test_top1']:.1f} %")


def main() -> None:
    """Read the options and start the workers."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--strategy", default="synchronous")
    options.add_argument("--out", default="runs/ray-train")
    chosen = options.parse_args()
    out = str(Path(chosen.out).resolve())  # Ray's workers have another working directory
    TorchTrainer(
        train,
        train_loop_config={"strategy": chosen.strategy, "out": out},
        scaling_config=ScalingConfig(num_workers=chosen.workers, resources_per_worker={"CPU": 0.5}),
    ).fit()


if __name__ == "__main__":
    main()
