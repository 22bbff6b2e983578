"""Training loss of runs with and without SVRG, above the least possible one, in virtual time.

python benchmarks/variance-reduction/measure.py [--seeds 2] [--model mlp]
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import polyrhythm
from polyrhythm.data.sources.digits import Digits
from polyrhythm.models.create import create_model

CONVEX, NETWORK = "mlp(hidden=[])", "mlp"
STRATEGIES = {
    CONVEX: ("synchronous", "local_sgd(steps=4)", "parameter_server", "downpour", "easgd(tau=1)"),
    NETWORK: ("synchronous",),
}
SETTINGS = {CONVEX: (0.5, 12, 0.01), NETWORK: (0.1, 20, 0.0001)}
"""Rate, epochs with SVRG, and weight decay of each model."""


def objective(model: nn.Module, decay: float) -> Tensor:
    """Return the mean loss of all training images, with the penalty of the weights."""
    train = Digits().load().train
    loss = functional.cross_entropy(model(train.images(torch.arange(len(train)))), train.labels)
    return loss + decay / 2 * sum(each.square().sum() for each in model.parameters())


def least() -> float:
    """Return the least loss of the linear classifier, which is strongly convex."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=500,
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = objective(model, SETTINGS[CONVEX][2])
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    return float(objective(model, SETTINGS[CONVEX][2]).detach())


def trained(model: str, strategy: str, svrg: str, epochs: int, seed: int) -> tuple[float, float]:
    """Return the loss after a run, and its virtual seconds."""
    rate, _, decay = SETTINGS[model]
    with TemporaryDirectory() as scratch:
        run = polyrhythm.simulate(
            cluster="ut_austin",
            data="digits",
            model=model,
            strategy=strategy,
            workers=4,
            batch_size=4,
            epochs=epochs,
            optimizer=f"sgd(lr={rate}, momentum=0, weight_decay={decay})",
            schedule="constant",
            svrg=svrg,
            seed=seed,
            keep_checkpoints=0,
            out=Path(scratch, "run"),
        )
        weights = load_file(Path(scratch, "run", "model.safetensors"))
    network = create_model(model, classes=10, image_shape=(1, 8, 8))
    network.load_state_dict(weights)
    with torch.no_grad():
        return float(objective(network, decay)), float(run.figures["seconds"])


def main() -> None:
    """Print a table for each model; SGD has three times the epochs, which take as long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--model", choices=SETTINGS)
    asked = parser.parse_args()
    lowest = {CONVEX: least(), NETWORK: 0.0}
    for model, (rate, epochs, _) in SETTINGS.items():
        if asked.model not in (None, model):
            continue
        print(f"\n`{model}`, rate {rate}, least loss {lowest[model]:.4f}")
        print("\n| strategy | `svrg` | epochs | seconds | loss above the least |\n|---|---|---|---|---|")
        for strategy, (svrg, passes) in product(STRATEGIES[model], (("none", 3), ("own", 1), ("all", 1))):
            rows = [
                trained(model, strategy, svrg, epochs * passes, seed) for seed in range(1, asked.seeds + 1)
            ]
            losses = [loss - lowest[model] for loss, _ in rows]
            print(
                f"| `{strategy}` | {svrg} | {epochs * passes} | {median(seconds for _, seconds in rows):.0f} | "
                f"{median(losses):.1e} ({min(losses):.1e} to {max(losses):.1e}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
