"""All-reduce between ranks of one host: ours through shared memory, gloo, and what the memory allows.

    python benchmarks/all-reduce/measure.py [--ranks 2 4] [--bytes 40000 4000000 100000000] [--rounds 15] [--json]

All ranks are processes of one thread. In each round every rank times ours, where the vector lies in memory that the
communicator gave, as gradients do; ours on a vector of its own, which is copied on the way; gloo on that; and a plain
copy of a private vector of the same size, which all ranks make at once: an all-reduce must at least read a rank's own
vector and write the sum. What is printed are medians over rounds of the slowest rank's time, the median of the
rounds' ratios, and the smallest and largest ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local

_PATIENCE = timedelta(minutes=1)
_ENOUGH_S = 0.01
"""Short operations are repeated within a round until about so much time has passed."""


@dataclass(frozen=True)
class Figures:
    """One line of the table; times are medians in milliseconds."""

    ranks: int
    size_bytes: int
    ours_ms: float
    private_ms: float
    gloo_ms: float
    copy_ms: float
    ratio: float
    smallest_ratio: float
    largest_ratio: float
    private_ratio: float

    @property
    def share_of_bandwidth(self) -> float:
        return self.copy_ms / self.ours_ms


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--bytes", type=int, nargs="+", default=[40_000, 4_000_000, 100_000_000])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    table = [line for ranks in chosen.ranks for line in measure(ranks, chosen.bytes, chosen.rounds)]
    if chosen.json:
        print(json.dumps([asdict(line) | {"share_of_bandwidth": line.share_of_bandwidth} for line in table]))
        return
    print(
        "| ranks | bytes | ours | ours, private vector | gloo | gloo / ours (range) | gloo / private | copy "
        "| share of bandwidth |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for line in table:
        print(
            f"| {line.ranks} | {line.size_bytes:,} | {line.ours_ms:.3f} ms | {line.private_ms:.3f} ms "
            f"| {line.gloo_ms:.3f} ms "
            f"| {line.ratio:.1f} ({line.smallest_ratio:.1f} to {line.largest_ratio:.1f}) "
            f"| {line.private_ratio:.1f} | {line.copy_ms:.3f} ms | {line.share_of_bandwidth:.2f} |"
        )


def measure(ranks: int, sizes: list[int], rounds: int) -> list[Figures]:
    """Starts the ranks and gathers what they timed."""
    context = multiprocessing.get_context("spawn")
    store = host_store()
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        processes.append(
            context.Process(target=_rank, args=(rank, ranks, store.port, sizes, rounds, theirs), daemon=True)
        )
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    timings = [pipe.recv() for pipe in pipes]
    for process in processes:  # they need the store until the end
        process.join()
    return [_figures(ranks, size, [timing[place] for timing in timings]) for place, size in enumerate(sizes)]


def _figures(ranks: int, size: int, timings: list[list[list[float]]]) -> Figures:
    """Takes, for each way and round, the slowest rank."""
    slowest = [[max(times) for times in zip(*ways, strict=True)] for ways in zip(*timings, strict=True)]
    ours, private, gloo, copy = (1e3 * statistics.median(times) for times in slowest)
    ratios, of_private = (
        [theirs / mine for mine, theirs in zip(slowest[way], slowest[2], strict=True)] for way in (0, 1)
    )
    return Figures(
        *(ranks, size, ours, private, gloo, copy),
        *(statistics.median(ratios), min(ratios), max(ratios), statistics.median(of_private)),
    )


def _rank(rank: int, ranks: int, port: int, sizes: list[int], rounds: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    home, network = connect(local(rank, ranks, port))
    gloo = ProcessGroupGloo(dist.PrefixStore("gloo", local(rank, ranks, port).store), rank, ranks, _PATIENCE)
    pipe.send([_time(size, rounds, network, gloo) for size in sizes])
    network.barrier()
    home.close()


def _time(size: int, rounds: int, network: Communicator, gloo: ProcessGroupGloo) -> list[list[float]]:
    vector, copy = torch.ones(size // 4), torch.empty(size // 4)
    given = network.vector_to_sum(f"{size} bytes", vector)
    own = vector.clone() if given is None else given
    ways: list[Callable[[], Any]] = [
        lambda: network.all_reduce(own),
        lambda: network.all_reduce(vector),
        lambda: gloo.allreduce([vector]).wait(),
        lambda: copy.copy_(vector),
    ]
    counts = []
    for way in ways:
        way()
        began = time.perf_counter()
        way()
        took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        network.broadcast(took)
        counts.append(max(1, min(100, int(_ENOUGH_S / float(took)))))
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for place, way in enumerate(ways):
            vector.fill_(1.0)  # or the sums would overflow
            own.fill_(1.0)
            network.barrier()
            began = time.perf_counter()
            for _ in range(counts[place]):
                way()
            times[place].append((time.perf_counter() - began) / counts[place])
    return times


if __name__ == "__main__":
    main()
