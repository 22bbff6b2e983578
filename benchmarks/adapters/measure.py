"""Other tools' trainers on Fashion-MNIST: alone, and on 2 workers with several strategies, one of them killed.

    python benchmarks/adapters/measure.py [--only lightning accelerate trainer]

Each row trains from the same weights. *Furthest* is the largest difference of a parameter from the library alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

HERE = Path(__file__).parent
LOOPS = ("lightning", "accelerate", "trainer")
WAYS = {
    "alone": ("", False),
    "`synchronous`": ("synchronous", False),
    "`local_sgd(steps=4)`": ("local_sgd(steps=4)", False),
    "`parameter_server`": ("parameter_server", False),
    "`synchronous`, worker 1 killed": ("synchronous", True),
}


def trained(loop: str, strategy: str, killed: bool) -> dict[str, object]:
    """Return what the first worker came to, and how many ended."""
    with TemporaryDirectory() as folder:
        script = [str(HERE / f"{loop}_loop.py"), "--out", folder]
        if strategy:
            script += ["--strategy", strategy] + (["--killed"] if killed else [])
            command = ["-m", "polyrhythm", "run", "--workers", "2", "--restarts", "0", *script]
        else:
            command = script
        run = subprocess.run([sys.executable, *command], check=False, capture_output=True, text=True)
        found = [torch.load(path, weights_only=True) for path in sorted(Path(folder).glob("worker-*.pt"))]
        if not found:
            raise SystemExit(run.stderr)
        return {**found[0], "ended": len(found)}


def main() -> None:
    """Train in all ways, and write `results.json` beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=LOOPS)
    path = HERE / "results.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    print("| loop | how | top-1 | furthest | workers at the end |\n|---|---|---|---|---|")
    for loop in parser.parse_args().only:
        rows[loop], alone = {}, None
        for name, (strategy, killed) in WAYS.items():
            found = trained(loop, strategy, killed)
            vector = found["model"]
            assert isinstance(vector, torch.Tensor)
            alone = vector if alone is None else alone
            furthest = float((vector - alone).abs().max())
            row = {"top1": found["top1"], "furthest": furthest, "ended": found["ended"]}
            rows[loop][name] = row
            print(f"| {loop} | {name} | {row['top1']:.3f} | {furthest:.1e} | {row['ended']} |", flush=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
