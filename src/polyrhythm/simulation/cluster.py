"""A cluster: hosts, links, prices and step times, as a YAML file describes them.

A price list has the price of an hour of each machine, in a file of its own with currency, date and source:

    currency: EUR
    date: 2025-01
    source: our own invoices
    machines:
      rented: {per_hour: 0.19}                 or per_second, per_minute, per_year
      bought: {purchase: 2400, years: 4, watts: 250, electricity_per_kwh: 0.30}
      larger: {per_hour: 0.76, cores: 16, speed: 3.5}         what it is, for plans that choose among machines

Own hardware costs `purchase / years` and its electricity, for every hour of a year of 8,760, used or not.
"""

from __future__ import annotations

import logging
import math
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from polyrhythm.data.seeding import seed_for
from polyrhythm.errors import RequestError, unknown
from polyrhythm.simulation.injection.fault import Faults
from polyrhythm.simulation.step_time import STEP_TIMES, StepTime
from polyrhythm.specs import Config, chosen, plainly
from polyrhythm.training.quantities import Count, NonNegative, Positive
from polyrhythm.user_files import parse_yaml, read_text

_log = logging.getLogger(__name__)
HOURS_A_YEAR = 8760
_LONGEST_LATENCY_S = 1.0
_LEAST_BANDWIDTH, _MOST_BANDWIDTH = 1e4, 1e13
"""Bytes per second of links that machines have: from a modem's to the memory's of an accelerator."""
_LEAST_LOCAL_BANDWIDTH, _LOCAL_LATENCY_S, _LONGEST_INSIDE_S = 1e6, 1e-3, 1e-2
"""Bytes per second of the slowest local network, 10 Mb/s; most seconds of latency of one, and inside a host."""
_LEAST_PER_S, _MOST_PER_S = 1e6, 1e16
"""Multiply-adds per second of a worker's training."""
_LONGEST_UPDATE_S, _LARGEST_SIGMA = 1.0, 3.0
_LEAST_MEMORY_BYTES, _LONGEST_STEP_S, _SHORTEST_STEP_S = 1e8, 1000.0, 1e-6
_HIGHEST_PRICE = 1000.0
"""Per hour, of a host."""
_WIDEST, _DRAWS = 1e4, 100
"""Largest ratio of the longest to the shortest of `_DRAWS` steps that is not doubted."""
_SLOWER_INSIDE = 10
"""Ratio by which a link inside a host may be slower than one between hosts, as over loopback on a fast network."""
_RATES = {"per_second": 3600.0, "per_minute": 60.0, "per_hour": 1.0, "per_year": 1 / HOURS_A_YEAR}


class Described(BaseModel):
    """A part of a cluster file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(Described):
    """A link: a message takes `latency_s + bytes / bandwidth_bytes_per_s`."""

    latency_s: NonNegative
    bandwidth_bytes_per_s: Positive


class Level(Link):
    """A level of a tree inside a host: several neighboring places share one link to the rest, in each direction.

    Attributes:
        places: places of workers below each link; 1: every accelerator has its own.
    """

    places: Count


class HostKind(Described):
    """Some equal hosts.

    Attributes:
        name: name for people.
        count: number of hosts of this kind.
        cores: cores of a host; with shared placement it holds at most as many servers as cores.
        accelerators: accelerators of each.
        workers: places for workers on each; default: one per accelerator, else one.
        speed: speed by which the time of a step is divided.
        machine: name of the machine in the cluster's price list.
        price_per_hour: price of a host per hour, in the cluster's currency; None: that of `machine`, or unknown.
        nic: link of each host to the others; default: the cluster's.
        inside: the link that ranks on the same host share; default: the cluster's.
        memory_bytes: memory of a host in bytes, shared by its workers; None: unknown.
        tree: replacement for `inside`: levels of links from each worker's place up to the host's memory and NIC, such
            as two accelerators on a PCIe switch, and two of those on a processor. Servers are at its top.
        server_takes: share of a host's computing that a server takes from the workers next to it; default: that of a
            core, also where workers compute on accelerators, which cores feed.
    """

    name: str
    count: Annotated[Count, Field(le=1_000_000)]
    cores: Count = 1
    accelerators: int = Field(default=0, ge=0)
    workers: Count | None = None
    speed: Positive = 1.0
    machine: str | None = None
    price_per_hour: NonNegative | None = None
    nic: Link | None = None
    inside: Link | None = None
    memory_bytes: Positive | None = None
    tree: tuple[Level, ...] = ()
    server_takes: Annotated[float, Field(ge=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _check_tree(self) -> HostKind:
        for below, above in pairwise(self.tree):
            if above.places <= below.places or above.places % below.places:
                raise RequestError(
                    f"tree: the {above.places} places of a level must be a multiple of the {below.places} below it"
                )
        return self

    @property
    def places(self) -> int:
        """Number of workers that it holds."""
        return self.workers or self.accelerators or 1

    @property
    def taken_by_a_server(self) -> float:
        """The share of its computing that a server takes from the workers next to it while it is at work."""
        own = self.server_takes
        return own if own is not None else 1 / self.cores

    def slowed_by(self, servers: float) -> float:
        """Return the factor of its workers' step times next to `servers` servers; infinite without a free core."""
        left = 1 - servers * self.taken_by_a_server
        return 1 / left if left > 1e-9 else float("inf")


class Racks(Described):
    """Hosts in racks: a message to another rack crosses the uplink of one and the downlink of the other."""

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
    """Steps of a rank, or of all ranks of a host, that begin within a time are slower."""

    rank: Annotated[int, Field(ge=0)] | None = None
    host: Annotated[int, Field(ge=0)] | None = None
    from_s: NonNegative
    to_s: NonNegative
    factor: Positive

    @model_validator(mode="after")
    def _check(self) -> PassingSlowness:
        if (self.rank is None) == (self.host is None):
            raise RequestError("passing_slowness: give either the rank or the host that is slow")
        if self.to_s <= self.from_s:
            raise RequestError(f"to_s {self.to_s:g} must be later than from_s {self.from_s:g}")
        return self


class SharedSlowness(Described):
    """Every host has good and bad times, which all its ranks have together: a factor on their steps, drawn again.

    Attributes:
        sigma: sigma of the factor, which is log-normal with a mean of 1.
        lasts_s: seconds for which each factor holds.
    """

    sigma: NonNegative
    lasts_s: Positive

    def factor(self, seed: int, host: int, now_s: float) -> float:
        """Return by how much steps that begin now take longer on a host."""
        drawn = Random(seed_for("shared slowness", seed, host, int(now_s // self.lasts_s)))
        return math.exp(self.sigma * drawn.gauss() - self.sigma**2 / 2)


class ServerUpdate(Described):
    """Processor time of a message that updates a shard, on its server, before the answer leaves.

    Attributes:
        seconds: seconds of an update, regardless of its size.
        bandwidth_bytes_per_s: bandwidth in bytes/s of the shard: reading the gradient, updating, copying the answer.
    """

    seconds: NonNegative = 0.0
    bandwidth_bytes_per_s: Positive


class MeasuredLayer(Described):
    """A layer of a measured step: its trained parameters, and the seconds of its forward and backward pass."""

    name: str
    parameters: Count
    seconds: NonNegative


class StepWork(Described):
    """Description of the step behind a cluster's step time, to scale it to other networks and batches.

    Qi, Sparks, Talwalkar, "Paleo: A Performance Model for Deep Neural Networks", ICLR 2017: a step takes its arithmetic
    over a share of the peak.

        measured       step time × (o + (1 - o) × work / multiply_adds)
        from a peak    step time × work / (peak_multiply_adds_per_s × share_of_peak), step time being about 1

    Attributes:
        model: model that was measured, for people.
        batch_size: batch size of a worker in that step, for people.
        precision: precision of that step; empty: unknown.
        multiply_adds: multiply-add operations of the whole step that was measured, forward and backward.
        overhead_share: o, the share of that step that does not grow with its arithmetic.
        peak_multiply_adds_per_s: peak multiply-add operations per second of a host of speed 1.
        share_of_peak: share of peak that training reaches.
        layers: layers with parameters of the measured step, in the order of the forward pass, for `--model
            "sizes(file=…)"`.
        limits: reasons why its time holds for the measured network, batch and inputs alone.
    """

    model: str = ""
    batch_size: Count | None = None
    precision: str = ""
    multiply_adds: Positive | None = None
    overhead_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    peak_multiply_adds_per_s: Positive | None = None
    share_of_peak: Annotated[float, Field(gt=0, le=1)] | None = None
    layers: tuple[MeasuredLayer, ...] = ()
    limits: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> StepWork:
        if (self.peak_multiply_adds_per_s is None) != (self.share_of_peak is None):
            raise RequestError("give both peak_multiply_adds_per_s and share_of_peak")
        if self.multiply_adds is not None and self.share_of_peak is not None:
            raise RequestError("give either multiply_adds, of a measured step, or a share of a peak")
        if self.overhead_share and self.multiply_adds is None:
            raise RequestError("overhead_share is of a measured step: give its multiply_adds, too")
        return self

    def factor(self, multiply_adds: float) -> float | None:
        """Return by how much a step of so much arithmetic is longer; None if that is not known."""
        if self.multiply_adds is not None:
            rest = 1 - self.overhead_share
            return self.overhead_share + rest * multiply_adds / self.multiply_adds
        if self.peak_multiply_adds_per_s is not None and self.share_of_peak is not None:
            return multiply_adds / (self.peak_multiply_adds_per_s * self.share_of_peak)
        return None


Unknown = Literal[
    "step_time",
    "spread",
    "nic_bandwidth",
    "nic_latency",
    "inside_bandwidth",
    "server_bandwidth",
    "server_update",
]
"""A value that `calibrate` fits."""


class Cluster(Described):
    """A cluster.

    Attributes:
        name: name for people.
        source: origin of its figures.
        hosts: hosts in order; ranks fill them from the first on.
        nic: every host's link to the others, unless it has its own.
        inside: the link within a host, unless it has its own.
        racks: racks of the hosts, if there are any.
        server_bandwidth_bytes_per_s: upper bound of one server's traffic with other hosts, in each direction;
            default: that of its host's NIC. A server that copies and packs its messages may be far below
            that.
        server_update: processor time of an update on its server; None: nothing beyond its bandwidth, and
            workers next to a server are always slowed as if it never paused.
        evaluation_s: seconds in which a worker on a host of speed 1 evaluates the model on all test images; next to
            steps an evaluation occupies as much of its host as a server.
        step_time: compute seconds of a step on a host of speed 1, for the network and batch in `step_of`.
        step_of: description of that step; None: it is used for any network and batch.
        step_factor: factor of `step_time` for the network and batch of the run.
        slow: factor of each rank's step times, by rank.
        passing_slowness: temporary slowness of some ranks, or of all ranks of some hosts.
        shared_slowness: slowness of all hosts, each at its own times.
        prices: a ready price list, or the file of one, for hosts that name their `machine`.
        currency: currency of its prices; that of `prices` if it is empty.
        faults: faults that occur.
        fitted: 80 % intervals of values that were fitted to throughputs, relative to the value; None: no limit.
    """

    name: str
    source: str = ""
    hosts: Annotated[tuple[HostKind, ...], Field(min_length=1)]
    nic: Link
    inside: Link
    racks: Racks | None = None
    server_bandwidth_bytes_per_s: Positive | None = None
    server_update: ServerUpdate | None = None
    evaluation_s: NonNegative = 0.0
    step_time: Annotated[StepTime, chosen("step time", STEP_TIMES)]
    step_of: StepWork | None = None
    step_factor: Positive = 1.0
    slow: dict[Annotated[int, Field(ge=0)], Positive] = {}
    passing_slowness: tuple[PassingSlowness, ...] = ()
    shared_slowness: SharedSlowness | None = None
    prices: str | None = None
    currency: str = ""
    faults: Faults = ()
    fitted: dict[Unknown, tuple[Positive | None, Positive | None]] = {}

    @cached_property
    def machines(self) -> tuple[HostKind, ...]:
        """Every single host, in order."""
        return tuple(kind for kind in self.hosts for _ in range(kind.count))


class MachinePrice(Described):
    """Price of a machine: an hourly rate, or a purchase price; and its description, where known.

    Attributes:
        cores: number of cores; None: the machine is not described.
        accelerators: accelerators of it.
        workers: places for workers; None: one an accelerator, else one.
        speed: speed of a worker, over one on a host of speed 1 of a cluster; None: as its cores are to those
            of the cluster's
            first host, where it has no accelerators.
    """

    per_second: NonNegative | None = None
    per_minute: NonNegative | None = None
    per_hour: NonNegative | None = None
    per_year: NonNegative | None = None
    purchase: NonNegative | None = None
    years: Positive | None = None
    watts: NonNegative = 0.0
    electricity_per_kwh: NonNegative = 0.0
    cores: Count | None = None
    accelerators: Annotated[int, Field(ge=0)] = 0
    workers: Count | None = None
    speed: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> MachinePrice:
        given = [name for name in (*_RATES, "purchase") if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"give one of {', '.join(_RATES)} or purchase (given {', '.join(given) or 'none'})"
            )
        if (self.purchase is None) != (self.years is None):
            raise RequestError("purchase goes with years, over which it is written off")
        return self

    @property
    def described(self) -> bool:
        """Whether its price list describes it, so that a plan may choose it."""
        return self.cores is not None and (self.speed is not None or not self.accelerators)

    @property
    def of_an_hour(self) -> float:
        """Price of an hour, electricity included."""
        rates = [
            value * hours for name, hours in _RATES.items() if (value := getattr(self, name)) is not None
        ]
        if self.purchase is not None and self.years is not None:
            rates = [self.purchase / self.years / HOURS_A_YEAR]
        return float(rates[0] + self.watts / 1000 * self.electricity_per_kwh)


class PriceList(Described):
    """Prices of machines by name, with where and when they hold."""

    currency: str
    date: Annotated[str, BeforeValidator(str)]
    source: str
    machines: dict[str, MachinePrice]

    def of_an_hour(self, machine: str) -> float:
        """Return the price of an hour of a machine.

        Raises:
            RequestError: the list has none of that name.
        """
        if machine not in self.machines:
            raise unknown("machine of the price list", machine, self.machines)
        return self.machines[machine].of_an_hour


def _ready(folder: str) -> dict[str, Traversable]:
    """Return the files of this kind in the package, by name."""
    entries = [
        entry for entry in (files("polyrhythm.simulation") / folder).iterdir() if entry.name.endswith(".yaml")
    ]
    return {
        entry.name.removesuffix(".yaml"): entry for entry in sorted(entries, key=lambda entry: entry.name)
    }


def open_cluster(name_or_file: str | Path) -> Cluster:
    """Return a ready cluster by name, or the one that a file describes.

    Raises:
        RequestError: there is no such cluster, or a value in it is missing or impossible.
    """
    return parse_cluster(_text_of(name_or_file, "clusters", "cluster"), str(name_or_file))


def open_prices(name_or_file: str | Path) -> PriceList:
    """Return a ready price list by name, or the one of a file.

    Raises:
        RequestError: there is none, or a value in it is missing or impossible.
    """
    what = f"price list {name_or_file}"
    values = _values_in(
        _text_of(name_or_file, "price_lists", "price list"), what, "currency, date, source, machines"
    )
    try:
        return PriceList(**values)
    except ValidationError as error:
        raise _explained(error, what, PriceList) from None


def _text_of(name_or_file: str | Path, folder: str, kind: str) -> str:
    ready = _ready(folder)
    if str(name_or_file) in ready:
        return ready[str(name_or_file)].read_text(encoding="utf-8")
    path = Path(name_or_file)
    if not path.suffix and not path.exists():
        raise unknown(kind, str(name_or_file), ready)
    return read_text(path, f"the {kind} file")


def _values_in(text: str, what: str, keys: str) -> dict[str, Any]:
    read = parse_yaml(text, what)
    if not isinstance(read, dict):
        raise RequestError(f"{what} must be lines of `key: value`, with {keys}")
    return {str(key): value for key, value in read.items()}


def parse_cluster(text: str, where: str) -> Cluster:
    """Return the cluster that YAML describes.

    Args:
        text: the YAML.
        where: name of the YAML in errors.

    Raises:
        RequestError: a value is missing or impossible.
    """
    values = _values_in(text, f"cluster {where}", "hosts, nic, inside, step_time")
    values.setdefault("name", Path(where).stem)
    try:
        made = _priced(Cluster(**values))
    except ValidationError as error:
        raise _explained(error, f"cluster {where}", Cluster) from None
    for place, doubt in _doubts(made):
        _log.warning(
            "cluster %s, line %d: %s: %s", where, _line_of(text, place), ".".join(map(str, place)), doubt
        )
    return made


def _doubts(cluster: Cluster) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield entries of a cluster file that are likely in another unit or contradict others, with the reason."""
    links: list[tuple[tuple[str | int, ...], Link]] = [(("nic",), cluster.nic), (("inside",), cluster.inside)]
    for number, kind in enumerate(cluster.hosts):
        links += [(("hosts", number, "nic"), kind.nic)] if kind.nic is not None else []
        links += [(("hosts", number, "inside"), kind.inside)] if kind.inside is not None else []
        links += [(("hosts", number, "tree", level), link) for level, link in enumerate(kind.tree)]
    for place, link in links:
        if link.latency_s > _LONGEST_LATENCY_S:
            yield (
                (*place, "latency_s"),
                f"{link.latency_s:g} seconds is more than any network takes: is it in ms or us?",
            )
        bandwidth = link.bandwidth_bytes_per_s
        if not _LEAST_BANDWIDTH <= bandwidth <= _MOST_BANDWIDTH:
            yield (
                (*place, "bandwidth_bytes_per_s"),
                f"{bandwidth:g} bytes/s is {bandwidth * 8 / 1e9:.3g} Gb/s: is it in another unit?",
            )
        elif bandwidth < _LEAST_LOCAL_BANDWIDTH and 0 < link.latency_s <= _LOCAL_LATENCY_S:
            yield (
                (*place, "bandwidth_bytes_per_s"),
                f"{bandwidth:g} bytes/s, with the latency of a local network ({link.latency_s:g} s): is it in kB/s?",
            )
        if place[-1] != "nic" and _LONGEST_INSIDE_S < link.latency_s <= _LONGEST_LATENCY_S:
            yield (*place, "latency_s"), f"{link.latency_s:g} seconds inside a host: is it in ms or us?"
    yield from _beyond_limits(cluster)
    for number, kind in enumerate(cluster.hosts):
        if kind.memory_bytes is not None and kind.memory_bytes < _LEAST_MEMORY_BYTES:
            yield (
                ("hosts", number, "memory_bytes"),
                f"{kind.memory_bytes:g} bytes is less than a process needs: is it in GB?",
            )
        if kind.machine is not None and cluster.prices is not None:
            listed = open_prices(cluster.prices).machines.get(kind.machine)
            described = listed is not None and listed.cores is not None
            for key in ("cores", "accelerators", "speed") if described else ():
                value, own = getattr(listed, key), getattr(kind, key)
                if value is not None and value != own:
                    yield (
                        ("hosts", number, key),
                        f"{own:g}, but {kind.machine} has {value:g} in price list {cluster.prices}",
                    )
        if (kind.price_per_hour or 0.0) > _HIGHEST_PRICE:
            yield (
                ("hosts", number, "price_per_hour"),
                f"{kind.price_per_hour:g} an hour for one host: is it per year, or of all hosts?",
            )
    yield from ((("step_time",), doubt) for doubt in doubts_of_steps(cluster))
    nics = [kind.nic or cluster.nic for kind in cluster.hosts]
    if len(cluster.machines) > 1:
        for number, (kind, nic) in enumerate(zip(cluster.hosts, nics, strict=True)):
            place = ("hosts", number, "inside") if kind.inside is not None else ("inside",)
            inside = kind.inside or cluster.inside
            if _SLOWER_INSIDE * inside.bandwidth_bytes_per_s < nic.bandwidth_bytes_per_s:
                yield (
                    (*place, "bandwidth_bytes_per_s"),
                    f"{inside.bandwidth_bytes_per_s:g} bytes/s inside a host, but "
                    f"{nic.bandwidth_bytes_per_s:g} between hosts",
                )
            if inside.latency_s > _SLOWER_INSIDE * nic.latency_s > 0:
                yield (
                    (*place, "latency_s"),
                    f"{inside.latency_s:g} seconds inside a host, but {nic.latency_s:g} between hosts",
                )
            if kind.inside is None:
                break  # the others have the same
    if cluster.racks is not None and cluster.racks.hosts > len(cluster.machines):
        yield (
            ("racks", "hosts"),
            f"{cluster.racks.hosts} hosts in a rack, but the cluster has {len(cluster.machines)}",
        )
    uplink = cluster.racks.uplink_bandwidth_bytes_per_s if cluster.racks is not None else None
    if cluster.racks is not None and uplink is not None:
        hosts = max(nic.bandwidth_bytes_per_s for nic in nics) * cluster.racks.hosts
        if uplink > hosts or uplink < _LEAST_BANDWIDTH:
            yield (
                ("racks", "uplink_bandwidth_bytes_per_s"),
                f"{uplink:g} bytes/s, where the nics of {cluster.racks.hosts} hosts carry {hosts:g}: is it in another "
                "unit?",
            )
    most = max(nic.bandwidth_bytes_per_s for nic in nics)
    server = cluster.server_bandwidth_bytes_per_s
    if server is not None and server < _LEAST_BANDWIDTH:
        yield ("server_bandwidth_bytes_per_s",), f"{server:g} bytes/s: is it in another unit?"
    if server is not None and server > most:
        yield (
            ("server_bandwidth_bytes_per_s",),
            f"{server:g} bytes/s is more than any host's nic carries ({most:g})",
        )


def doubts_of_steps(cluster: Cluster) -> Iterator[str]:
    """Yield why step times of a cluster are likely in another unit."""
    random = Random(0)
    steps_s = [cluster.step_time.draw(random) * cluster.step_factor for _ in range(_DRAWS)]
    fastest = max(kind.speed for kind in cluster.hosts)
    step_s = steps_s[0] / fastest
    if cluster.step_of is None and step_s > _LONGEST_STEP_S:
        yield f"a step of {step_s:.3g} s on the fastest host: is it in ms?"
    if cluster.step_of is None and 0 < step_s < _SHORTEST_STEP_S:
        yield f"a step of {step_s:.3g} s on the fastest host: is it in seconds?"
    of = cluster.step_of
    if of is not None and of.multiply_adds is not None and step_s > 0:
        rate = of.multiply_adds / step_s
        if not _LEAST_PER_S <= rate <= _MOST_PER_S:
            yield (
                f"a step of {step_s:.3g} s for {of.multiply_adds:g} multiply-adds is {rate:.1e} in a second: is one of "
                "them in another unit?"
            )
    if max(steps_s) > _WIDEST * min(steps_s) > 0:
        yield f"steps of {min(steps_s):.3g} s to {max(steps_s):.3g} s: is the spread in seconds?"


def _beyond_limits(cluster: Cluster) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield single values that no machine has, with the likely unit."""
    limits: list[tuple[tuple[str | int, ...], float | None, float, float, str]] = []
    if cluster.racks is not None:
        limits.append((("racks", "latency_s"), cluster.racks.latency_s, 0, _LONGEST_LATENCY_S, "ms or us"))
    if (update := cluster.server_update) is not None:
        bandwidth = update.bandwidth_bytes_per_s
        limits += [
            (("server_update", "seconds"), update.seconds, 0, _LONGEST_UPDATE_S, "ms or us"),
            (
                ("server_update", "bandwidth_bytes_per_s"),
                bandwidth,
                _LEAST_BANDWIDTH,
                _MOST_BANDWIDTH,
                "another unit",
            ),
        ]
    if (shared := cluster.shared_slowness) is not None:
        limits.append((("shared_slowness", "sigma"), shared.sigma, 0, _LARGEST_SIGMA, "percent"))
    if (of := cluster.step_of) is not None:
        peak = of.peak_multiply_adds_per_s
        limits.append(
            (("step_of", "peak_multiply_adds_per_s"), peak, _LEAST_PER_S, _MOST_PER_S, "another unit")
        )
    for place, value, low, high, unit in limits:
        if value is not None and not low <= value <= high:
            yield place, f"{value:g}: is it in {unit}?"


def _line_of(text: str, place: Sequence[str | int]) -> int:
    """Return the line of a YAML text, counted from 1, on which the value of a place begins."""
    node, line = yaml.compose(text), 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
        if node is None:
            break
        line = node.start_mark.line + 1
    return line


def _priced(cluster: Cluster) -> Cluster:
    """Return a cluster with the prices of its price list, where hosts have none of their own."""
    named = [kind for kind in cluster.hosts if kind.machine is not None and kind.price_per_hour is None]
    if cluster.prices is None:
        if named:
            raise RequestError(
                f"cluster {cluster.name}: host {named[0].name} is a {named[0].machine}, but there is no price list: "
                "give prices: NAME_OR_FILE"
            )
        return cluster
    known = open_prices(cluster.prices)
    if cluster.currency not in ("", known.currency):
        raise RequestError(
            f"cluster {cluster.name}: its prices are in {cluster.currency}, those of {cluster.prices} in "
            f"{known.currency}"
        )
    hosts = tuple(
        kind.model_copy(update={"price_per_hour": known.of_an_hour(kind.machine)})
        if kind.machine is not None and kind.price_per_hour is None
        else kind
        for kind in cluster.hosts
    )
    return cluster.model_copy(update={"hosts": hosts, "currency": known.currency})


def machines_of(cluster: Cluster, refused: dict[str, str] | None = None) -> list[str]:
    """Return the described machines of a cluster's price list.

    Args:
        cluster: the cluster.
        refused: receiver of the others, with the reason.
    """
    if cluster.prices is None:
        raise RequestError(
            f"cluster {cluster.name} has no price list to choose machines from: give it prices: NAME_OR_FILE"
        )
    machines = open_prices(cluster.prices).machines
    if refused is not None:
        refused |= {name: _lacks(machine) for name, machine in machines.items() if not machine.described}
    return [name for name, machine in machines.items() if machine.described]


def _lacks(machine: MachinePrice) -> str:
    return f"its price list does not have its {'cores' if machine.cores is None else 'speed'}"


def with_machine(cluster: Cluster, name: str) -> Cluster:
    """Return a cluster of as many hosts, all of them one machine of its price list, with the same links between them.

    Raises:
        RequestError: there is no such list or machine, or the list does not describe the machine.
    """
    known = machines_of(cluster)
    assert cluster.prices is not None
    prices = open_prices(cluster.prices)
    price = prices.of_an_hour(name)
    machine = prices.machines[name]
    if name not in known:
        lacks = "cores" if machine.cores is None else "speed"
        raise RequestError(f"price list {cluster.prices} does not describe {name}: give it {lacks}")
    assert machine.cores is not None
    host = HostKind(
        name=name,
        count=len(cluster.machines),
        cores=machine.cores,
        accelerators=machine.accelerators,
        workers=machine.workers,
        speed=machine.speed or machine.cores / cluster.hosts[0].cores,
        machine=name,
        price_per_hour=price,
    )
    # Not `model_copy`, which would copy the list of its machines.
    values = {name: getattr(cluster, name) for name in Cluster.model_fields}
    return Cluster(**{**values, "hosts": (host,), "currency": prices.currency})


def cluster_text(cluster: Cluster) -> str:
    """Return a cluster as YAML that reads back as the same."""
    values = cluster.model_dump(mode="python", exclude_defaults=True)
    for shown, kind in zip(values["hosts"], cluster.hosts, strict=True):
        if kind.accelerators:
            shown["speed"] = kind.speed
    specs: dict[str, Any] = {"step_time": str(cluster.step_time)}
    if cluster.faults:
        specs["faults"] = [str(fault) for fault in cluster.faults]
    return yaml.safe_dump(_plain({**values, **specs}), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Config) else value


def _explained(error: ValidationError, what: str, model: type[BaseModel]) -> RequestError:
    """Return an error of one line: of pydantic's complaints an unknown key is often why another is missing."""
    complaints = error.errors()
    first = next((entry for entry in complaints if entry["type"] == "extra_forbidden"), complaints[0])
    place, kind = first["loc"], first["type"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if kind == "missing":
        return RequestError(f"{what}: {path} is missing")
    if kind == "extra_forbidden":
        known = _model_at(model, place[:-1]).model_fields
        parent = path.rpartition(".")[0]
        return unknown(f"key of {what}" + (f", {parent}," if parent else ""), str(place[-1]), known)
    cause = first.get("ctx", {}).get("error")
    reason = str(cause) if isinstance(cause, RequestError) else plainly(first["msg"])
    given = "" if isinstance(cause, RequestError) else f" (given {first['input']!r:.200})"
    return RequestError(f"{what}: {path}: {reason}{given}")


def _model_at(model: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model that a place in a file belongs to, inside that of the whole file."""
    is_key = False  # of a mapping, such as the name of a machine
    for part in place:
        if isinstance(part, str) and not is_key:
            annotation = model.model_fields[part].annotation
            model = _model_in(annotation)
            is_key = typing.get_origin(annotation) is dict
        else:
            is_key = False
    return model


def _model_in(annotation: Any) -> type[BaseModel]:
    """Return the model in `Link | None`, `tuple[HostKind, ...]` or `dict[str, MachinePrice]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    assert typing.get_origin(annotation) in (types.UnionType, typing.Union, tuple, dict)
    return next(
        part for part in typing.get_args(annotation) if isinstance(part, type) and issubclass(part, BaseModel)
    )
