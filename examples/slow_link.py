"""Two machines on a slow link: what compression saves, and what it costs in accuracy.

    python examples/slow_link.py
    python examples/slow_link.py --megabits 100

Simulated, with real gradients: bytes are those on the wire.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import polyrhythm

CLUSTER = """\
name: slow-link
hosts:
  - {{name: machine, count: 2, cores: 4}}
nic: {{latency_s: 2.0e-4, bandwidth_bytes_per_s: {bandwidth}}}
inside: {{latency_s: 2.0e-5, bandwidth_bytes_per_s: 4.0e9}}
step_time: constant(seconds=0.02)
"""
COMPRESSORS = ("", "float16", "qsgd(levels=7)", "top_k(density=0.05)", "power_sgd(rank=2)")


def main() -> None:
    """Run with each compressor and print a line of it."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument(
        "--megabits", type=float, default=3.0, help="a second, of each machine's network card"
    )
    options.add_argument("--epochs", type=int, default=6)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cluster = Path(scratch) / "slow.yaml"
        cluster.write_text(CLUSTER.format(bandwidth=chosen.megabits * 1e6 / 8))
        for number, compressor in enumerate(COMPRESSORS):
            run = polyrhythm.simulate(
                cluster=cluster,
                data="digits",
                model="mlp",
                batch_size=16,
                strategy="synchronous",
                workers=2,
                epochs=chosen.epochs,
                out=Path(scratch) / str(number),
                **({"compress": compressor} if compressor else {}),
            )
            done = run.figures
            print(
                f"{compressor or 'as it is':20} {done['seconds']:6.1f} s  top-1 {100 * done['test_top1']:.1f} %"
            )


if __name__ == "__main__":
    main()
