"""What our training loop costs over a bare torch loop of the same model, data and threads.

    python benchmarks/loop/measure.py [--model lenet5] [--data fashion-mnist] [--steps 100] [--rounds 9]

Both loops run in this one process, in turn, on the same batches; what is compared is the median of the ratios of
neighboring rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import islice

import torch

from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.roles.model_workload import ModelWorkload
from polyrhythm.roles.step_metrics import Tally
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step


class Bare:
    """The loop of every PyTorch tutorial."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        self.job = job
        self.model = job.make_model()
        self.optimizer = job.learning.optimizer.create(self.model.parameters())
        self.criterion = torch.nn.CrossEntropyLoss()

    def run(self, steps: int) -> float:
        split, size = self.job.dataset.train, self.job.learning.batch_size
        order = torch.randperm(len(split))
        total = 0.0
        start = time.perf_counter()
        for step in range(steps):
            chosen = order[step * size : (step + 1) * size]
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(split.images(chosen)), split.labels[chosen])
            loss.backward()
            self.optimizer.step()
            total += float(loss.detach())
        return time.perf_counter() - start


class Ours:
    """One worker of a `synchronous` run, with all that a run does at every step."""

    def __init__(self, job: Job, world: World) -> None:
        self.workload = ModelWorkload(job, world)
        self.workload.replica.part.start(0)
        self.tally = Tally(0, world.clock)
        self.epoch = 0
        self.number = 0

    def run(self, steps: int) -> float:
        batches = self.workload.batches(self.epoch, 0)
        self.epoch += 1
        workload, replica = self.workload, self.workload.replica
        start = time.perf_counter()
        for batch in islice(batches, steps):
            step = Step(self.number, batch.size / workload.batch_size)
            replica.begin(step)
            loss, rate, _ = workload.compute(step, batch)
            computed_at_s = time.perf_counter()
            replica.exchange(step, rate * workload.rate_ratio)
            self.number += 1
            self.tally.add(batch.size, loss, time.perf_counter() - computed_at_s)
            if self.tally.due:
                self.tally.say(self.epoch, self.number, rate)
        return time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="lenet5")
    options.add_argument("--data", default="fashion-mnist")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--threads", type=int, default=1)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    run = {"data": chosen.data, "model": chosen.model, "workers": 1, "schedule": "constant"}
    config = configure(run | {"epochs": chosen.rounds + 1})
    job = assemble(config, CheckpointConfig())
    store = host_store()
    home, network = connect(local(0, 1, store.port))
    bare, ours = Bare(job), Ours(job, World(network, RoleAssignment((0,))))
    steps = min(chosen.steps, job.steps_per_epoch)
    bare.run(steps)
    ours.run(steps)
    pairs = [(bare.run(steps), ours.run(steps)) for _ in range(chosen.rounds)]
    ratios = [mine / theirs for theirs, mine in pairs]
    per_step = [1e6 * statistics.median(column) / steps for column in zip(*pairs, strict=True)]
    print(
        f"{chosen.model} on {chosen.data}, batch 64, {chosen.threads} thread(s), "
        f"{chosen.rounds} rounds of {steps} steps"
    )
    print(f"bare torch loop   {per_step[0]:9.1f} us a step (median)")
    print(f"polyrhythm        {per_step[1]:9.1f} us a step (median)")
    print(
        f"ratio             {statistics.median(ratios):9.4f} (median; {min(ratios):.4f} to {max(ratios):.4f})"
    )
    home.close()


if __name__ == "__main__":
    main()
