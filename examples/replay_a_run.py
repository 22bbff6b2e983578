"""A run out of step comes out differently each time. This one is played again, bit for bit.

    python examples/replay_a_run.py

Every real run records whom each rank heard, and when; the simulator repeats it in one process, for a debugger.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import polyrhythm


def main() -> None:
    """Train twice with the same seed, and replay both."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--epochs", type=int, default=2)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("first", "second"):
            run = polyrhythm.train(
                data="digits",
                model="mlp",
                strategy="parameter_server(servers=1)",
                workers=2,
                threads=1,
                epochs=chosen.epochs,
                out=Path(scratch) / name,
            )
            if run is None:
                return
            played = polyrhythm.replay(run.folder)
            recorded = played["parameters_sha256"]["recorded"]
            print(f"{name:6}  {recorded[:16]}  replayed {'bit for bit' if played['same'] else 'differently'}")


if __name__ == "__main__":
    main()
