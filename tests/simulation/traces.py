"""The first messages of a run, as text; and the flag that writes the golden ones anew.

Write them, after a change that is meant to alter them, with `cd tests && python -m simulation.traces --write`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from conformance.jobs import CLASSES, SIDE, make_job, simulated, uneven
from polyrhythm.communication.transports.simulated.communicator import SimulatedCommunicator
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.specs import choices
from polyrhythm.strategies import FAMILIES

GOLDEN = Path(__file__).parent / "golden"
MESSAGES = 40
WORKERS = 3
SLOW = ConstantCluster(step_s=uneven, latency_s=1e-3, bandwidth_bytes_per_s=1e8)


def wide() -> nn.Module:
    """Makes a network of 40 kB: 0.4 ms on the wire, beside which the few bytes of a plan as text do not show."""
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 500), nn.Tanh(), nn.Linear(500, CLASSES))


def default_strategies() -> list[str]:
    """Gives the name of every strategy."""
    return [name for family in FAMILIES for name in choices(family)]


def trace(spec: str) -> str:
    """Runs a small job and gives its first messages, a line each: virtual time, kind, sender, receiver.

    Times are rounded to 10 microseconds.
    """
    lines: list[str] = []
    send = SimulatedCommunicator.start_send

    def recorded(self, to, message):
        source, target = self._home.rank, self._members[to]
        lines.append(f"{self.clock.now():.5f} {message.kind.name} {source} {target}")
        return send(self, to, message)

    with mock.patch.object(SimulatedCommunicator, "start_send", recorded):
        simulated(make_job(spec, WORKERS, model=wide), SLOW)
    return "\n".join(lines[:MESSAGES]) + "\n"


def main() -> None:
    """Writes the golden traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True, help="replace the golden traces")
    parser.parse_args()
    torch.set_num_threads(1)
    for name in default_strategies():
        (GOLDEN / f"{name}.txt").write_text(trace(name))


if __name__ == "__main__":
    main()
