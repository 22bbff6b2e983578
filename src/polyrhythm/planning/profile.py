"""A profile: a host, its links and the time of a step, as a cluster that can be simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyrhythm.planning.host import Host
from polyrhythm.planning.link import MeasuredLink
from polyrhythm.planning.step import StepProfile
from polyrhythm.simulation.cluster import Cluster, HostKind, Link
from polyrhythm.simulation.step_times.log_normal import LogNormal


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        hosts: that took part, the leader's first.
        speeds: of each, by how much faster its step was than the first host's.
        threads: compute threads of a worker.
        inside: the link between two ranks of the first host.
        between: the slowest link from the first host to another; None where there is only one.
        step: of one worker on the first host.
        model: what it trained, and on which data, for people.
    """

    hosts: tuple[Host, ...]
    speeds: tuple[float, ...]
    threads: int
    inside: MeasuredLink
    between: MeasuredLink | None
    step: StepProfile
    model: str

    def cluster(self, name: str) -> Cluster:
        """Describes what was measured as a cluster.

        A host alone has no link to others that could have been measured; it gets its inside link's figures. Steps
        spread log-normally about their median, as far as the measured ones do.
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
            source=f"measured with {self.model}; {self.links_said()}",
            hosts=kinds,
            nic=_link(nic),
            inside=_link(self.inside),
            step_time=LogNormal(median=self.step.median_s, sigma=self.step.sigma),
        )

    def links_said(self) -> str:
        """Says which links were measured."""
        if self.between is None:
            return "nic was not measured (one host): inside stands in for it"
        return "nic is the slowest link from the first host to another"

    def to_json(self) -> dict[str, Any]:
        """Gives everything, JSON-able."""
        return {
            "model": self.model,
            "threads": self.threads,
            "hosts": [
                {**host.to_json(), "speed": speed}
                for host, speed in zip(self.hosts, self.speeds, strict=True)
            ],
            "inside": self.inside.to_json(),
            "between": None if self.between is None else self.between.to_json(),
            **self.step.to_json(),
        }


def _link(measured: MeasuredLink) -> Link:
    return Link(latency_s=measured.latency_s, bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s)
