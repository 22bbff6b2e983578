"""Simulated trainings in which workers draw their batches, or share them by speed, and things go wrong.

    python benchmarks/fault-seeds/drawn_seeds.py [--first 0] [--seeds 1000] [--only NAME …]
    python benchmarks/fault-seeds/drawn_seeds.py --go-on [--seeds 1000] [--only NAME …]

The second form tries what `drawn.json` lacks of so many seeds, and adds it there after every 50.

Two epochs of 240 pictures on 4 workers of which the last is three times slow, with real gradients. Each seed draws one
to three faults, as in `fault_seeds.py`, and kills no rank that the run needs. Checked of each seed:

- the run ends, and has seen every picture (`images_not_seen`), where no lost worker's share is lost by design;
- where batches are drawn: what was granted, less what was given back, is every place of every epoch's order exactly
  once, as the run's events tell it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fault_seeds import STEP_S, WORKERS, strategy_of, trial_of

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RunError
from polyrhythm.events import BatchesBalanced, BatchesDrawn, Event, RunEnded, WorkerJoined, WorkerLost
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.run import ConstantCluster, job_program
from polyrhythm.simulation.simulated_run import constant_run
from polyrhythm.simulation.trials import faults_of, faults_text

IMAGES, EPOCHS, BATCH = 240, 2, 8
DRAWN = (
    "parameter_server",
    "parameter_server(servers=2)",
    "softsync",
    "staleness_aware",
    "dc_asgd",
    "downpour",
    "easgd",
    "eamsgd",
    "periodic_averaging",
    "hogwild",
    "ad_psgd",
)
BALANCED = (
    "mixed(replicas=2)",
    "ssp",
    "synchronous",
    "lazy_synchronous",
    "parameter_server(consistency=synchronous)",
    "local_sgd(steps=2)",
)
NOBODY_IS_LEFT = "0 of 4 workers are left"
"""All were killed at once, and the run says so and how to go on."""
LOSES = ("mixed(replicas=2)", "local_sgd(steps=2)", "parameter_server(consistency=synchronous)", "ssp")
"""A lost worker's round, or its part of steps until it is back, if ever, is not seen by design, and told. So are the
last batches of a group that is lost when all others have found nothing left; of a worker they are worker 0's."""


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes pictures of three classes."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(3, (count,), generator=generator)
    return torch.randn(count, 1, 4, 4, generator=generator) + labels.view(-1, 1, 1, 1), labels


def job_of(spec: str, seed: int) -> Job:
    """Makes the job of a seed."""
    options = {
        "data": (pictures(IMAGES), pictures(30)),
        "model": "mlp(hidden=[5])",
        "strategy": spec,
        "workers": WORKERS,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "seed": seed,
        "balance": "measured" if spec in BALANCED else "auto",
    }
    return assemble(configure(options), CheckpointConfig(checkpoints=0))


def granted_wrong(events: list[Event]) -> str:
    """Says which places of the epochs' orders were not granted exactly once; empty if all were."""
    granted: Counter[tuple[int, int]] = Counter()
    for event in events:
        if isinstance(event, BatchesDrawn):
            change = 1 if event.batches else -1  # what has no batches is given back
            for place in range(event.start, event.stop):
                granted[event.epoch, place] += change
    wanted = {(epoch, place) for epoch in range(EPOCHS) for place in range(IMAGES)}
    twice = [each for each, times in granted.items() if times > 1]
    missing = [each for each in wanted if granted[each] < 1]
    return f"{len(twice)} places twice, {len(missing)} never" if twice or missing else ""


def try_seed(spec: str, seed: int) -> tuple[str, Counter[str]]:
    """Plays a seed; gives what is wrong, or nothing, and what happened."""
    job, trial = job_of(spec, seed), trial_of(strategy_of(spec))
    steps = IMAGES * EPOCHS // (BATCH * WORKERS)
    trial = replace(trial, dry_run=replace(trial.dry_run, steps=steps))
    faults = faults_of(trial, seed)
    events: list[Event] = []
    cluster = ConstantCluster(step_s=lambda worker: STEP_S * (3 if worker == WORKERS - 1 else 1))
    run = constant_run(trial.layout.roles, job_program(job), events.append, cluster)
    wrong = ""
    try:
        FaultInjector(run, job.strategy, faults).play()
    except RunError as error:
        wrong = "" if NOBODY_IS_LEFT in str(error) else str(error)
    ended = events[-1]
    if not wrong and isinstance(ended, RunEnded):
        not_seen = ended.result["images_not_seen"]
        if not_seen and spec not in LOSES:
            wrong = f"{not_seen} images are not seen"
        if not wrong and job.draws and spec not in LOSES:
            wrong = granted_wrong(events)
    happened = Counter(
        type(event).__name__ for event in events if isinstance(event, WorkerLost | WorkerJoined)
    )
    happened["balanced"] = any(isinstance(event, BatchesBalanced) for event in events)
    return (f"seed {seed}, {faults_text(faults)}: {wrong}" if wrong else ""), happened


HEAD = "| strategy | seeds | lost | joined | seeds in which parts changed | violations |\n|---|---|---|---|---|---|"
RESULTS = Path(__file__).with_name("drawn.json")
PIECE = 50


def tried(spec: str, seeds: range) -> dict[str, Any]:
    """Try some seeds of a strategy; return what happened in them."""
    failures, happened = list[str](), Counter[str]()
    for seed in seeds:
        wrong, found = try_seed(spec, seed)
        happened += found
        failures += [wrong] if wrong else []
    names = {"lost": "WorkerLost", "joined": "WorkerJoined", "parts_changed": "balanced"}
    return {"seeds": len(seeds), **{key: happened[name] for key, name in names.items()}, "failures": failures}


def told(spec: str, row: dict[str, Any]) -> str:
    """Return a strategy's line of the table, and its first violations."""
    line = (
        f"| `{spec}` | {row['seeds']} | {row['lost']} | {row['joined']} | {row['parts_changed']} | "
        f"{len(row['failures'])} |"
    )
    return "\n".join([line, *row["failures"][:5]])


def go_on(specs: list[str], seeds: int) -> None:
    """Try what the results lack, piece by piece of all strategies in turn, and keep each piece."""
    kept: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for stop in range(PIECE, seeds + PIECE, PIECE):
        for spec in specs:
            row = kept.get(spec, {"seeds": 0, "lost": 0, "joined": 0, "parts_changed": 0, "failures": []})
            piece = range(row["seeds"], min(stop, seeds))
            if not piece:
                continue
            found = tried(spec, piece)
            kept[spec] = {key: row[key] + found[key] for key in row}
            written = RESULTS.with_suffix(".new")
            written.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            written.rename(RESULTS)
            print(*found["failures"], sep="\n", end="\n" if found["failures"] else "", flush=True)
    print(HEAD, *(told(spec, kept[spec]) for spec in specs), sep="\n")


def main() -> None:
    """Tries all seeds of all strategies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--go-on", action="store_true", help="try what the results lack, and keep it there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    specs = [spec for spec in (*DRAWN, *BALANCED) if spec in chosen.only or not chosen.only]
    if chosen.go_on:
        go_on(specs, chosen.seeds)
        return
    began_s = time.perf_counter()
    print(HEAD, flush=True)
    for spec in specs:
        print(told(spec, tried(spec, range(chosen.first, chosen.first + chosen.seeds))), flush=True)
    print(f"{time.perf_counter() - began_s:.0f} s")


if __name__ == "__main__":
    main()
