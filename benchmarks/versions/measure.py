"""Is this version as fast as an earlier one? CPU seconds of training and of the simulator, in interleaved blocks.

    git worktree add ../before COMMIT
    python benchmarks/versions/measure.py ../before [--blocks 200] [--only NAME …]

A process of each version, and a second one of the earlier version, run one block after another, in an order that is
drawn anew each time. A row has the median ratios of the earlier version to itself and of this version to the earlier
one, with 95 % bootstrap intervals; a difference is seen where the interval lies above or below 1. Other work on the
machine changes all three alike.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

TRAINING = {
    "data": "digits",
    "model": "mlp",
    "epochs": 1,
    "cluster": "office",
    "optimizer": "sgd(momentum=0.9)",
}
DRY = {
    "gradients": "none",
    "data": "digits",
    "model": "mlp",
    "cluster": "h100_pair",
    "steps": 20,
    "workers": 16,
}
CASES = {
    "synchronous, 2 workers of mlp": TRAINING | {"strategy": "synchronous", "workers": 2},
    "local_sgd, 2 workers of mlp": TRAINING | {"strategy": "local_sgd(steps=4)", "workers": 2},
    "parameter_server, 2 workers of mlp": TRAINING | {"strategy": "parameter_server", "workers": 2},
    "simulator: synchronous, 16 workers": DRY | {"strategy": "synchronous(collective=ring)"},
    "simulator: local_sgd, 16 workers": DRY | {"strategy": "local_sgd(steps=4, collective=ring)"},
    "simulator: parameter_server, 16 workers": DRY | {"strategy": "parameter_server(servers=2)"},
}
BLOCK = """
import json, sys, tempfile, time
from pathlib import Path
import torch
from polyrhythm.api.simulate import simulate
torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    for number, line in enumerate(sys.stdin):
        began = time.process_time()
        simulate(out=Path(folder, str(number)), **json.loads(line))
        print(time.process_time() - began, flush=True)
"""


class Version:
    """A process that runs blocks with the package of a tree."""

    def __init__(self, tree: Path) -> None:
        variables = os.environ | {"PYTHONPATH": str(tree.resolve() / "src"), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", BLOCK],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, case: dict[str, object]) -> float:
        """Run a block; return its CPU seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def interval(ratios: list[float], draws: random.Random) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[975]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a tree of the earlier version")
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    draws = random.Random(0)
    here = Path(__file__).parents[2]
    versions = {
        name: Version(tree) for name, tree in (("a", options.before), ("b", options.before), ("new", here))
    }
    print("| block | s | earlier / itself | this / earlier |\n|---|---|---|---|")
    for name in options.only:
        for version in versions.values():
            version.run(CASES[name])  # imports, data, compiled code
        seconds: dict[str, list[float]] = {each: [] for each in versions}
        for _ in range(options.blocks):
            for each in draws.sample(list(versions), k=len(versions)):
                seconds[each].append(versions[each].run(CASES[name]))
        cells = []
        for one, other in (("b", "a"), ("new", "a")):
            ratios = [mine / theirs for mine, theirs in zip(seconds[one], seconds[other], strict=True)]
            low, high = interval(ratios, draws)
            cells.append(f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
        print(f"| {name} | {statistics.median(seconds['a']):.3f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
