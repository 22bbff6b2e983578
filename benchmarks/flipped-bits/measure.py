"""Bits flipped at random in the memory of one of two or three workers, and the time of the digests that find them.

    python benchmarks/flipped-bits/measure.py [--flips 200] [--pairs 50] [--out FILE]

Every run is simulated with real gradients: `mlp` on `digits`, one epoch, digests every 20 steps. A bit of a random
worker's parameters or optimizer state is flipped after a random step. Runs in the file are not repeated. Digests are
timed in real runs of two workers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.errors import PolyrhythmError
from polyrhythm.events import Event, RunEnded, StateDiffers
from polyrhythm.launch.children import run_local
from polyrhythm.roles import digests
from polyrhythm.roles.digests import DigestSender
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.run import ConstantCluster, job_program
from polyrhythm.simulation.simulated_run import constant_run
from polyrhythm.strategies.role_assignment import roles_in_order

EVERY = 20
STRATEGIES = ("synchronous", "lazy_synchronous")
NETWORKS = (("mlp", "digits"), ("mlp", "fashion-mnist"), ("lenet5", "fashion-mnist"))


def job_of(strategy: str, workers: int) -> Job:
    options = {"data": "digits", "model": "mlp", "optimizer": "sgd(momentum=0.9)", "strategy": strategy}
    lengths = {"workers": workers, "epochs": 1, "batch_size": 5, "on_not_finite": "skip"}
    return assemble(configure(options | lengths | {"digest_every": EVERY}), CheckpointConfig())


def play(job: Job, faults: str = "", seed: int = 0) -> tuple[list[Event], list[torch.Tensor]]:
    """Return the events of a run, and the final parameters of its workers."""
    events: list[Event] = []
    run = constant_run(roles_in_order(job.workers, 0), job_program(job), events.append, ConstantCluster())
    injector = FaultInjector(run, job.strategy, parse_faults(faults), seed=seed)
    injector.play()
    return events, [injector.states[worker][1].vector for worker in range(job.workers)]


def flip(number: int, healthy: dict[tuple[str, int], str]) -> dict[str, Any]:
    """Return the outcome of a run with one flipped bit."""
    random = Random(number)
    workers, where = 2 + number % 2, ("parameters", "optimizer")[number // 2 % 2]
    strategy = STRATEGIES[number // 4 % 2]
    job = job_of(strategy, workers)
    key = strategy, workers
    if key not in healthy:
        events, _ = play(job)
        assert not any(isinstance(event, StateDiffers) for event in events), "a healthy run differs"
        healthy[key] = events[-1].result["parameters_sha256"] if isinstance(events[-1], RunEnded) else ""
    rank, step = random.randrange(workers), random.randrange(1, job.calendar.total_steps - 2 * EVERY)
    outcome: dict[str, Any] = {
        "strategy": strategy,
        "workers": workers,
        "where": where,
        "rank": rank,
        "step": step,
    }
    try:
        events, vectors = play(job, f"flip(rank={rank}, after_step={step}, where={where})", number)
    except PolyrhythmError as error:
        return outcome | {"error": str(error)}
    found = [event for event in events if isinstance(event, StateDiffers)]
    bits = [vector.view(torch.int32) for vector in vectors]
    end = events[-1]
    assert isinstance(end, RunEnded)
    return outcome | {
        "found": [[event.step, event.workers] for event in found],
        "equal": all(torch.equal(bits[0], each) for each in bits),
        "as_healthy": end.result["parameters_sha256"] == healthy[key],
    }


def table(outcomes: list[dict[str, Any]]) -> None:
    print(
        "| strategy | workers | bits of | flips | found within 20 steps, named | equal bits at the end "
        "| bits of the healthy run | ended in one line |\n|---|---|---|---|---|---|---|---|"
    )
    for strategy in STRATEGIES:
        for workers in (2, 3):
            for where in ("parameters", "optimizer"):
                rows = [
                    each
                    for each in outcomes
                    if (each["strategy"], each["workers"], each["where"]) == (strategy, workers, where)
                ]
                named = [
                    each
                    for each in rows
                    if len(each.get("found", ())) == 1
                    and each["step"] < each["found"][0][0] <= each["step"] + EVERY
                    and each["found"][0][1] == ([each["rank"]] if workers > 2 else [0, 1])
                ]
                counts = [sum(each.get(key, False) for each in rows) for key in ("equal", "as_healthy")]
                ended = sum("error" in each for each in rows)
                print(
                    f"| `{strategy}` | {workers} | {where} | {len(rows)} | {len(named)} | {counts[0]} "
                    f"| {counts[1] if workers == 2 else '–'} | {ended} |"
                )


def share(model: str, data: str, pairs: int, folder: Path) -> tuple[int, float, float, float, float]:
    """Return figures of two real synchronous workers; all are medians over pairs of 20 steps and their digest.

    Returns:
        Parameters of the model; CPU seconds of 20 steps; of a digest; of all that follows from it on a worker (copy of
        the state, message); and the ratio of digest and steps.
    """
    options = {"data": data, "model": model, "workers": 2, "strategy": "synchronous", "epochs": 100}
    job = assemble(
        configure(options | {"optimizer": "sgd(momentum=0.9)", "digest_every": EVERY, "balance": "off"}),
        CheckpointConfig(),
    )
    after_step, digest_of, taken = (
        DigestSender.after_step,
        digests.digest_of,
        list[tuple[float, float, float]](),
    )
    digest_s = since_s = 0.0

    def timed_digest(tensors: Any) -> int:
        nonlocal digest_s
        began_s = time.process_time()
        found = digest_of(list(tensors))
        digest_s = time.process_time() - began_s
        return found

    def timed(self: DigestSender, done: int) -> None:
        nonlocal since_s
        if done % EVERY:
            return after_step(self, done)
        began_s = time.process_time()
        after_step(self, done)
        ended_s = time.process_time()
        if done:
            taken.append((began_s - since_s, digest_s, ended_s - began_s))
            (folder / f"{os.getpid()}.json").write_text(json.dumps(taken[2:]))
            since_s = time.process_time()
            if len(taken) == pairs + 2 and self._part.exchanger.workers.rank == 0:
                os.kill(os.getppid(), signal.SIGINT)
        return None

    DigestSender.after_step, digests.digest_of = timed, timed_digest  # type: ignore[method-assign]
    try:
        run_local(job, lambda event: None, threads=1)
    finally:
        DigestSender.after_step, digests.digest_of = after_step, digest_of  # type: ignore[method-assign]
    rows = [row for path in folder.iterdir() for row in json.loads(path.read_text())]
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    size = sum(parameter.numel() for parameter in job.make_model().parameters())
    return size, medians[0], medians[1], medians[2], statistics.median(row[1] / row[0] for row in rows)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--flips", type=int, default=200)
    options.add_argument("--pairs", type=int, default=50)
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    outcomes = json.loads(chosen.out.read_text()) if chosen.out.exists() else []
    healthy: dict[tuple[str, int], str] = {}
    for number in range(len(outcomes), chosen.flips):
        outcomes.append(flip(number, healthy))
        chosen.out.write_text("[\n" + ",\n".join(map(json.dumps, outcomes)) + "\n]\n")
    table(outcomes)
    print(
        "\n| model, data | parameters | 20 steps | a digest | with copy and message | share of the digest |"
    )
    print("|---|---|---|---|---|---|")
    for model, data in NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            size, *times_s, ratio = share(model, data, chosen.pairs, Path(folder))
        steps_ms, digest_us, all_us = 1e3 * times_s[0], 1e6 * times_s[1], 1e6 * times_s[2]
        print(
            f"| `{model}`, {data} | {size:,} | {steps_ms:.1f} ms | {digest_us:.0f} us | {all_us:.0f} us | {ratio:.2%} |"
        )


if __name__ == "__main__":
    main()
