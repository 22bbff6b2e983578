"""What reading the data costs: training from the data set, against training on batches that lie ready in memory.

    python benchmarks/input-pipeline/measure.py [--model lenet5] [--steps 60] [--rounds 9]

Both train the same model in this one process, in turn, with all that a run of one worker does at every step. The
peer's batches are synthetic, made beforehand and used again and again; ours come out of the loader: shuffled, gathered
from the decoded data set in memory, made numbers, normalised.
`--transform` adds augmentations, which the peer does without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import cycle, islice

import torch

from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.communication.transports.torch_distributed.transport import connect
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.loader import Batch
from polyrhythm.roles.job import Job, Keeping
from polyrhythm.roles.learner import Learner
from polyrhythm.roles.world import World
from polyrhythm.strategies.cast import Cast

READY_BATCHES = 8


def synthetic(job: Job) -> list[Batch]:
    """Makes batches of random pictures."""
    generator = torch.Generator().manual_seed(0)
    size, shape = job.learning.batch_size, job.dataset.image_shape
    return [
        Batch(
            0,
            step,
            torch.randn(size, *shape, generator=generator),
            torch.randint(len(job.dataset.classes), (size,), generator=generator),
        )
        for step in range(READY_BATCHES)
    ]


def seconds(learner: Learner, batches: Iterable[Batch]) -> float:
    """Trains on batches; gives the seconds."""
    start = time.perf_counter()
    for number, batch in enumerate(batches):
        learner.step(batch, number)
    return time.perf_counter() - start


def epochs(learner: Learner) -> Iterator[Batch]:
    """Gives batch after batch, epoch after epoch."""
    epoch = 0
    while True:
        yield from learner.epoch(epoch, 0)
        epoch += 1


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="lenet5")
    options.add_argument("--data", default="fashion-mnist")
    options.add_argument("--transform", default="")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--threads", type=int, default=1)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    given = {"data": chosen.data, "model": chosen.model, "workers": 1, "schedule": "constant"}
    job = assemble(configure(given | ({"augment": chosen.transform} if chosen.transform else {})), Keeping())
    store = host_store()
    home, network = connect(local(0, 1, store.port))
    learner = Learner(job, World(network, Cast((0,))))
    learner.replica.part.start(0)
    ready, read = cycle(synthetic(job)), epochs(learner)
    for batches in (ready, read):
        seconds(learner, islice(batches, chosen.steps))
    pairs = [
        (seconds(learner, islice(ready, chosen.steps)), seconds(learner, islice(read, chosen.steps)))
        for _ in range(chosen.rounds)
    ]
    ratios = [from_memory / from_data for from_memory, from_data in pairs]
    per_step = [1e6 * statistics.median(column) / chosen.steps for column in zip(*pairs, strict=True)]
    print(
        f"{chosen.model} on {chosen.data} {chosen.transform}, batch {job.learning.batch_size}, "
        f"{chosen.threads} thread(s), {chosen.rounds} rounds of {chosen.steps} steps"
    )
    print(f"batches ready in memory   {per_step[0]:9.1f} us a step (median)")
    print(f"batches from the data     {per_step[1]:9.1f} us a step (median)")
    print(
        f"speed                     {statistics.median(ratios):9.4f} (median; {min(ratios):.4f} to {max(ratios):.4f})"
    )
    home.close()


if __name__ == "__main__":
    main()
