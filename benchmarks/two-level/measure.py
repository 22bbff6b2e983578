"""All-reduce over hosts with several ranks each, and over hosts with one, on links of 1 Gb/s.

    python benchmarks/two-level/measure.py [--hosts 2 3 4] [--ranks-a-host 1 2] [--megabytes 10] [--rounds 9] [--json]
    python benchmarks/two-level/measure.py --plain
    python benchmarks/two-level/measure.py --plain --hosts 3 --ranks-a-host 1 --rounds 15 [--mtu 9000]

Hosts are network namespaces with shaped links; with `--plain` each is one queue behind a token bucket. In each round
all ranks add the same vector up, in turn: as the communicator does by itself (two levels where ranks share hosts), over
one gloo group of all ranks, and by our ring over pairwise links. Printed are medians over rounds of the slowest rank's
time, beside the ring's formula for one rank a host, 2 M (H-1)/H over the bandwidth, which no all-reduce can beat, and
the same with the headers of full TCP packets, which links carry as well. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no name server knows the namespaces, and it says so

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from namespaces import MTU, headers_share, shaped_hosts
from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collectives.ring import Ring
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from ranks import on_hosts

_BITS_PER_S = 1e9


@dataclass(frozen=True)
class Figures:
    """One line of the table; times are medians in milliseconds."""

    hosts: int
    ranks_a_host: int
    bound_ms: float
    with_headers_ms: float
    ours_ms: float
    gloo_ms: float
    ring_ms: float
    gloo_to_ours: tuple[float, float, float]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    options.add_argument("--ranks-a-host", type=int, nargs="+", default=[1, 2])
    options.add_argument("--megabytes", type=float, default=10)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--plain", action="store_true", help="links are plain token buckets")
    options.add_argument("--mtu", type=int, default=MTU, help="bytes of a packet; 9000: jumbo frames")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    table = [
        measure(hosts, ranks, round(chosen.megabytes * 1e6), chosen.rounds, chosen)
        for hosts in chosen.hosts
        for ranks in chosen.ranks_a_host
    ]
    if chosen.json:
        print(json.dumps([asdict(line) for line in table]))
        return
    print(
        "| hosts | ranks a host | bound | with headers | ours | one gloo group | our ring | ours / bound "
        "| ours / with headers | gloo / ours (range) |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for line in table:
        middle, low, high = line.gloo_to_ours
        print(
            f"| {line.hosts} | {line.ranks_a_host} | {line.bound_ms:.1f} ms | {line.with_headers_ms:.1f} ms "
            f"| {line.ours_ms:.1f} ms "
            f"| {line.gloo_ms:.1f} ms | {line.ring_ms:.1f} ms | {line.ours_ms / line.bound_ms:.2f} "
            f"| {line.ours_ms / line.with_headers_ms:.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"
        )


def measure(hosts: int, ranks_a_host: int, nbytes: int, rounds: int, links: argparse.Namespace) -> Figures:
    """Plays the rounds on hosts made for it."""
    with shaped_hosts(hosts, _BITS_PER_S, plain=links.plain, mtu=links.mtu) as made:
        places = [host for host in made for _ in range(ranks_a_host)]
        timings = on_hosts(places, partial(_time, nbytes=nbytes, rounds=rounds))
    slowest = [[max(times) for times in zip(*ways, strict=True)] for ways in zip(*timings, strict=True)]
    ours_ms, gloo_ms, ring_ms = (1e3 * statistics.median(times) for times in slowest)
    ratios = [theirs / mine for mine, theirs in zip(slowest[0], slowest[1], strict=True)]
    bound_ms = 1e3 * 2 * (hosts - 1) / hosts * nbytes * 8 / _BITS_PER_S
    spread = statistics.median(ratios), min(ratios), max(ratios)
    with_headers_ms = bound_ms * headers_share(links.mtu)
    return Figures(hosts, ranks_a_host, bound_ms, with_headers_ms, ours_ms, gloo_ms, ring_ms, spread)


def _time(network: Communicator, nbytes: int, rounds: int) -> list[list[float]]:
    vector = torch.ones(nbytes // 4)
    gloo = _gloo_group(network.rank, network.size)
    ring = AllReduce(Ring(), network, "ring")
    ways: list[Callable[[Tensor], None]] = [
        network.all_reduce,
        lambda vector: gloo.allreduce([vector]).wait(),
        ring.run,
    ]
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for place, add_up in enumerate(ways):
            vector.fill_(1.0)  # or the sums would overflow
            network.barrier()
            began = network.clock.now()
            add_up(vector)
            if turn:  # the first opens links
                times[place].append(network.clock.now() - began)
            assert float(vector[-1]) == network.size
    network.barrier()
    return times


def _gloo_group(rank: int, size: int) -> Any:
    """Makes a group of all ranks at the store that is there already."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    rendezvous = from_environment()
    library: Any = dist.ProcessGroupGloo  # its stubs do not know its options
    options = library._Options()
    options._devices = [library.create_device(hostname=rendezvous.address)]
    return library(dist.PrefixStore("gloo", rendezvous.store), rank, size, options)


if __name__ == "__main__":
    main()
