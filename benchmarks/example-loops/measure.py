"""The three loops of `examples/`, alone and on two workers with half a batch each: what seeds make of their accuracy.

    python benchmarks/example-loops/measure.py [--seeds 6] [--only recipe_loop]

Ways are the loop alone, and `several.py` on 2 workers. The same seed gives all ways the same first weights.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
BATCHES = {"reference_loop": 64, "recipe_loop": 64, "speed_loop": 50}
WAYS = ("alone", "synchronous")


def accuracy(loop: str, way: str, seed: int) -> float:
    """Return the accuracy that a loop prints last, 0 to 1."""
    folder, options = EXAMPLES / loop, ["--seed", str(seed)]
    if way == "alone":
        command = [str(folder / "alone.py"), *options, "--batch-size", str(BATCHES[loop])]
    else:
        half = ["--batch-size", str(BATCHES[loop] // 2), "--strategy", way]
        start = ["-m", "polyrhythm", "run", "--workers", "2", "--threads", "1"]
        command = [*start, str(folder / "several.py"), *options, *half]
    done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    found = float(re.findall(r"  accuracy ([0-9.]+)", done.stdout)[-1])
    return found / 100 if found > 1 else found


def main() -> None:
    """Run all ways with all seeds, write `results.json` beside this file, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=[*BATCHES])
    chosen = parser.parse_args()
    path = HERE / "results.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    print(
        "| loop | way | mean | standard deviation | from alone, in standard errors |\n|---|---|---|---|---|"
    )
    for loop in chosen.only:
        rows[loop] = {way: [accuracy(loop, way, seed) for seed in range(chosen.seeds)] for way in WAYS}
        path.write_text(json.dumps(rows, indent=1) + "\n")
        alone = rows[loop]["alone"]
        for way, found in rows[loop].items():
            error = ((stdev(found) ** 2 + stdev(alone) ** 2) / len(found)) ** 0.5
            apart = f"{(mean(found) - mean(alone)) / error:+.1f}" if way != "alone" else ""
            print(f"| {loop} | `{way}` | {mean(found):.3f} | {stdev(found):.3f} | {apart} |", flush=True)


if __name__ == "__main__":
    main()
