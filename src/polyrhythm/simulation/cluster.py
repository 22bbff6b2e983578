"""A cluster: hosts, links, prices and step times, as a YAML file describes them."""

from __future__ import annotations

import types
import typing
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polyrhythm.errors import RequestError, unknown
from polyrhythm.simulation.injection.fault import Faults
from polyrhythm.simulation.step_time import STEP_TIMES, StepTime
from polyrhythm.specs import Config, chosen, plainly
from polyrhythm.training.quantities import Count, NonNegative, Positive
from polyrhythm.user_files import parse_yaml, read_text


class Described(BaseModel):
    """A part of a cluster file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(Described):
    """A link: a message takes `latency_s + bytes / bandwidth_bytes_per_s`."""

    latency_s: NonNegative
    bandwidth_bytes_per_s: Positive


class HostKind(Described):
    """Some equal hosts.

    Attributes:
        name: for people.
        count: how many there are.
        cores: of each; with shared placement it holds at most as many servers as cores.
        accelerators: of each.
        workers: places for workers on each; default: one per accelerator, else one.
        speed: by which the time of a step is divided.
        price_per_hour: of each, in any currency.
        nic: its link to the others; default: the cluster's.
        inside: the link that ranks on the same host share; default: the cluster's.
        server_takes: share of a host's computing that a server takes from the workers beside it; default: that of a
            core, and nothing where workers compute on accelerators.
    """

    name: str
    count: Annotated[Count, Field(le=1_000_000)]
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
        """Return by how much steps of its workers are longer beside so many servers; infinite if nothing is left."""
        own = self.server_takes
        takes = own if own is not None else 0.0 if self.accelerators else 1 / self.cores
        left = 1 - servers * takes
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
    """Steps of a rank that begin within a time are slower."""

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
        racks: of the hosts, if there are any.
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


_READY = files("polyrhythm.simulation") / "clusters"


def ready_clusters() -> list[str]:
    """Return the names of the clusters that come with the package."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in _READY.iterdir() if entry.name.endswith(".yaml")
    )


def open_cluster(name_or_file: str | Path) -> Cluster:
    """Return a ready cluster by name, or the one that a file describes.

    Raises:
        RequestError: there is no such cluster, or a value in it is missing or impossible.
    """
    if str(name_or_file) in ready_clusters():
        return parse_cluster((_READY / f"{name_or_file}.yaml").read_text(encoding="utf-8"), str(name_or_file))
    path = Path(name_or_file)
    if not path.suffix and not path.exists():
        raise unknown("cluster", str(name_or_file), ready_clusters())
    return parse_cluster(read_text(path, "the cluster file"), str(path))


def parse_cluster(text: str, where: str) -> Cluster:
    """Return the cluster that YAML describes.

    Args:
        text: the YAML.
        where: its name in errors.

    Raises:
        RequestError: a value is missing or impossible.
    """
    read = parse_yaml(text, f"cluster {where}")
    if not isinstance(read, dict):
        raise RequestError(
            f"cluster {where} must be lines of `key: value`, with hosts, nic, inside, step_time"
        )
    read.setdefault("name", Path(where).stem)
    try:
        return Cluster(**{str(key): value for key, value in read.items()})
    except ValidationError as error:
        raise _explained(error, where) from None


def cluster_text(cluster: Cluster) -> str:
    """Return a cluster as YAML that reads back as the same."""
    values = cluster.model_dump(mode="python", exclude_defaults=True)
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


def _explained(error: ValidationError, where: str) -> RequestError:
    """Return an error of one line: of pydantic's complaints an unknown key is often why another is missing."""
    complaints = error.errors()
    first = next((entry for entry in complaints if entry["type"] == "extra_forbidden"), complaints[0])
    place, kind = first["loc"], first["type"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if kind == "missing":
        return RequestError(f"cluster {where}: {path} is missing")
    if kind == "extra_forbidden":
        model = _model_at(place[:-1])
        parent = path.rpartition(".")[0]
        return unknown(
            f"key of cluster {where}" + (f", {parent}," if parent else ""), str(place[-1]), model.model_fields
        )
    cause = first.get("ctx", {}).get("error")
    reason = str(cause) if isinstance(cause, RequestError) else plainly(first["msg"])
    given = "" if isinstance(cause, RequestError) else f" (given {first['input']!r:.200})"
    return RequestError(f"cluster {where}: {path}: {reason}{given}")


def _model_at(place: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model that a place in a cluster file belongs to."""
    model: type[BaseModel] = Cluster
    for part in place:
        if isinstance(part, str):
            model = _model_in(model.model_fields[part].annotation)
    return model


def _model_in(annotation: Any) -> type[BaseModel]:
    """Return the model in `Link | None` or `tuple[HostKind, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    assert typing.get_origin(annotation) in (types.UnionType, typing.Union, tuple)
    return next(
        part for part in typing.get_args(annotation) if isinstance(part, type) and issubclass(part, BaseModel)
    )
