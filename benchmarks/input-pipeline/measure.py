"""What reading the data costs: training from the data set, against training on batches that lie ready in memory.

    python benchmarks/input-pipeline/measure.py [--model lenet5] [--steps 60] [--rounds 9]

Both train the same model in this one process, in turn, with all that a run of one worker does at every step. The
peer's batches are synthetic, made beforehand and used again and again; ours come out of the loader: shuffled, gathered
from the decoded data set in memory, made numbers, normalized.
`--transform` adds augmentations, which the peer does without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.loader import Batch
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.roles.model_workload import ModelWorkload
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step

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


@dataclass(frozen=True)
class Round:
    """The seconds of some steps: by the clock, of this thread's work, and of that for having the batches."""

    clock_s: float
    thread_s: float
    batches_s: float


def timed(workload: ModelWorkload, batches: Iterable[Batch]) -> Round:
    """Trains on batches."""
    now, batches_s = time.thread_time, 0.0
    clock, start = time.perf_counter(), now()
    asked = start
    for number, batch in enumerate(batches):
        batches_s += now() - asked
        step = Step(number, batch.size / workload.batch_size)
        workload.replica.begin(step)
        _, rate, _ = workload.compute(step, batch)
        workload.replica.exchange(step, rate * workload.rate_ratio)
        asked = now()
    return Round(time.perf_counter() - clock, now() - start, batches_s)


def ratio(pairs: list[tuple[float, float]]) -> str:
    """Says how fast the second of each pair is, measured by the first."""
    found = [from_memory / from_data for from_memory, from_data in pairs]
    return f"{statistics.median(found):9.4f} (median; {min(found):.4f} to {max(found):.4f})"


def epochs(workload: ModelWorkload) -> Iterator[Batch]:
    """Yield batch after batch, epoch after epoch."""
    epoch = 0
    while True:
        yield from workload.batches(epoch, 0)
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
    job = assemble(
        configure(given | ({"augment": chosen.transform} if chosen.transform else {})), CheckpointConfig()
    )
    store = host_store()
    home, network = connect(local(0, 1, store.port))
    workload = ModelWorkload(job, World(network, RoleAssignment((0,))))
    workload.replica.part.start(0)
    ready, read = cycle(synthetic(job)), epochs(workload)
    for batches in (ready, read):
        timed(workload, islice(batches, chosen.steps))
    pairs = [
        (timed(workload, islice(ready, chosen.steps)), timed(workload, islice(read, chosen.steps)))
        for _ in range(chosen.rounds)
    ]
    print(
        f"{chosen.model} on {chosen.data} {chosen.transform}, batch {job.learning.batch_size}, "
        f"{chosen.threads} thread(s), {chosen.rounds} rounds of {chosen.steps} steps"
    )
    for what, column in zip(("ready in memory", "from the data"), zip(*pairs, strict=True), strict=True):
        step_us, batch_us = (
            1e6 * statistics.median(found) / chosen.steps
            for found in ([each.clock_s for each in column], [each.batches_s for each in column])
        )
        print(
            f"batches {what:17s} {step_us:9.1f} us a step, {batch_us:.1f} us of it work for the batch (medians)"
        )
    print(f"speed by the clock        {ratio([(memory.clock_s, data.clock_s) for memory, data in pairs])}")
    print(f"speed by the thread       {ratio([(memory.thread_s, data.thread_s) for memory, data in pairs])}")
    home.close()


if __name__ == "__main__":
    main()
