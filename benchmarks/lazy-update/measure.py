"""Lazy update against the eager one, over hosts on links of 1 Gb/s, for a model whose weight lies in its last layers.

    python benchmarks/lazy-update/measure.py [--hosts 2 3] [--steps 12] [--json]

Hosts are network namespaces with shaped links, one rank each; TCP moves what the strategies send. The model is like
Deep Image's: most of its weight is fully connected and at its end, most of its time is spent at its beginning. Its
computing is a sleep of 0.3 s a step, so that ranks need not share this machine's cores. Printed are the seconds of a
step when all has settled down (medians over steps of worker 0), of both and of lazy update without its order, and the
longer of computing and sending, which no strategy can beat. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no name server knows the namespaces, and it says so

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from namespaces import shaped_hosts
from polyrhythm.communication.communicator import Communicator
from polyrhythm.config.assemble import strategy_from
from polyrhythm.roles.world import DrawnPace
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerCalls, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from ranks import on_hosts

_BITS_PER_S = 1e9
_STEP_S = 0.3
_NUMBERS = (6_000_000, 2_000_000, 500_000, 500_000, 500_000)
_SHARES = (0.04, 0.04, 0.3, 0.3, 0.32)
"""Of each bucket, in the order of the backward pass: numbers, and shares of a pass's time."""
_SETTLING = 3
WAYS = ("synchronous", "lazy_synchronous", "lazy_synchronous(piece_bytes=0)")


@dataclass(frozen=True)
class Figures:
    """One line of the table, in seconds a step."""

    hosts: int
    bound_s: float
    eager_s: float
    lazy_s: float
    in_order_s: float


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--hosts", type=int, nargs="+", default=[2, 3])
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    table = [measure(hosts, chosen.steps) for hosts in chosen.hosts]
    if chosen.json:
        print(json.dumps([asdict(line) for line in table]))
        return
    print("| hosts | bound | eager | lazy | lazy, in order | eager / lazy |")
    print("|---|---|---|---|---|---|")
    for line in table:
        print(
            f"| {line.hosts} | {line.bound_s:.3f} s | {line.eager_s:.3f} s | {line.lazy_s:.3f} s "
            f"| {line.in_order_s:.3f} s | {line.eager_s / line.lazy_s:.2f} |"
        )


def measure(hosts: int, steps: int) -> Figures:
    """Plays every way on hosts made for it."""
    with shaped_hosts(hosts, _BITS_PER_S) as made:
        [first, *_] = on_hosts(made, partial(_play, steps=steps))
    sending_s = 2 * (hosts - 1) / hosts * 4 * sum(_NUMBERS) * 8 / _BITS_PER_S
    return Figures(hosts, max(_STEP_S, sending_s), *first)


def _play(network: Communicator, steps: int) -> list[float]:
    spaces = [network.subgroup(spec, range(network.size)) for spec in WAYS]
    found = [_step_s(space, spec, steps) for space, spec in zip(spaces, WAYS, strict=True)]
    network.barrier()  # who lets go of a communicator closes connections that others may still read from
    return found


def _step_s(workers: Communicator, spec: str, steps: int) -> float:
    last_first = nn.ParameterList(torch.zeros(count) for count in reversed(_NUMBERS))
    flat = FlatParameters(last_first, bucket_bytes=0)
    plan = OptimizerPlan.of(torch.optim.SGD(last_first.parameters(), lr=0.1, momentum=0.9), flat)
    roles = RoleAssignment(tuple(range(workers.size)))
    part = WorkerCalls(strategy_from(spec).worker(WorkerSetting(workers, workers, roles, flat, plan)))
    pace = DrawnPace(workers.clock, lambda: _STEP_S)
    part.start(0)
    workers.barrier()
    began = []
    for number in range(steps):
        began.append(workers.clock.now())
        part.begin(Step(number))
        pace.forward(_SHARES, part.before_use)
        flat.gradients.fill_(1.0)
        pace.backward(_SHARES, part.bucket_ready)
        part.gradients_ready(Step(number), 0.1)
        flat.zero_gradients()
    part.settle()
    workers.barrier()
    return statistics.median(second - first for first, second in pairwise(began[_SETTLING:]))


if __name__ == "__main__":
    main()
