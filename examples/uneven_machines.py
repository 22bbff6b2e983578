"""Three machines of which one is four times slower: what each way of going on makes of them.

    python examples/uneven_machines.py

A simulated cluster, in virtual time: equal parts, parts by speed, and workers that go at their own pace.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import polyrhythm

CLUSTER = """\
name: uneven
hosts:
  - {name: fast, count: 2, cores: 8}
  - {name: slow, count: 1, cores: 4, speed: 0.25}
nic: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 1.17e8}
inside: {latency_s: 2.0e-5, bandwidth_bytes_per_s: 4.0e9}
step_time: constant(seconds=0.1)
"""
WAYS = {
    "in step, equal parts": {"strategy": "synchronous", "balance": "off"},
    "in step, parts by speed": {"strategy": "synchronous", "balance": "measured"},
    "at their own pace": {"strategy": "parameter_server(servers=1)"},
}


def main() -> None:
    """Run each way and print a line of it."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--epochs", type=int, default=8)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cluster = Path(scratch) / "uneven.yaml"
        cluster.write_text(CLUSTER)
        for number, (name, way) in enumerate(WAYS.items()):
            run = polyrhythm.simulate(
                cluster=cluster,
                data="digits",
                model="mlp",
                workers=3,
                batch_size=16,
                epochs=chosen.epochs,
                out=Path(scratch) / str(number),
                **way,
            )
            done = run.figures
            print(
                f"{name:24} {done['seconds']:5.1f} s  {done['images_per_s']:4.0f} images/s  "
                f"top-1 {100 * done['test_top1']:.1f} %"
            )


if __name__ == "__main__":
    main()
