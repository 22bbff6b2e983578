"""Reads cluster files, and knows the ready ones."""

from __future__ import annotations

import types
import typing
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from polyrhythm.errors import RequestError, unknown
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.specs import Config, plainly

_READY = files("polyrhythm.simulation") / "clusters"


def ready_clusters() -> list[str]:
    """Names the clusters that come with the package."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in _READY.iterdir() if entry.name.endswith(".yaml")
    )


def open_cluster(name_or_file: str | Path) -> Cluster:
    """Reads a ready cluster by name, or a file.

    Raises:
        RequestError: there is no such cluster, or a value in it is missing or impossible.
    """
    if str(name_or_file) in ready_clusters():
        return parse_cluster((_READY / f"{name_or_file}.yaml").read_text(encoding="utf-8"), str(name_or_file))
    path = Path(name_or_file)
    if not path.suffix and not path.exists():
        raise unknown("cluster", str(name_or_file), ready_clusters())
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read the cluster file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"the cluster file {path} is not text") from None
    return parse_cluster(text, str(path))


def parse_cluster(text: str, where: str) -> Cluster:
    """Makes a cluster of YAML.

    Args:
        text: the YAML.
        where: names it in errors.

    Raises:
        RequestError: a value is missing or impossible.
    """
    try:
        read = yaml.safe_load(text)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # dates and numbers that cannot be, endless nesting
        raise RequestError(f"cluster {where} is not YAML: {' '.join(str(error).split())}") from None
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
    """Writes a cluster as YAML that reads back as the same."""
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
    """Makes one line of pydantic's complaints: an unknown key is often why another is missing."""
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
    """Finds the model that a place in a cluster file belongs to."""
    model: type[BaseModel] = Cluster
    for part in place:
        if isinstance(part, str):
            model = _model_in(model.model_fields[part].annotation)
    return model


def _model_in(annotation: Any) -> type[BaseModel]:
    """Finds the model in `Link | None` or `tuple[HostKind, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    assert typing.get_origin(annotation) in (types.UnionType, typing.Union, tuple)
    return next(
        part for part in typing.get_args(annotation) if isinstance(part, type) and issubclass(part, BaseModel)
    )
