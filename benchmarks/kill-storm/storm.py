"""Kill -9 a random worker again and again, and let it be started again: what does it cost, and what is learned?

    python benchmarks/kill-storm/storm.py [--kills 24] [--every-s 5] [--epochs 66] [--only NAME …] [--out FILE]

Real processes: 4 workers learn `digits`. A forward pass also waits for 40 ms, as for an accelerator, so that 4 workers
are 4 workers on a machine of two cores, and a dead one's time is lost: nobody else gets it. Beside each run in the
storm one with the same options runs undisturbed, at the same time, so whatever else the machine does slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from attempt import Attempt, prepare
from polyrhythm.config.assemble import strategy_from
from polyrhythm.events import Evaluated
from polyrhythm.reporting.event_log import read_events
from polyrhythm.strategies.strategy import Strategy

WORKERS, PAUSE_S, LAST_EPOCHS = 4, 0.04, 10
FIRST_KILL_S = 3.0
STRATEGIES = ("parameter_server", "ssp", "backup_workers", "ad_psgd")
OPTIONS: dict[str, Any] = {
    "data": "digits",
    "workers": WORKERS,
    "batch_size": 8,
    "restarts": 1000,
    "keep_checkpoints": 1,
}


class Paced(nn.Module):
    """UT Austin's perceptron, whose forward pass in training takes a while and notes when it began.

    Args:
        folder: where each process keeps its times, as float64 of the monotonic clock.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.folder = folder

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            with (self.folder / str(os.getpid())).open("ab") as file:
                file.write(torch.tensor([time.monotonic()], dtype=torch.float64).numpy().tobytes())
            time.sleep(PAUSE_S)
        out: Tensor = self.layers(images)
        return out


@dataclass(frozen=True)
class Kill:
    """A worker's death: which, when, and what the processes were and became."""

    rank: int
    at_s: float
    successor: int
    others: tuple[int, ...]


def step_times(folder: Path) -> dict[int, list[float]]:
    """Reads when each process began its steps."""
    return {
        int(path.name): torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float64).tolist()
        for path in folder.iterdir()
        if path.stat().st_size
    }


def torment(
    attempt: Attempt, strategy: Strategy, chosen: argparse.Namespace, draw: random.Random
) -> list[Kill]:
    """Kills a random worker every few seconds; the one that leads only where the others go on without it."""
    attempt.wait_for_ranks(WORKERS + strategy.traits(WORKERS).servers)
    first = 0 if strategy.faults(WORKERS).leader else 1
    place = dict(enumerate(attempt.ranks()))
    kills: list[Kill] = []
    due_s = time.monotonic() + FIRST_KILL_S
    while len(kills) < chosen.kills and attempt.process.is_alive():
        time.sleep(max(0.0, due_s - time.monotonic()))
        rank = draw.randrange(first, WORKERS)
        others = tuple(place[other] for other in range(WORKERS) if other != rank)
        known = set(place.values())
        os.kill(place[rank], signal.SIGKILL)
        at_s = time.monotonic()
        due_s = at_s + chosen.every_s
        while not (new := set(attempt.ranks()) - known) and attempt.process.is_alive():
            time.sleep(0.002)
        place[rank] = next(iter(new), 0)
        kills.append(Kill(rank, at_s, place[rank], others))
    return kills


def within(times: dict[int, list[float]], window: tuple[float, float]) -> int:
    """Counts the steps that began in a window."""
    return sum(window[0] <= at_s < window[1] for found in times.values() for at_s in found)


def lost_s(kills: list[Kill], times: dict[int, list[float]], until_s: float) -> float:
    """Adds up the seconds from each death to the next step that anybody took under the same rank."""
    total_s = 0.0
    for rank in range(WORKERS):
        deaths = [kill for kill in kills if kill.rank == rank]
        steps = sorted(at_s for kill in deaths for at_s in times.get(kill.successor, []))
        back_s = 0.0
        for death in deaths:
            if death.at_s >= back_s:  # else it was a successor that had not got to its first step
                back_s = min([at_s for at_s in steps if at_s > death.at_s] + [until_s])
                total_s += back_s - death.at_s
    return total_s


def going_on_s(kill: Kill, times: dict[int, list[float]]) -> float:
    """Return the seconds from a death until all others have begun a second step after it: one has been finished.

    Who had not begun to take steps then, as another one's successor, is not counted.
    """
    seconds = []
    for process in kill.others:
        steps = times.get(process, [])
        later = [at_s for at_s in steps if at_s > kill.at_s]
        if len(steps) > len(later) > 1:
            seconds.append(later[1] - kill.at_s)
    return max(seconds, default=0.0)


def accuracy(run: Path) -> float:
    """Return the mean test accuracy of the last epochs, in percent."""
    tested = [event.test_top1 for event in read_events(run / "events.jsonl") if isinstance(event, Evaluated)]
    return 100 * statistics.mean(tested[-LAST_EPOCHS:])


def figures(runs: Sequence[Path], kills: list[Kill], ends: list[dict[str, Any]]) -> dict[str, Any]:
    """Compares the storm with the undisturbed run."""
    calm, storm = (step_times(run.with_suffix(".steps")) for run in runs)
    window = (
        kills[0].at_s,
        min(kills[-1].at_s + 5, *(max(map(max, found.values())) for found in (calm, storm))),
    )
    share = lost_s(kills, storm, window[1]) / (WORKERS * (window[1] - window[0]))
    gaps = [after - before for found in calm.values() for before, after in pairwise(found)]
    waits = [going_on_s(kill, storm) for kill in kills]
    return {
        "kills": len(kills),
        "kills_of_worker_0": sum(kill.rank == 0 for kill in kills),
        "workers_lost": ends[1]["workers_lost"],
        "workers_joined": ends[1]["workers_joined"],
        "images_not_seen": ends[1]["images_not_seen"],
        "window_s": window[1] - window[0],
        "steps_calm": within(calm, window),
        "steps_storm": within(storm, window),
        "throughput_loss": 1 - within(storm, window) / within(calm, window),
        "share_of_time_lost": share,
        "top1_calm": accuracy(runs[0]),
        "top1_storm": accuracy(runs[1]),
        "median_step_s": statistics.median(gaps),
        "going_on_median_s": statistics.median(waits),
        "going_on_max_s": max(waits),
        "going_on_s": [[kill.rank, round(wait_s, 3)] for kill, wait_s in zip(kills, waits, strict=True)],
    }


def pair(strategy: str, chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains twice at the same time, once in the storm."""
    runs = [folder / "calm", folder / "storm"]
    attempts = []
    for run in runs:
        steps = run.with_suffix(".steps")
        steps.mkdir()
        torch.manual_seed(0)
        options = OPTIONS | {"strategy": strategy, "epochs": chosen.epochs, "model": Paced(steps)}
        attempts.append(Attempt(run, options))
    kills = torment(attempts[1], strategy_from(strategy), chosen, random.Random(strategy))
    ends = []
    for attempt in attempts:
        how, told = attempt.end(600)
        assert how == "done", told
        ends.append(told)
    return {"strategy": strategy} | figures(runs, kills, ends)


HEAD = (
    "| strategy | kills | of worker 0 | joined | share of time lost | throughput loss | top-1 undisturbed | "
    "in the storm | others go on: median | worst | allowed |\n" + "|---" * 11 + "|"
)


def line(found: dict[str, Any]) -> str:
    """A row as Markdown."""
    return (
        f"| `{found['strategy']}` | {found['kills']} | {found['kills_of_worker_0']} | {found['workers_joined']} "
        f"| {100 * found['share_of_time_lost']:.1f} % | {100 * found['throughput_loss']:.1f} % "
        f"| {found['top1_calm']:.1f} % | {found['top1_storm']:.1f} % | {found['going_on_median_s']:.2f} s "
        f"| {found['going_on_max_s']:.2f} s | {2 * found['median_step_s'] + 1:.2f} s |"
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--kills", type=int, default=24)
    options.add_argument("--every-s", type=float, default=5.0)
    options.add_argument("--epochs", type=int, default=66)
    options.add_argument("--only", nargs="*", default=STRATEGIES)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    print(HEAD, flush=True)
    rows = []
    for strategy in chosen.only:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(pair(strategy, chosen, Path(folder)))
        print(line(rows[-1]), flush=True)
        if chosen.out is not None:
            facts = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "rows": rows}
            chosen.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare()
    main()
