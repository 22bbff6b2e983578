"""Push and pull between a worker and a server of one host: shared memory, TCP links, a gloo pair, and a Ray actor.

    python benchmarks/push-pull/measure.py [--bytes 10000000] [--rounds 15] [--gigabits 10] [--json]

Each way has a worker and a server of its own, processes of one thread that wait on a pipe while it is another way's
turn. In each round every way makes, one after the other,

    empty               a message without a tensor, and an answer without one
    exchange            a push of `--bytes`, which the server subtracts from its parameters, and a pull of as many
    parameter_server    the same by the strategy's own worker and server parts: flat gradients, plan, optimizer, gate

With `--gigabits`, worker and server are in network namespaces of their own, joined by links of that rate; needs root.
Shared memory and Ray are left out then.

What is printed are the medians over rounds, the median of the rounds' ratios to the first way, and their range.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    LOOPBACK,
    Groups,
    Rendezvous,
    host_store,
)
from polyrhythm.launch.process import keep_freed_memory
from polyrhythm.roles.server import serve
from polyrhythm.roles.world import World
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

sys.path.insert(0, str(Path(__file__).parents[1]))
from namespaces import Host, shaped_hosts

CAST = RoleAssignment((0,), (1,))
LEARNING_RATE = 1e-3
REPEATS = {"empty": 200, "exchange": 5, "parameter_server": 5}
"""Within a round."""


@dataclass
class Place:
    """Where worker and server meet.

    Args:
        hosts: namespaces of worker and server; the process that makes the store is in the worker's. Empty: loopback.
        port: port of the store.
    """

    hosts: list[Host]
    port: int = 0

    def join(self, rank: int) -> Rendezvous:
        """Enter the host of a rank, and meet at the store."""
        addresses = [host.address for host in self.hosts] or [LOOPBACK] * CAST.size
        if self.hosts:
            self.hosts[rank].enter()
        store = dist.TCPStore(addresses[0], self.port, None, is_master=False, wait_for_workers=False)
        return Rendezvous(store, rank, CAST.size, addresses[rank])


class Links:
    """A worker and a server that speak over our links.

    Args:
        hosts: see `Place`.
        size: bytes of the parameters.
        shared_memory: whether the links go through it.
    """

    def __init__(self, hosts: list[Host], size: int, shared_memory: bool) -> None:
        self._start((_worker, _server), hosts, size, shared_memory)

    def _start(self, mains: tuple[Callable[..., None], ...], hosts: list[Host], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = host_store(address=hosts[0].address if hosts else LOOPBACK)
        self._pipe, pipe = context.Pipe()
        place = Place(hosts, self._store.port)
        self._processes = [
            context.Process(target=main, args=(rank, place, *arguments, pipe))
            for rank, main in enumerate(mains)
        ]
        for process in self._processes:
            process.start()
        assert self._pipe.recv() == "ready"

    def time(self, what: str) -> float:
        """Return the seconds of one round trip, the mean of a few."""
        self._pipe.send(what)
        return float(self._pipe.recv())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


class GlooPair(Links):
    """A worker and a server in a gloo group of two, which send and receive what it says and nothing more.

    The strategy's own parts do not run over it, so their peer is the plain exchange.

    Args:
        hosts: see `Place`.
        size: bytes of the parameters.
    """

    def __init__(self, hosts: list[Host], size: int) -> None:
        self._start((_gloo_worker, _gloo_server), hosts, size)


class RayActor:
    """A worker, this process, and an actor of Ray that holds the parameters."""

    def __init__(self, size: int) -> None:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

        class Server:
            def __init__(self, elements: int) -> None:
                torch.set_num_threads(1)
                self.vector = torch.zeros(elements)

            def empty(self) -> None:
                return None

            def exchange(self, gradient: Any) -> Any:
                self.vector.sub_(torch.from_numpy(gradient), alpha=LEARNING_RATE)
                return self.vector.numpy()

        self._get, self._shutdown = ray.get, ray.shutdown
        self._server = ray.remote(num_cpus=1)(Server).remote(size // 4)
        self._gradients, self._vector = torch.ones(size // 4), torch.zeros(size // 4)

    def time(self, what: str) -> float:
        """As `Links.time`; the strategy's own parts do not run over Ray, so their peer is the plain exchange."""
        return _mean_seconds(self._empty if what == "empty" else self._exchange, REPEATS[what])

    def close(self) -> None:
        self._shutdown()

    def _empty(self) -> None:
        self._get(self._server.empty.remote())

    def _exchange(self) -> None:
        answer = self._get(self._server.exchange.remote(self._gradients.numpy()))
        np.copyto(self._vector.numpy(), answer)  # what Ray gives may only be read, at which torch would warn


def _worker(rank: int, place: Place, size: int, shared_memory: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as every rank of ours does
    _home, network = connect(place.join(rank), shared_memory)
    plain = network.subgroup("plain", (0, 1))
    model = nn.Linear(size // 4, 1, bias=False)
    flat = FlatParameters(model)
    plan = OptimizerPlan.of(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), flat)
    part = ParameterServer().worker(
        WorkerSetting(network, network.subgroup("workers", (0,)), CAST, flat, plan)
    )
    gradients, vector, steps = torch.ones(size // 4), torch.empty(size // 4), iter(range(1 << 30))
    part.start(0)
    flat.gradients.fill_(1.0)
    pipe.send("ready")
    ways: dict[str, Callable[[], Any]] = {
        "empty": lambda: _exchange(plain, None, None),
        "exchange": lambda: _exchange(plain, gradients, vector),
        "parameter_server": lambda: part.gradients_ready(Step(next(steps)), LEARNING_RATE),
    }
    while True:
        what = pipe.recv()
        pipe.send(_mean_seconds(ways[what], REPEATS[what]))


def _exchange(network: Communicator, gradients: torch.Tensor | None, vector: torch.Tensor | None) -> None:
    push = network.start_send(1, Message(Kind.PUSH, gradients))
    answer = network.receive(1)[1] if vector is None else network.receive_into(vector, 1)
    if vector is not None and answer.tensor is not vector:
        assert answer.tensor is not None, "it holds parameters"
        vector.copy_(answer.tensor)
    push.wait()


def _server(rank: int, place: Place, size: int, shared_memory: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    _home, network = connect(place.join(rank), shared_memory)
    network.start(lambda: _serve_plainly(network.subgroup("plain", (0, 1)), torch.zeros(size // 4)))
    serve(ParameterServer(), World(network, CAST))


def _serve_plainly(network: Communicator, vector: torch.Tensor) -> None:
    while True:
        source, push = network.receive()
        if push.tensor is not None:
            vector.sub_(push.tensor, alpha=LEARNING_RATE)
        answer = None if push.tensor is None else vector
        del push
        network.send(source, Message(Kind.PARAMETERS, answer))


def _gloo_worker(rank: int, place: Place, size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    group = _gloo_group(rank, place)
    header, gradients, vector = torch.zeros(8), torch.ones(size // 4), torch.empty(size // 4)
    pipe.send("ready")

    def exchange(payload: int) -> None:
        header[0] = payload
        works = [group.send([header], 1, 0)]
        if payload:
            works.append(group.send([gradients], 1, 1))
        group.recv([header], 1, 0).wait()
        if payload:
            group.recv([vector], 1, 1).wait()
        for work in works:
            work.wait()

    while True:
        what = pipe.recv()
        pipe.send(_mean_seconds(lambda payload=int(what != "empty"): exchange(payload), REPEATS[what]))


def _gloo_server(rank: int, place: Place, size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    group = _gloo_group(rank, place)
    header, gradients, vector = torch.zeros(8), torch.empty(size // 4), torch.zeros(size // 4)
    while True:
        group.recv([header], 0, 0).wait()
        if header[0]:
            group.recv([gradients], 0, 1).wait()
            vector.sub_(gradients, alpha=LEARNING_RATE)
        group.send([header], 0, 0).wait()
        if header[0]:
            group.send([vector], 0, 1).wait()


def _gloo_group(rank: int, place: Place) -> Any:
    return Groups(place.join(rank)).gloo("pair", rank, CAST.size)


def _mean_seconds(work: Callable[[], Any], repeats: int) -> float:
    started_at = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - started_at) / repeats


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--bytes", type=int, default=10_000_000)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--gigabits", type=float)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as cleanup:
        hosts: list[Host] = []
        if chosen.gigabits:
            hosts = cleanup.enter_context(shaped_hosts(CAST.size, 1e9 * chosen.gigabits))
            hosts[0].enter()
        measure(hosts, chosen)


def measure(hosts: list[Host], chosen: argparse.Namespace) -> None:
    """Print the figures; see the top of this file."""
    ways: dict[str, Links | RayActor] = {}
    if not hosts:
        ways["shared memory"] = Links(hosts, chosen.bytes, shared_memory=True)
    ways["TCP links"] = Links(hosts, chosen.bytes, shared_memory=False)
    ways["gloo pair"] = GlooPair(hosts, chosen.bytes)
    if not hosts and find_spec("ray") is not None:
        ways["Ray actor"] = RayActor(chosen.bytes)
    try:
        table = [_figures(ways, what, chosen.rounds) for what in REPEATS]
    finally:
        for way in ways.values():
            way.close()
    if chosen.json:
        print(json.dumps(table))
        return
    if not hosts and find_spec("ray") is None:
        print("Ray is not installed: no figures of an actor.\n")
    print(f"| round trip | way | median | ratio to {next(iter(ways))} (range) |")
    print("|---|---|---|---|")
    for line in table:
        for way, figures in line["ways"].items():
            low, high = figures["range"]
            print(
                f"| {line['round trip']} | {way} | {figures['ms']:.3f} ms "
                f"| {figures['ratio']:.2f} ({low:.2f} to {high:.2f}) |"
            )


def _figures(ways: dict[str, Links | RayActor], what: str, rounds: int) -> dict[str, Any]:
    for way in ways.values():
        way.time(what)
    timings = [{name: way.time(what) for name, way in ways.items()} for _ in range(rounds)]
    first = next(iter(ways))
    figures = {}
    for name in ways:
        ratios = [timing[name] / timing[first] for timing in timings]
        figures[name] = {
            "ms": 1e3 * statistics.median(timing[name] for timing in timings),
            "ratio": statistics.median(ratios),
            "range": (min(ratios), max(ratios)),
        }
    return {"round trip": what, "ways": figures}


if __name__ == "__main__":
    main()
