"""What does a search cost beside its trials?

    python benchmarks/search/overhead.py [--pairs 3] [--trials 6] [--epochs N]

The same number of trials twice: by `tune` (random search, real runs of one worker), and as runs one after another in a
process like that which makes a search's runs. They take turns, and the order changes from pair to pair. Reported:
seconds a trial of both, and their ratio, by the clock and in seconds of processors, which other work on the machine
disturbs less. Imports and the report at a search's end are in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polyrhythm
from polyrhythm.api.run_process import RunProcess

SPACE = {"lr": {"from": 0.01, "to": 0.5, "log": True}}


def processor_s() -> float:
    """Gives the seconds of processors that this process and its ended children have taken."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured(act: Callable[[], Any]) -> tuple[Any, float, float]:
    """Gives what an act returns, its seconds by the clock, and those of processors."""
    clock, processors = time.perf_counter(), processor_s()
    found = act()
    return found, time.perf_counter() - clock, processor_s() - processors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=60)
    given = parser.parse_args()
    common = {"data": "digits", "model": "mlp", "workers": 1, "epochs": given.epochs, "keep_checkpoints": 1}
    ratios: list[tuple[float, float]] = []
    with TemporaryDirectory() as place:
        for pair in range(given.pairs):
            out = Path(place) / f"search-{pair}"

            def search(out: Path = out, pair: int = pair) -> Any:
                return polyrhythm.tune(
                    SPACE, method="random", budget=f"{given.trials} trials", seed=pair, out=out, **common
                )

            def alone(pair: int = pair) -> None:
                process = RunProcess()  # where a search makes its runs, too
                for number in range(given.trials):
                    rate = 0.01 * 50 ** (number / given.trials)
                    options = {
                        **common,
                        "seed": pair,
                        "optimizer": f"sgd(lr={rate:.4g})",
                        "strategy": "synchronous",
                    }
                    folder = str(Path(place) / f"alone-{pair}-{number}")
                    answer = process.make({"folder": folder, "options": options, "simulation": {}})
                    assert answer["outcome"] == "done", answer
                process.close()

            taken = {}
            for act in (search, alone) if pair % 2 == 0 else (alone, search):
                _, clock, processors = measured(act)
                taken[act.__name__] = clock / given.trials, processors / given.trials
            told = json.loads((out / "search.json").read_text())
            assert len(told["trials"]) == given.trials
            (first, first_cpu), (second, second_cpu) = taken["search"], taken["alone"]
            training = statistics.fmean(trial["seconds"] for trial in told["trials"])
            ratios.append((first / second, first_cpu / second_cpu))
            print(
                f"a trial: {first:.2f} s in a search, {second:.2f} s alone ({first / second:.3f}); of processors "
                f"{first_cpu:.2f} s, {second_cpu:.2f} s ({first_cpu / second_cpu:.3f}); {training:.2f} s of it "
                "are training",
                flush=True,
            )
    clocks, processors = zip(*ratios, strict=True)
    print(
        f"median ratio: {statistics.median(clocks):.3f} by the clock, {statistics.median(processors):.3f} of processors"
    )


if __name__ == "__main__":
    main()
