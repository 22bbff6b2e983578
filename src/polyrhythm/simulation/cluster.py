"""A cluster: hosts, links, prices and paces, as a YAML file describes them."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from polyrhythm.errors import RequestError
from polyrhythm.simulation.injection.fault import Faults
from polyrhythm.simulation.step_time import STEP_TIMES, StepTime
from polyrhythm.specs import chosen
from polyrhythm.training.quantities import Count, NonNegative, Positive


class Described(BaseModel):
    """A part of a cluster file: frozen, and nothing in it is passed over."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(Described):
    """What a message takes: `latency_s + bytes / bandwidth_bytes_per_s`.

    Attributes:
        latency_s: α.
        bandwidth_bytes_per_s: 1/β, in each direction.
    """

    latency_s: NonNegative
    bandwidth_bytes_per_s: Positive


class HostKind(Described):
    """Some equal hosts.

    Attributes:
        name: for people.
        count: how many there are.
        cores: of each; with shared placement it holds as many servers as cores, at most.
        accelerators: of each.
        workers: places for workers on each; default: one an accelerator, else one.
        speed: by which the time of a step is divided.
        price_per_hour: of each, in the currency of the file's reader.
        nic: its link to the others; default: the cluster's.
        inside: the link between ranks on the same host, which they share; default: the cluster's.
        server_takes: share of a host's computing that a server beside workers takes from them; default: that of a
            core, and nothing where workers compute on accelerators.
    """

    name: str
    count: Count
    cores: Count = 1
    accelerators: int = Field(default=0, ge=0)
    workers: Count | None = None
    speed: Positive = 1.0
    price_per_hour: NonNegative = 0.0
    nic: Link | None = None
    inside: Link | None = None
    server_takes: Annotated[float, Field(ge=0, lt=1)] | None = None

    @property
    def places(self) -> int:
        """How many workers it holds."""
        return self.workers or self.accelerators or 1

    def slowed_by(self, servers: int) -> float:
        """By how much the steps of its workers are longer beside so many servers; infinite if nothing is left."""
        own = self.server_takes
        takes = own if own is not None else 0.0 if self.accelerators else 1 / self.cores
        left = 1 - servers * takes
        return 1 / left if left > 1e-9 else float("inf")


class Racks(Described):
    """Hosts in racks: what goes from one to another crosses the uplink of the one and the downlink of the other.

    Attributes:
        hosts: in each rack, in the order of the file.
        oversubscription: the sum of a rack's NICs divided by its uplink.
        uplink_bandwidth_bytes_per_s: of a rack, in each direction; instead of `oversubscription`.
        latency_s: on top for messages between racks.
    """

    hosts: Count
    oversubscription: Positive | None = None
    uplink_bandwidth_bytes_per_s: Positive | None = None
    latency_s: NonNegative = 0.0

    @model_validator(mode="after")
    def _check(self) -> Racks:
        if (self.oversubscription is None) == (self.uplink_bandwidth_bytes_per_s is None):
            raise RequestError("give either oversubscription or uplink_bandwidth_bytes_per_s")
        return self


class PassingSlowness(Described):
    """A rank's steps that begin within a time are slower.

    Attributes:
        rank: a worker's.
        from_s: virtual seconds.
        to_s: virtual seconds.
        factor: by which a step is longer.
    """

    rank: int = Field(ge=0)
    from_s: NonNegative
    to_s: NonNegative
    factor: Positive

    @model_validator(mode="after")
    def _check(self) -> PassingSlowness:
        if self.to_s <= self.from_s:
            raise RequestError(f"to_s {self.to_s:g} must be later than from_s {self.from_s:g}")
        return self


class Cluster(Described):
    """A cluster.

    Attributes:
        name: for people.
        source: where its figures come from.
        hosts: in order; ranks fill them from the first on.
        nic: every host's link to the others, unless it has its own.
        inside: the link within a host, unless it has its own.
        racks: if there are some.
        server_bandwidth_bytes_per_s: what one server receives from other hosts, and sends to them, at most; default:
            what its host's NIC carries. A server that copies and packs what it sends may be far from that.
        step_time: compute seconds of a step on a host of speed 1, whatever the batch.
        slow: by rank, the factor by which all its steps are longer.
        passing_slowness: of some ranks, for some time.
        faults: what goes wrong.
    """

    name: str
    source: str = ""
    hosts: Annotated[tuple[HostKind, ...], Field(min_length=1)]
    nic: Link
    inside: Link
    racks: Racks | None = None
    server_bandwidth_bytes_per_s: Positive | None = None
    step_time: Annotated[StepTime, chosen("step time", STEP_TIMES)]
    slow: dict[Annotated[int, Field(ge=0)], Positive] = {}
    passing_slowness: tuple[PassingSlowness, ...] = ()
    faults: Faults = ()

    @cached_property
    def machines(self) -> tuple[HostKind, ...]:
        """Every single host, in order."""
        return tuple(kind for kind in self.hosts for _ in range(kind.count))
