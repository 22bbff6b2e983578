"""Is this version as fast as an earlier one? CPU seconds of training and of the simulator, in interleaved blocks.

    git worktree add ../before COMMIT
    python benchmarks/versions/measure.py ../before [--starts 20] [--blocks 10] [--only NAME …]

A process of each version, and a second one of the earlier version, run one block after another, in an order that is
drawn anew each time. Memory lies elsewhere after each start, which changes the time of all blocks of a process by a few
percent: so the processes are started again after some blocks. A block is a run. Of a row of steps, CPU seconds from the
first evaluation to the last count, of 300 steps or more with 8 images; of the other rows, those of the whole run. A row
has the medians over all starts of the median ratio of a start, of the earlier version to itself and of this version to
the earlier one, with 95 % bootstrap intervals over the starts; a difference is seen where the interval lies above or
below 1. Other work on the machine changes all three alike.
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
    "epochs": 4,
    "batch_size": 8,
    "cluster": "office",
    "optimizer": "sgd(momentum=0.9)",
    "balance": "off",  # versions differ in how soon they balance
}
DRY = {
    "gradients": "none",
    "data": "digits",
    "model": "mlp",
    "cluster": "h100_pair",
    "steps": 20,
    "workers": 16,
    "balance": "off",
}
SHORT = TRAINING | {"epochs": 1, "batch_size": 64}
CASES = {
    "steps of synchronous, 2 workers of mlp": TRAINING | {"strategy": "synchronous", "workers": 2},
    "steps of local_sgd, 2 workers of mlp": TRAINING | {"strategy": "local_sgd(steps=4)", "workers": 2},
    "steps of parameter_server, 2 workers of mlp": TRAINING | {"strategy": "parameter_server", "workers": 2},
    "whole run of synchronous, one epoch": SHORT | {"strategy": "synchronous", "workers": 2},
    "whole run of local_sgd, one epoch": SHORT | {"strategy": "local_sgd(steps=4)", "workers": 2},
    "whole run of parameter_server, one epoch": SHORT | {"strategy": "parameter_server", "workers": 2},
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

class Evaluations:
    def __init__(self): self.at = []
    def close(self): pass
    def on_event(self, event):
        if type(event).__name__ == "Evaluated":
            self.at.append(time.process_time())

with tempfile.TemporaryDirectory() as folder:
    for number, line in enumerate(sys.stdin):
        evaluations, began = Evaluations(), time.process_time()
        simulate(out=Path(folder, str(number)), observers=[evaluations], **json.loads(line))
        spent = time.process_time() - began
        print(spent, *evaluations.at[:1], *evaluations.at[-1:], flush=True)
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

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, name: str) -> float:
        """Run a block of a case; return its CPU seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(CASES[name]) + "\n")
        self._process.stdin.flush()
        spent, *evaluated = map(float, self._process.stdout.readline().split())
        return evaluated[1] - evaluated[0] if name.startswith("steps") else spent


def interval(ratios: list[float], draws: random.Random) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[975]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a tree of the earlier version")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=10, help="of each version after each start")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    draws, here = random.Random(0), Path(__file__).parents[2]
    print("| block | s | earlier / itself | this / earlier |\n|---|---|---|---|")
    for name in options.only:
        medians: list[float] = []
        ratios: dict[str, list[float]] = {"b": [], "new": []}
        for _ in range(options.starts):
            seconds = blocks(
                name, {"a": options.before, "b": options.before, "new": here}, options.blocks, draws
            )
            medians.append(statistics.median(seconds["a"]))
            for each, found in ratios.items():
                pairs = zip(seconds[each], seconds["a"], strict=True)
                found.append(statistics.median([mine / theirs for mine, theirs in pairs]))
        cells = []
        for found in ratios.values():
            low, high = interval(found, draws)
            cells.append(f"{statistics.median(found):.3f} ({low:.3f} to {high:.3f})")
        print(f"| {name} | {statistics.median(medians):.3f} | {' | '.join(cells)} |", flush=True)


def blocks(name: str, trees: dict[str, Path], count: int, draws: random.Random) -> dict[str, list[float]]:
    """Return the CPU seconds of some blocks of a case in processes of each tree that are started for them."""
    versions = {each: Version(tree) for each, tree in trees.items()}
    for version in versions.values():
        version.run(name)  # imports, data, compiled code
    seconds: dict[str, list[float]] = {each: [] for each in versions}
    for _ in range(count):
        for each in draws.sample(list(versions), k=len(versions)):
            seconds[each].append(versions[each].run(name))
    for version in versions.values():
        version.end()
    return seconds


if __name__ == "__main__":
    main()
