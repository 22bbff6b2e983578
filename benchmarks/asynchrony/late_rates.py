"""Which default optimizer bears late gradients: `parameter_server` without SGD's momentum, and with it.

    python benchmarks/asynchrony/late_rates.py [--workers 4] [--seeds 0,1,2,3,4]
    python benchmarks/asynchrony/late_rates.py --warm-up [--seeds 0,1,2,3,4]

`lenet5`, the first 10,000 pictures of Fashion-MNIST, three passes in batches of 32, tested on 2,000: simulated, so the
same on any machine. `--warm-up` is a plain loop whose gradients are applied exactly three updates late, with
SGD(lr=0.0125, momentum=0.9) and a cosine after a linear warm-up over a share of the run.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from math import ceil, cos, pi
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1] / "uneven"))
from drawn import ONE_HOST, simulated

from polyrhythm.data.open import open_data
from polyrhythm.models.create import create_model

PICTURES, TESTS, BATCH, PASSES, DELAY = 10_000, 2_000, 32, 3, 3
BEFORE, RATES, SHARES = 0.05, (0.2, 0.3, 0.4), (0.0, 0.1, 0.2)
"""The rate with momentum 0.9, and those without, of all workers together; the warm-up's shares of the run."""
Pictures = tuple[Tensor, Tensor]


def pictures() -> tuple[Pictures, Pictures]:
    """Return the training and the test pictures, each with labels."""
    data, (few, tests) = open_data("fashion-mnist"), (torch.arange(PICTURES), torch.arange(TESTS))
    return (data.train.images(few), data.train.labels[few]), (
        data.test.images(tests),
        data.test.labels[tests],
    )


def free_running(optimizer: str, workers: int, seed: int) -> float:
    """Return the test accuracy after training by equally fast workers that never wait."""
    cluster = ONE_HOST.replace("slow: {3: 5}\n", "").replace("workers: 4", f"workers: {workers}")
    figures = simulated(
        cluster,
        strategy="parameter_server",
        optimizer=optimizer,
        data=pictures(),
        model="lenet5",
        workers=workers,
        batch_size=BATCH,
        epochs=PASSES,
        seed=seed,
        keep_checkpoints=0,
    )
    return figures["test_top1"]


def late(warm: float, seed: int) -> float:
    """Return the test accuracy after plain training whose gradients are `DELAY` updates late."""
    (images, labels), (tests, truth) = pictures()
    torch.manual_seed(seed)
    network = create_model("lenet5", classes=10, image_shape=(1, 28, 28))
    parameters, waiting = list(network.parameters()), deque[Sequence[Tensor]]()
    optimizer = torch.optim.SGD(parameters, lr=BEFORE / (DELAY + 1), momentum=0.9)
    steps, order = ceil(PICTURES / BATCH) * PASSES, torch.Generator().manual_seed(seed)
    for step in range(steps):
        warmed = step - warm * steps
        factor = (
            (step + 1) / (warm * steps) if warmed < 0 else (1 + cos(pi * warmed / (steps * (1 - warm)))) / 2
        )
        batch = torch.randint(PICTURES, (BATCH,), generator=order)
        waiting.append(torch.autograd.grad(cross_entropy(network(images[batch]), labels[batch]), parameters))
        if len(waiting) > DELAY:
            for parameter, gradient in zip(parameters, waiting.popleft(), strict=True):
                parameter.grad = gradient
            optimizer.param_groups[0]["lr"] = BEFORE / (DELAY + 1) * factor
            optimizer.step()
    with torch.no_grad():
        return float((network(tests).argmax(1) == truth).float().mean())


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--warm-up", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    optimizers = [f"sgd(lr={BEFORE / asked.workers:g})"]
    optimizers += [f"sgd(lr={rate / asked.workers:g},momentum=0)" for rate in RATES]
    settings = (
        {
            f"warm-up over {share:g} of the run": [late(share, seed) for seed in seeds] for share in SHARES
        }.items()
        if asked.warm_up
        else ((each, [free_running(each, asked.workers, seed) for seed in seeds]) for each in optimizers)
    )
    for name, tops in settings:
        print(f"{name:32} {', '.join(f'{top:.3f}' for top in tops)}   mean {mean(tops):.3f}", flush=True)


if __name__ == "__main__":
    main()
