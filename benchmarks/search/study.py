"""Does the search pay? TPE with hyperband beside random search, and PBT beside a fixed schedule, at equal effort.

    python benchmarks/search/study.py [--seeds 3] [--only hyperband|pbt] [--most N] [--out DIR]

`lenet5(widths=[8, 16], hidden=64)` on the first 4,000 pictures of Fashion-MNIST, tested on 1,000 of its test pictures,
which also choose (so all values are a little too good, alike for both). A search has 60 s of virtual time of a
simulated host with two workers, with real gradients, whatever method it is by. PBT has 4 members and 8 epochs; the
fixed schedules beside it (constant, cosine) begin with the same parameters and train as many pictures, each member to
its end. Of both the best last test counts. What is in DIR already is not measured again; `--most` ends after so many
searches.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

import polyrhythm
from polyrhythm.api.run_process import RunProcess
from polyrhythm.api.tune import trial_options
from polyrhythm.data.open import open_data
from polyrhythm.search.space import Space

TRAIN, TEST = 4_000, 1_000
MEMBERS, EPOCHS = 4, 8
MODEL = "lenet5(widths=[8, 16], hidden=64)"
CLUSTER = """
name: one host
hosts: [{name: host, count: 1, workers: 2}]
inside: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e+10}
nic: {latency_s: 5.0e-5, bandwidth_bytes_per_s: 1.25e+8}
step_time: constant(seconds=0.01)
"""
SEARCHED = {
    "lr": {"from": 0.0003, "to": 1.0, "log": True},
    "label_smoothing": {"from": 0.0, "to": 0.3},
    "batch_size": [16, 32, 64, 128],
    "optimizer": ["sgd", "sgd(momentum=0.9)", "adam"],
}
CHANGED = {"lr": {"from": 0.0003, "to": 1.0, "log": True}, "label_smoothing": {"from": 0.0, "to": 0.3}}


def pictures(place: Path) -> str:
    """Writes the pictures as a folder of classes; gives its name."""
    data = open_data("fashion-mnist")
    for split, name, count in ((data.train, "train", TRAIN), (data.test, "test", TEST)):
        for number in range(count):
            shown = split.images(torch.tensor([number]))[0, 0]
            folder = place / name / f"{int(split.labels[number])}"
            folder.mkdir(parents=True, exist_ok=True)
            grey = ((shown - shown.min()) / (shown.max() - shown.min()) * 255).round().byte()
            Image.fromarray(grey.numpy()).save(folder / f"{number:05d}.png")
    return str(place)


def by_method(method: str, seed: int, data: str, place: Path, begun: list[Any]) -> dict[str, Any]:
    """Makes one search; gives its best value and how many trials it had.

    Args:
        method: of the search, or a fixed schedule.
        seed: of the search and of its runs.
        data: a folder of pictures.
        place: for its runs.
        begun: parameters with which the members of a population have begun, for a fixed schedule.
    """
    cluster = place / "cluster.yaml"
    cluster.write_text(CLUSTER)
    options: dict[str, Any] = {"data": data, "model": MODEL, "seed": seed}
    if method in ("random", "hyperband"):
        options |= {"cluster": cluster, "workers": 2, "epochs": 9, "method": method, "jobs": 1}
        found = polyrhythm.tune(SEARCHED, budget="60s", out=place / "search", **options)
        best = found.search.best()
        assert best is not None
        return {"best": best.value, "trials": len(found.search.trials)}
    options |= {"workers": 1, "epochs": EPOCHS, "optimizer": "sgd(momentum=0.9)"}
    if method == "pbt":
        found = polyrhythm.tune(
            CHANGED, method="pbt", population=MEMBERS, budget="1h", out=place / "search", **options
        )
        trials = found.search.trials
        at_end = [trial.value for trial in trials if trial.folder.endswith(f"interval-{EPOCHS - 1:02d}")]
        first = [dict(trial.parameters) for trial in trials if trial.folder.endswith("interval-00")]
        assert len(at_end) == len(first) == MEMBERS
        return {"best": max(at_end), "trials": MEMBERS, "begun": first}
    process, values = RunProcess(), []
    for number, parameters in enumerate(begun):
        told = trial_options({**options, "schedule": method}, Space.of(CHANGED), parameters)
        answer = process.make({"folder": str(place / f"run-{number}"), "options": told, "simulation": {}})
        values.append(
            answer.get("test_top1") or 0.0
        )  # a rate with which the loss is not finite comes to nothing
    process.close()
    return {"best": max(values), "trials": len(values)}


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
        pictures(Path(data))
        for pair in pairs:
            for seed in range(given.seeds if given.only in (None, pair[0]) else 0):
                for method in pair:
                    if str(seed) in known.setdefault(method, {}) or not left:
                        continue
                    left -= 1
                    with TemporaryDirectory() as place:
                        begun = known.get("pbt", {}).get(str(seed), {}).get("begun", [])
                        known[method][str(seed)] = by_method(method, seed, data, Path(place), begun)
                    print(method, seed, known[method][str(seed)]["best"], flush=True)
                    path.write_text(json.dumps(known, indent=1) + "\n")
    print("| method | best top-1, seed by seed | mean | trials |\n|---|---|---|---|")
    for method, seeds in known.items():
        if not seeds:
            continue
        values = [each["best"] for each in seeds.values()]
        told = ", ".join(f"{100 * value:.1f}" for value in values)
        trials = ", ".join(str(each["trials"]) for each in seeds.values())
        print(f"| {method} | {told} | {100 * statistics.mean(values):.2f} | {trials} |")


if __name__ == "__main__":
    main()
