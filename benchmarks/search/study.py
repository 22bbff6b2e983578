"""Does the search pay? TPE with hyperband beside random search, and PBT beside a fixed schedule, at equal effort.

    python benchmarks/search/study.py [--seeds 3] [--only hyperband|pbt] [--most N] [--out DIR]

`lenet5` on the first 4,000 training pictures of Fashion-MNIST. Another 2,000 of its training pictures are what a
search tests on, prunes and chooses by; the figure is the top-1 of the chosen network on the 10,000 test pictures, which
no search has seen.

A search has 90 s of virtual time, about 16 whole trials of 9 epochs by two workers of a simulated host, with real
gradients, whatever method it is by. What it would have come to with less time is told, too: the choice among the trials
that had ended by then.

PBT has 10 members and 12 epochs; the fixed schedules beside it (constant, cosine) begin with the same parameters and
train as many pictures, each member to its end. Of both the member with the best last test is chosen.

What is in DIR already is not measured again; `--most` ends after so many searches.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import struct
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import polyrhythm
from polyrhythm.api.run_process import RunProcess
from polyrhythm.api.tune import trial_options
from polyrhythm.data.open import open_data
from polyrhythm.search.space import Space

TRAIN, CHECK = 4_000, 2_000
MEMBERS, EPOCHS = 10, 12
MODEL = "lenet5(dropout={dropout})"
BUDGET_S = 90.0
EARLIER_S = 30.0, 45.0, 60.0, 75.0
CLUSTER = """
name: one host
hosts: [{name: host, count: 1, workers: 2}]
inside: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e+10}
nic: {latency_s: 5.0e-5, bandwidth_bytes_per_s: 1.25e+8}
step_time: constant(seconds=0.01)
"""
SEARCHED = {
    "lr": {"from": 0.0003, "to": 1.0, "log": True},
    "optimizer": ["sgd", "sgd(momentum=0.9)", "adam"],
    "label_smoothing": {"from": 0.0, "to": 0.3},
    "model": MODEL,
    "dropout": {"from": 0.0, "to": 0.8},
}
CHANGED = {"lr": {"from": 0.0003, "to": 1.0, "log": True}, "label_smoothing": {"from": 0.0, "to": 0.3}}


def write_idx(path: Path, numbers: Tensor) -> None:
    """Write bytes as MNIST's files have them."""
    head = struct.pack(f">4B{numbers.ndim}I", 0, 0, 8, numbers.ndim, *numbers.shape)
    path.write_bytes(gzip.compress(head + numbers.to(torch.uint8).numpy().tobytes(), 1))


def write_pictures(place: Path) -> None:
    """Write the pictures as two sets in MNIST's format: one tested on those that choose, one on the test pictures."""
    data = open_data("fashion-mnist")

    def part(split: Any, chosen: Tensor) -> tuple[Tensor, Tensor]:
        shown = split.images(chosen)[:, 0]
        lowest, highest = shown.amin(), shown.amax()
        return ((shown - lowest) / (highest - lowest) * 255).round(), split.labels[chosen]

    train = part(data.train, torch.arange(TRAIN))
    tests = {
        "search": part(data.train, torch.arange(len(data.train) - CHECK, len(data.train))),
        "last": part(data.test, torch.arange(len(data.test))),
    }
    for name, test in tests.items():
        (place / name).mkdir()
        for prefix, (images, labels) in (("train", train), ("t10k", test)):
            write_idx(place / name / f"{prefix}-images-idx3-ubyte.gz", images)
            write_idx(place / name / f"{prefix}-labels-idx1-ubyte.gz", labels)


def on_test(run: Path, data: Path) -> float:
    """Return a run's top-1 on the test pictures."""
    found: float = polyrhythm.evaluate(run, data=f"mnist={data / 'last'}")["test_top1"]
    return found


def searched(method: str, options: dict[str, Any], data: Path, place: Path) -> dict[str, Any]:
    """Make one search in virtual time; return what it had chosen by each time, and how many trials it had."""
    cluster = place / "cluster.yaml"
    cluster.write_text(CLUSTER)
    options |= {"cluster": cluster, "workers": 2, "batch_size": 32, "epochs": 9}
    found = polyrhythm.tune(
        SEARCHED, method=method, budget=f"{BUDGET_S:g}s", out=place / "search", jobs=1, **options
    )
    known: dict[str, float] = {}
    chosen = {}
    for until_s in (*EARLIER_S, BUDGET_S):
        past_s, best = 0.0, None
        for trial in found.search.trials:  # one after another
            past_s += trial.seconds or 0.0
            if past_s > until_s:
                break
            if (
                trial.state == "done"
                and trial.value is not None
                and (best is None or trial.value > best.value)
            ):
                best = trial
        if best is not None:
            if best.folder not in known:
                known[best.folder] = on_test(place / "search" / best.folder, data)
            chosen[f"{until_s:g}"] = {
                "check": best.value,
                "test": known[best.folder],
                "parameters": best.parameters,
            }
    ended = [trial for trial in found.search.trials if trial.state == "done"]
    return {
        "by_seconds": chosen,
        "test": chosen[f"{BUDGET_S:g}"]["test"],
        "trials": len(found.search.trials),
        "whole_trials": len(ended),
    }


def population(options: dict[str, Any], data: Path, place: Path) -> dict[str, Any]:
    """Train a population; return its best member's test, and what its members began with."""
    found = polyrhythm.tune(
        CHANGED, method="pbt", population=MEMBERS, budget="10h", out=place / "search", **options
    )
    trials = found.search.trials
    at_end = [trial for trial in trials if trial.folder.endswith(f"interval-{EPOCHS - 1:02d}")]
    first = [dict(trial.parameters) for trial in trials if trial.folder.endswith("interval-00")]
    assert len(at_end) == len(first) == MEMBERS
    best = max(at_end, key=lambda trial: trial.value or 0.0)
    return {
        "check": best.value,
        "test": on_test(place / "search" / best.folder, data),
        "checks": [trial.value for trial in at_end],
        "begun": first,
    }


def scheduled(
    schedule: str, begun: list[dict[str, Any]], options: dict[str, Any], data: Path, place: Path
) -> dict[str, Any]:
    """Train the same members, each by itself with a fixed schedule; return the best one's test."""
    process, values = RunProcess(), []
    for number, parameters in enumerate(begun):
        told = trial_options({**options, "schedule": schedule}, Space.of(CHANGED), parameters)
        answer = process.make({"folder": str(place / f"run-{number}"), "options": told, "simulation": {}})
        # A rate with which the loss is not finite comes to nothing.
        values.append(answer.get("test_top1") or 0.0)
    process.close()
    best = max(range(len(values)), key=values.__getitem__)
    return {"check": values[best], "test": on_test(place / f"run-{best}", data), "checks": values}


def by_method(method: str, seed: int, data: Path, place: Path, begun: list[Any]) -> dict[str, Any]:
    """Make one search.

    Args:
        method: of the search, or a fixed schedule.
        seed: of the search and of its runs.
        data: what `write_pictures` wrote.
        place: for its runs.
        begun: parameters with which the members of a population have begun, for a fixed schedule.
    """
    options: dict[str, Any] = {"data": f"mnist={data / 'search'}", "seed": seed}
    if method in ("random", "hyperband"):
        return searched(method, options, data, place)
    options |= {"model": "lenet5", "workers": 1, "batch_size": 64, "epochs": EPOCHS}
    options |= {"optimizer": "sgd(momentum=0.9)", "keep_checkpoints": 1}
    if method == "pbt":
        return population(options, data, place)
    return scheduled(method, begun, options, data, place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["hyperband", "pbt"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--most", type=int, default=1_000)
    given = parser.parse_args()
    left = given.most
    path = given.out / "results.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    pairs = [("hyperband", "random"), ("pbt", "constant", "cosine")]
    with TemporaryDirectory() as data:
        write_pictures(Path(data))
        for pair in pairs:
            for seed in range(given.seeds if given.only in (None, pair[0]) else 0):
                for method in pair:
                    if str(seed) in known.setdefault(method, {}) or not left:
                        continue
                    left -= 1
                    with TemporaryDirectory() as place:
                        begun = known.get("pbt", {}).get(str(seed), {}).get("begun", [])
                        began_s = time.perf_counter()
                        found = by_method(method, seed, Path(data), Path(place), begun)
                        known[method][str(seed)] = found
                    print(method, seed, found["test"], f"{time.perf_counter() - began_s:.0f} s", flush=True)
                    path.write_text(json.dumps(known, indent=1) + "\n")
    print("| method | test top-1, seed by seed | mean |\n|---|---|---|")
    for method, seeds in known.items():
        if not seeds:
            continue
        if method in pairs[0]:
            for until_s in EARLIER_S:
                row(
                    f"{method}, {until_s:g} s",
                    [each["by_seconds"].get(f"{until_s:g}") for each in seeds.values()],
                )
        row(method, list(seeds.values()))


def row(name: str, found: list[dict[str, Any] | None]) -> None:
    """Print a row of the table; None: nothing had ended yet."""
    told = ", ".join("–" if each is None else f"{100 * each['test']:.2f}" for each in found)
    values = [each["test"] for each in found if each is not None]
    mean = f"{100 * statistics.mean(values):.2f}" if len(values) == len(found) else ""
    print(f"| {name} | {told} | {mean} |")


if __name__ == "__main__":
    main()
