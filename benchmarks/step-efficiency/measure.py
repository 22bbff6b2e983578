"""What a synchronous step costs over the same step without communication, and what DistributedDataParallel costs.

    python benchmarks/step-efficiency/measure.py [--models mlp lenet5 resnet18] [--workers 2] [--rounds 15] [--json]
    python benchmarks/step-efficiency/measure.py --hosts --workers 3 4 [--plain]
    python benchmarks/step-efficiency/measure.py --hosts --workers 3 --models connected

Each worker is a process of one thread with one batch of 64 random images in memory; those of the peer are processes of
their own, in which nothing of ours is set. In each round all workers take, in turn and after a barrier, some steps with
our `synchronous` strategy, the same steps with nobody to talk to, some with
PyTorch's DistributedDataParallel over gloo, and some with `lazy_synchronous`. Printed are medians over rounds of the
slowest worker's step time, the images that all workers together learn from in a second, and the medians and ranges of
the rounds' ratios of speeds: ours to the step alone, and ours and `lazy_synchronous` to DDP. With `--hosts` each worker
has a host of its own, a network namespace with a link of 1 Gb/s; that needs root and iproute2. With `--plain` its link
is one queue behind a token bucket. `connected` is fully connected: 30 MB of gradients for little computing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no name server knows the namespaces, and it says so

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from namespaces import shaped_hosts
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    Rendezvous,
    from_environment,
    host_store,
    local,
)
from polyrhythm.launch.process import keep_freed_memory
from polyrhythm.models.create import create_model
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.strategies.allreduce.lazy_synchronous import LazySynchronous
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import Step
from ranks import on_hosts

_SHAPES = {
    "mlp": ((1, 8, 8), 64),
    "lenet5": ((1, 28, 28), 64),
    "resnet18": ((3, 64, 64), 32),
    "connected": ((1, 28, 28), 16),
}
_CONNECTED = (784, 1536, 1536, 1536, 1024)
"""Widths of `connected` before its last layer."""
_CLASSES = 10
_RATE = 0.01
_BITS_PER_S = 1e9
_ROUND_S = 0.1
"""About so long each way steps in a round."""
_LEAST_STEPS = 5
"""In a round: what lazy update has still under way at its end must not count for much."""


@dataclass(frozen=True)
class Figures:
    """One line of the table; times are medians in milliseconds, ratios of speeds."""

    model: str
    workers: int
    ours_ms: float
    alone_ms: float
    ddp_ms: float
    lazy_ms: float
    images_per_s: float
    to_alone: tuple[float, float, float]
    to_ddp: tuple[float, float, float]
    lazy_to_ddp: tuple[float, float, float]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument(
        "--models", nargs="+", choices=sorted(_SHAPES), default=["mlp", "lenet5", "resnet18"]
    )
    options.add_argument("--workers", type=int, nargs="+", default=[2])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--hosts", action="store_true", help="each worker on a host of its own")
    options.add_argument("--plain", action="store_true", help="links of hosts are plain token buckets")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    how = partial(on_links, plain=chosen.plain) if chosen.hosts else on_one_host
    table = [
        figures(model, workers, how(model, workers, chosen.rounds))
        for model in chosen.models
        for workers in chosen.workers
    ]
    if chosen.json:
        print(json.dumps([asdict(line) for line in table]))
        return
    print(
        "| model | workers | ours | alone | DDP | lazy | images/s | speed to alone (range) | to DDP (range) "
        "| lazy to DDP (range) |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for line in table:
        ratios = [
            f"{middle:.2f} ({low:.2f} to {high:.2f})"
            for middle, low, high in (line.to_alone, line.to_ddp, line.lazy_to_ddp)
        ]
        print(
            f"| {line.model} | {line.workers} | {line.ours_ms:.3f} ms | {line.alone_ms:.3f} ms | {line.ddp_ms:.3f} ms "
            f"| {line.lazy_ms:.3f} ms | {line.images_per_s:,.0f} | {' | '.join(ratios)} |"
        )


Timings = list[list[float]]
"""Seconds of a step, by way and round."""


def on_one_host(model: str, workers: int, rounds: int) -> list[Timings]:
    """Starts workers that meet over loopback, those of the peer in processes of their own; gives what each timed."""
    context = multiprocessing.get_context("spawn")
    store = host_store()
    pipes, processes = [], []
    for rank in range(2 * workers):
        ours, theirs = context.Pipe()
        processes.append(
            context.Process(
                target=_worker, args=(rank, workers, store.port, model, rounds, theirs), daemon=True
            )
        )
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    timings = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return timings


def on_links(model: str, workers: int, rounds: int, *, plain: bool) -> list[Timings]:
    """Starts workers on hosts of their own; gives what each timed."""
    with shaped_hosts(workers, _BITS_PER_S, plain=plain) as hosts:
        return on_hosts(hosts, partial(_role, model=model, rounds=rounds), computes=True)


def figures(model: str, workers: int, timings: list[Timings]) -> Figures:
    """Makes a line of what the workers timed; the slowest of a round counts."""
    slowest = [
        [max(times) for times in zip(*filter(None, ways), strict=True)] for ways in zip(*timings, strict=True)
    ]
    ours_ms, alone_ms, ddp_ms, lazy_ms = (1e3 * statistics.median(times) for times in slowest)
    return Figures(
        model,
        workers,
        ours_ms,
        alone_ms,
        ddp_ms,
        lazy_ms,
        1e3 * workers * _SHAPES[model][1] / ours_ms,
        _ratio(slowest[0], slowest[1]),
        _ratio(slowest[0], slowest[2]),
        _ratio(slowest[3], slowest[2]),
    )


def _ratio(ours: list[float], others: list[float]) -> tuple[float, float, float]:
    ratios = [other / mine for mine, other in zip(ours, others, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _worker(rank: int, workers: int, port: int, name: str, rounds: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = local(rank, 2 * workers, port)
    home, network = connect(meeting)
    if rank < workers:
        keep_freed_memory()  # as every worker of ours does, and no process of the peer
    pipe.send(_timed(network, meeting, _Task(name, rounds, apart=True)))
    home.close()
    os._exit(0)


def _role(network: Communicator, *, model: str, rounds: int) -> Timings:
    """What a worker does on a host of its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
    return _timed(network, from_environment(), _Task(model, rounds, apart=False))


@dataclass(frozen=True)
class _Task:
    """What to time.

    Attributes:
        name: of the network.
        rounds: how often.
        apart: whether the second half of all ranks are the peer's workers, and the first half ours.
    """

    name: str
    rounds: int
    apart: bool


_OURS, _ALONE, _DDP, _LAZY = range(4)
_Ways = list[Callable[[], None] | None]


def _timed(network: Communicator, meeting: Rendezvous, task: _Task) -> Timings:
    workers = network.size // 2 if task.apart else network.size
    shape, size = _SHAPES[task.name]
    torch.manual_seed(network.rank)
    batch = torch.randn(size, *shape), torch.randint(_CLASSES, (size,))
    ways: _Ways = [None] * 4
    first_of_peer = workers if task.apart else 0
    if network.rank >= first_of_peer:
        rank, store = network.rank - first_of_peer, dist.PrefixStore("ddp", meeting.store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
        ways[_DDP] = _ddp(task.name, shape, batch)
    if network.rank < workers:
        together = RoleAssignment(tuple(range(workers)))
        ours, lazily = (network.subgroup(name, range(workers)) for name in ("ours", "lazy"))
        away = World(connect(_apart(meeting))[1], RoleAssignment((0,)))
        ways[_OURS] = _ours(Synchronous(), _model(task.name, shape), World(ours, together), batch)
        ways[_ALONE] = _ours(Synchronous(), _model(task.name, shape), away, batch)
        ways[_LAZY] = _ours(LazySynchronous(), _model(task.name, shape), World(lazily, together), batch)
    times = _time(ways, task.rounds, network, first_of_peer)
    network.barrier()
    return times


def _apart(meeting: Rendezvous) -> Rendezvous:
    """Return a meeting place of one's own at the same store."""
    store: Any = dist.PrefixStore(f"alone/{meeting.rank}", meeting.store)
    return Rendezvous(store, 0, 1, meeting.address)


def _model(name: str, shape: tuple[int, int, int]) -> nn.Module:
    torch.manual_seed(0)
    if name == "connected":
        return _connected()
    return create_model(name, classes=_CLASSES, image_shape=shape)


def _connected() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(_CONNECTED):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(_CONNECTED[-1], _CLASSES))


def _ours(
    strategy: Strategy, model: nn.Module, world: World, batch: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)
    replica = Replica(model, optimizer, strategy, world, announce=True)
    replica.part.start(0)
    criterion, one = nn.CrossEntropyLoss(), Step(0)

    def step() -> None:
        replica.begin(one)
        criterion(model(batch[0]), batch[1]).backward()
        replica.exchange(one, _RATE)

    return step


def _ddp(name: str, shape: tuple[int, int, int], batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    model = DistributedDataParallel(_model(name, shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9, fused=True)  # torch's fastest
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def _time(ways: _Ways, rounds: int, network: Communicator, first_of_peer: int) -> Timings:
    """Times the ways in turn; who has no part in one waits for the next."""
    counts = []
    for place, step in enumerate(ways):
        took = torch.zeros(1, dtype=torch.float64)
        network.barrier()
        if step is not None:
            _seconds(step, 3)
            took += _seconds(step, 3)
        network.broadcast(took, first_of_peer if place == _DDP else 0)  # all must take as many steps
        counts.append(max(_LEAST_STEPS, int(_ROUND_S / float(took))))
    times: Timings = [[] for _ in ways]
    for _ in range(rounds):
        for place, step in enumerate(ways):
            network.barrier()
            if step is not None:
                times[place].append(_seconds(step, counts[place]))
    return times


def _seconds(step: Callable[[], None], count: int) -> float:
    """Return the seconds of one step, the mean of so many."""
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    main()
