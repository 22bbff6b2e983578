"""A profile: hosts, their links and the time of a step, as a cluster that can be simulated.

Of a host it has cores, memory, accelerators, and the bandwidth of copying memory.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from polyrhythm.launch.devices import available_cores
from polyrhythm.planning.link import MeasuredLink
from polyrhythm.planning.step import StepProfile
from polyrhythm.simulation.cluster import Cluster, HostKind, Link, ServerUpdate, StepWork
from polyrhythm.simulation.step_times.log_normal import LogNormal

_COPIED_BYTES = 64 << 20
"""Larger than any cache, and small enough for the smallest machines."""

_REPEATS = 7
_MOST_OVERHEAD = 0.95
"""Limit of the overhead's share: two nearly equal medians mean mostly overhead, not that larger batches are free."""


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: name of the host.
        cores: cores that this process may use.
        memory_bytes: memory in bytes of the whole machine.
        memory_bandwidth_bytes_per_s: bandwidth in bytes/s of a copy by one thread; reads and writes both count.
        accelerators: names of its GPUs.
    """

    name: str
    cores: int
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    accelerators: tuple[str, ...]


def measure_host() -> Host:
    """Measure the host that this runs on; takes about a tenth of a second."""
    count = torch.cuda.device_count()
    return Host(
        socket.gethostname(),
        available_cores(),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        _copy_speed(),
        tuple(torch.cuda.get_device_name(index) for index in range(count)),
    )


def _copy_speed() -> float:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)  # touched, so that the system's handing out of pages is not measured
    seconds = []
    for _ in range(_REPEATS):
        started_at = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started_at)
    # Every byte is read once and written once.
    return 2 * _COPIED_BYTES / statistics.median(seconds)


@dataclass(frozen=True)
class Profile:
    """A measured cluster.

    Attributes:
        hosts: hosts that took part, the leader's first.
        speeds: speeds of each host, the first host's step time divided by its own.
        threads: compute threads of a worker.
        inside: the link between two ranks of the first host.
        between: the slowest link from the first host to another; None if there is only one.
        step: step of one worker on the first host.
        model: model and data of the measured step, as text.
        step_of: description of that step, so that its time can be scaled to other networks and batches; None:
            it cannot.
        server_update: cost of an update on the first host; None: it was not measured.
    """

    hosts: tuple[Host, ...]
    speeds: tuple[float, ...]
    threads: int
    inside: MeasuredLink
    between: MeasuredLink | None
    step: StepProfile
    model: str
    step_of: StepWork | None = None
    server_update: ServerUpdate | None = None

    def cluster(self, name: str) -> Cluster:
        """Return the cluster to simulate.

        A single host has no link to others that could have been measured; it is given the figures of its inside link.
        Steps are log-normal, with the median and spread of the measured ones.
        """
        kinds = tuple(
            HostKind(
                name=host.name,
                count=1,
                cores=host.cores,
                accelerators=len(host.accelerators),
                workers=len(host.accelerators) or max(1, host.cores // self.threads),
                speed=speed,
            )
            for host, speed in zip(self.hosts, self.speeds, strict=True)
        )
        nic = self.between or self.inside
        return Cluster(
            name=name,
            source=f"measured with {self.model}; {self.links_text()}",
            hosts=kinds,
            nic=_link(nic),
            inside=_link(self.inside),
            step_time=LogNormal(median=self.step.median_s, sigma=self.step.sigma),
            step_of=self.step_of,
            server_update=self.server_update,
        )

    def links_text(self) -> str:
        """Return a sentence on which links were measured."""
        if self.between is None:
            return "nic was not measured (one host): inside stands in for it"
        return "nic is the slowest link from the first host to another"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return {
            "model": self.model,
            "threads": self.threads,
            "hosts": [
                {**asdict(host), "accelerators": list(host.accelerators), "speed": speed}
                for host, speed in zip(self.hosts, self.speeds, strict=True)
            ],
            "inside": asdict(self.inside),
            "between": None if self.between is None else asdict(self.between),
            **self.step.to_json(),
            "step_of": None if self.step_of is None else self.step_of.model_dump(exclude_none=True),
            "server_update": None if self.server_update is None else self.server_update.model_dump(),
        }


def overhead_share(batch: int, step_s: float, smaller: int, smaller_s: float) -> float:
    """Return the share of a step that does not grow with its batch, from two batches: a in `a + c b`.

    Args:
        batch: batch of the step that took `step_s`.
        step_s: seconds.
        smaller: images of a smaller batch.
        smaller_s: seconds of its step.
    """
    if smaller >= batch:
        return 0.0
    each_s = (step_s - smaller_s) / (batch - smaller)
    return min(max(0.0, 1 - each_s * batch / step_s), _MOST_OVERHEAD)


def _link(measured: MeasuredLink) -> Link:
    return Link(latency_s=measured.latency_s, bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s)
