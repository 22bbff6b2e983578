"""Figure 16 of Mullapudi, UT Austin 2017: seconds of each epoch, Downpour SGD and delay-compensated SGD.

    python benchmarks/ut-austin/figure16.py [--mnist FOLDER] [--epochs 20] [--nodes 4] [--out benchmarks/ut-austin]

Real gradients in virtual time on the ready cluster `ut_austin`: their network of two hidden layers of 64 with tanh,
dropout and weight decay, on files of MNIST's own format. Without `--mnist` those of Fashion-MNIST are taken, which have
the same format, number and size of pictures. An epoch is 352 steps of every worker of 16 images; of `nodes` machines
one is the server.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from paper_figures import curve, figure, write
from polyrhythm import simulate
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.open import open_data
from polyrhythm.data.sources.fashion_mnist import FashionMNIST
from polyrhythm.reporting.comparison import read_run
from polyrhythm.simulation.cluster import Cluster

STEPS, BATCH = 352, 16
PAPER_S = {"downpour": {4: 3.52, 8: 3.53, 12: 3.55}, "dc_asgd": {4: 3.59, 8: 3.61, 12: 3.64}}
TESTED = 1000
"""Test pictures that are looked at after every epoch."""


def pictures(folder: str | None, images: int) -> Dataset:
    """Reads MNIST's files; gives so many of the training pictures, one epoch of all workers, and some test pictures."""
    whole = open_data(f"mnist={folder}") if folder else FashionMNIST().load()
    order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(0))[:images]
    tested = torch.arange(TESTED)
    return Dataset(
        whole.name,
        TensorSplit(whole.train.images(order), whole.train.labels[order]),
        TensorSplit(whole.test.images(tested), whole.test.labels[tested]),
        whole.classes,
        whole.image_shape,
        whole.default_epochs,
    )


def epochs_of(
    strategy: str,
    workers: int,
    epochs: int,
    data: Dataset,
    folder: Path,
    seed: int = 0,
    cluster: Cluster | str = "ut_austin",
) -> tuple[list[float], float]:
    """Trains; gives the seconds of every epoch, and the last test's top-1."""
    run = folder / f"{strategy}-{workers}"
    simulate(
        cluster=cluster,
        data=data,
        model="mlp(hidden=[64, 64], dropout=0.2)",
        strategy=f"{strategy}(placement=dedicated)",
        workers=workers,
        batches="static",
        optimizer="sgd(lr=0.02, momentum=0, weight_decay=0.0001)",
        schedule="constant",
        batch_size=BATCH,
        epochs=epochs,
        seed=seed,
        out=run,
    )
    tests = read_run(run).tests
    ends = [0.0, *(test.event.time_s for test in tests)]
    return [after - before for before, after in pairwise(ends)], tests[-1].event.test_top1


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--mnist", help="folder of the four idx files")
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--nodes", type=int, default=4, choices=(4, 8, 12))
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    workers = chosen.nodes - 1
    data = pictures(chosen.mnist, STEPS * BATCH * workers)
    lines = [
        f"{data.name}, {chosen.nodes} machines: {workers} workers and a server, {chosen.epochs} epochs",
        "",
        "| strategy | epoch, mean ± deviation | paper's mean | top-1 in the end |",
        "|---|---|---|---|",
    ]
    drawn, seconds = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for index, (strategy, told) in enumerate(PAPER_S.items()):
            found, top1 = epochs_of(strategy, workers, chosen.epochs, data, Path(folder))
            seconds[strategy] = found
            drawn.append(curve(strategy, list(enumerate(found, 1)), index))
            lines.append(
                f"| `{strategy}` | {statistics.mean(found):.3f} ± {statistics.stdev(found):.3f} s "
                f"| {told[chosen.nodes]:.2f} s | {100 * top1:.1f} % |"
            )
            print(lines[-1], flush=True)
    if chosen.out is not None:
        plot = figure("Figure 16", drawn, "epoch", "seconds", yaxis={"rangemode": "tozero"})
        facts = {"seconds": seconds, "data": data.name, "torch": torch.__version__}
        write(chosen.out, "figure16", [plot], facts, "\n".join(lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
