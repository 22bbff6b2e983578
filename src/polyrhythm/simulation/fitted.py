"""Values of a cluster that `calibrate` fits: reading and replacing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import Cluster, HostKind, Unknown
from polyrhythm.simulation.step_times.log_normal import LogNormal

UNKNOWNS: tuple[str, ...] = get_args(Unknown)
"""Quantities that can be fitted: the factor of the step time, and the others in their own units."""


def value_of(cluster: Cluster, unknown: str) -> float:
    """Return the value of an unknown in a cluster to begin with.

    Raises:
        RequestError: the cluster has none, and there is nothing to begin with.
    """
    match unknown:
        case "step_time":
            return 1.0
        case "spread":
            if not isinstance(cluster.step_time, LogNormal) or not cluster.step_time.sigma:
                raise RequestError(
                    "the spread of steps is fitted for step_time: log_normal(…, sigma=…) above 0"
                )
            return cluster.step_time.sigma
        case "nic_bandwidth":
            return cluster.nic.bandwidth_bytes_per_s
        case "nic_latency":
            if not cluster.nic.latency_s:
                raise RequestError("nic_latency is 0 in the cluster file: give a guess to begin with")
            return cluster.nic.latency_s
        case "inside_bandwidth":
            return cluster.inside.bandwidth_bytes_per_s
        case "server_update":
            if cluster.server_update is None:
                raise RequestError("server_update is not in the cluster file: give a guess to begin with")
            return cluster.server_update.bandwidth_bytes_per_s
        case _:
            return cluster.server_bandwidth_bytes_per_s or cluster.nic.bandwidth_bytes_per_s


def with_values(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """Return a cluster with values of unknowns."""
    changed: dict[str, object] = {}
    if "step_time" in values:
        changed |= _paced(cluster, values["step_time"])
    if "spread" in values:
        assert isinstance(cluster.step_time, LogNormal)
        changed["step_time"] = cluster.step_time.model_copy(update={"sigma": values["spread"]})
    links = {"bandwidth_bytes_per_s": values.get("nic_bandwidth"), "latency_s": values.get("nic_latency")}
    if given := {key: value for key, value in links.items() if value is not None}:
        changed["nic"] = cluster.nic.model_copy(update=given)
    if "inside_bandwidth" in values:
        inside = {"bandwidth_bytes_per_s": values["inside_bandwidth"]}
        changed["inside"] = cluster.inside.model_copy(update=inside)
        if any(kind.tree for kind in cluster.hosts):
            times = values["inside_bandwidth"] / cluster.inside.bandwidth_bytes_per_s
            changed["hosts"] = tuple(_with_tree(kind, times) for kind in cluster.hosts)
    if "server_bandwidth" in values:
        changed["server_bandwidth_bytes_per_s"] = values["server_bandwidth"]
    if "server_update" in values:
        assert cluster.server_update is not None
        update = {"bandwidth_bytes_per_s": values["server_update"]}
        changed["server_update"] = cluster.server_update.model_copy(update=update)
    # Not `model_copy`, which would copy the list of its machines.
    return Cluster(**{**{name: getattr(cluster, name) for name in Cluster.model_fields}, **changed})


def _with_tree(kind: HostKind, times: float) -> HostKind:
    """Return a host with links inside of some times their bandwidth."""
    tree = [
        level.model_copy(update={"bandwidth_bytes_per_s": times * level.bandwidth_bytes_per_s})
        for level in kind.tree
    ]
    return kind.model_copy(update={"tree": tuple(tree)})


def _paced(cluster: Cluster, factor: float) -> dict[str, object]:
    """Return changes that make steps longer by a factor; with known arithmetic, a lower share of peak."""
    of, scaled = cluster.step_of, {"step_factor": cluster.step_factor * factor}
    if of is None or of.factor(1.0) is None:
        return dict(scaled)
    if of.multiply_adds is not None:
        return {**scaled, "step_of": of.model_copy(update={"multiply_adds": of.multiply_adds / factor})}
    assert of.share_of_peak is not None
    assert of.peak_multiply_adds_per_s is not None
    share = of.share_of_peak / factor
    peak = of.peak_multiply_adds_per_s * max(1.0, share)  # measurements beyond it raise the peak itself
    known = {"share_of_peak": min(1.0, share), "peak_multiply_adds_per_s": peak}
    return {**scaled, "step_of": of.model_copy(update=known)}
