"""Steps a second over slow links: compressors, none, PyTorch's DDP, and DDP with its PowerSGD hook, in one run.

    sudo python benchmarks/compression/slow_links.py [--megabits 100] [--rounds 5] [--steps 3] [--batch 32] [--out FILE]

Four ranks, each in a network namespace with a link of its own (`namespaces.py`), train a network of fully connected
layers (784, 2048, 2048, 10: 5.8 million numbers, 23 MB). All ways take turns in every round, `steps` steps each after
a barrier; a round's time is that of the slowest rank. What is printed are medians over rounds, and of each round's
ratios to DDP and to our own uncompressed run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from namespaces import Host, shaped_hosts
from polyrhythm.communication.communicator import Communicator
from polyrhythm.config.assemble import strategy_from
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.worker_part import Step
from ranks import on_hosts

RANKS, SIDES = 4, (784, 2048, 2048, 10)
COMPRESSORS = (
    "none",
    "float16",
    "int8",
    "qsgd(levels=7)",
    "one_bit",
    "random_k(density=0.01)",
    "top_k(density=0.01)",
    "dgc(density=0.001)",
    "power_sgd(rank=2)",
    "sufficient_factors",
)
DDP, HOOK = "DDP (gloo)", "DDP, powerSGD_hook, rank 2"
_DDP_PORT = 29400
_PATIENCE_S, _ONE_BUCKET_MB = 580.0, 64
Take = Callable[[int], None]


def network() -> nn.Module:
    """Makes the network, the same on all ranks."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(SIDES):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def ours(
    compress: str, communicator: Communicator, pictures: torch.Tensor, labels: torch.Tensor
) -> tuple[Take, Any]:
    """Returns what takes a step, and whose traffic counts."""
    strategy = strategy_from("synchronous", None if compress == "none" else compress)
    space = communicator.subgroup(f"case {compress}", range(RANKS))
    model = network()
    world = World(space, roles_in_order(RANKS, 0))
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.01), strategy, world, announce=True)
    replica.part.start(0)

    def take(number: int) -> None:
        step = Step(number)
        replica.begin(step)
        nn.functional.cross_entropy(model(pictures), labels).backward()
        replica.exchange(step, 0.01)

    return take, replica


def theirs(hooked: bool, pictures: torch.Tensor, labels: torch.Tensor) -> Take:
    """Returns what takes a step of DDP."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # With several buckets the hook's callbacks, which wait for sums of their own, take all threads that gloo has.
    parallel = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB if hooked else None)
    if hooked:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def take(number: int) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(pictures), labels).backward()
        optimizer.step()

    return take


def play(communicator: Communicator, first: Host, given: argparse.Namespace) -> dict[str, Any]:
    """One rank: seconds of every way in every round, and the bytes that a step of ours sends."""
    generator = torch.Generator().manual_seed(communicator.rank)
    pictures = torch.randn(given.batch, SIDES[0], generator=generator)
    labels = torch.randint(0, SIDES[-1], (given.batch,), generator=generator)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", init_method=f"tcp://{first.address}:{_DDP_PORT}", rank=communicator.rank, world_size=RANKS
    )
    takes: dict[str, Take] = {}
    replicas = {}
    for compress in given.ways or COMPRESSORS:
        takes[compress], replicas[compress] = ours(compress, communicator, pictures, labels)
    takes[DDP], takes[HOOK] = theirs(False, pictures, labels), theirs(True, pictures, labels)
    seconds: dict[str, list[float]] = {name: [] for name in takes}
    for (
        name,
        take,
    ) in takes.items():  # connections, warm starts, the hook's first plain steps, rows of factors
        if communicator.rank == 0:
            print(f"{name}: ready", file=sys.stderr, flush=True)
        for number in range(3 if name == HOOK else 2):
            take(number)
        communicator.barrier()
    sent = {name: replica.bytes_sent for name, replica in replicas.items()}
    for turn in range(given.rounds):
        for name, take in takes.items():
            communicator.barrier()
            began = time.perf_counter()
            for number in range(given.steps):
                take(10 + turn * given.steps + number)
            seconds[name].append((time.perf_counter() - began) / given.steps)
            if communicator.rank == 0:
                print(f"round {turn}, {name}: {seconds[name][-1]:.2f} s a step", file=sys.stderr, flush=True)
    steps = given.rounds * given.steps
    bytes_of = {name: (replica.bytes_sent - sent[name]) / steps for name, replica in replicas.items()}
    communicator.barrier()
    dist.destroy_process_group()
    return {"seconds": seconds, "bytes": bytes_of}


def main() -> None:
    """Runs it, and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabits", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ways", nargs="+", help="of ours, `none` among them; default: all")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with shaped_hosts(RANKS, given.megabits * 1e6) as hosts:
        found = on_hosts(
            hosts,
            lambda communicator: play(communicator, hosts[0], given),
            computes=True,
            patience_s=_PATIENCE_S,
        )
    names = list(found[0]["seconds"])
    slowest = {
        name: [max(rank["seconds"][name][turn] for rank in found) for turn in range(given.rounds)]
        for name in names
    }
    if given.out is not None:
        given.out.write_text(json.dumps({"seconds": slowest, "bytes": found[0]["bytes"]}, indent=1) + "\n")
    print(
        "| way | steps a second | of DDP | of our uncompressed | bytes a worker and step |\n|---|---|---|---|---|"
    )
    for name in names:
        rate = 1 / statistics.median(slowest[name])
        of_ddp, of_own = (
            statistics.median(base / own for base, own in zip(slowest[other], slowest[name], strict=True))
            for other in (DDP, "none")
        )
        sent = found[0]["bytes"].get(name)
        print(
            f"| `{name}` | {rate:.2f} | {of_ddp:.1f} | {of_own:.1f} | {'' if sent is None else f'{sent:,.0f}'} |"
        )


if __name__ == "__main__":
    main()
