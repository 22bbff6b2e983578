"""How much do the losses for noisy labels regain? Digits with a share of the training labels replaced at random.

    python benchmarks/noisy-labels/measure.py [--seeds 5] [--out benchmarks/noisy-labels]

`mixed(replicas=2)` of 4 workers in virtual time, 20 epochs; Campos et al., ICCS 2017, train weak labels so.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import polyrhythm
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.open import open_data

LOSSES = {
    "cross entropy": {},
    "label smoothing": {"label_smoothing": 0.1},
    "bootstrapping": {"loss": "bootstrapping(beta=0.8)"},
    "small losses": {"loss": "small_loss(forget={noise})"},
}
NOISES = (0.0, 0.2, 0.4)


def with_noise(share: float, seed: int) -> Dataset:
    """Return the digits; a share of the training labels are other classes, drawn uniformly."""
    data, draw = open_data("digits"), torch.Generator().manual_seed(seed)
    count, classes = len(data.train), len(data.classes)
    wrong = torch.randperm(count, generator=draw)[: round(share * count)]
    labels = data.train.labels.clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, classes, wrong.shape, generator=draw)) % classes
    train = TensorSplit(data.train.images(torch.arange(count)), labels)
    return Dataset("digits", train, data.test, data.classes, data.image_shape, data.default_epochs)


def top1(loss: str, noise: float, seed: int) -> float:
    """Return the test accuracy of a run in percent, on right labels."""
    options = {
        key: value.format(noise=noise) if isinstance(value, str) else value
        for key, value in LOSSES[loss].items()
    }
    with TemporaryDirectory() as folder:
        run = polyrhythm.simulate(
            cluster="office",
            data=with_noise(noise, seed),
            model="mlp(hidden=[128, 64])",
            strategy="mixed(replicas=2)",
            workers=4,
            optimizer="sgd(lr=0.05, momentum=0)",
            batch_size=8,
            epochs=20,
            seed=seed,
            out=Path(folder) / "run",
            **options,
        )
    return 100 * float(run.figures["test_top1"])


def main() -> None:
    """Measure all cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    rows = []
    for loss in LOSSES:
        row: dict[str, object] = {"loss": loss}
        for noise in NOISES:
            found = (
                [top1(loss, noise, seed) for seed in range(chosen.seeds)]
                if noise or loss != "small losses"
                else []
            )
            row[f"{noise:.0%}"] = [round(each, 1) for each in found]
            shown = f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f}" if found else ""
            print(f"{loss:<16} {noise:4.0%} {shown}", flush=True)
        rows.append(row)
        if chosen.out is not None:
            (chosen.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
