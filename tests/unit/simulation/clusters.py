"""Small clusters for tests."""

from __future__ import annotations

from typing import Any

from polyrhythm.simulation.cluster import Cluster

FREE = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e30}


def cluster(*hosts: dict[str, Any], **values: Any) -> Cluster:
    """Makes a cluster whose links cost nothing and whose steps take a second, unless told otherwise."""
    named = [{"name": f"host{number}", "count": 1, **host} for number, host in enumerate(hosts)]
    return Cluster(
        **{
            "name": "small",
            "hosts": named,
            "nic": FREE,
            "inside": FREE,
            "step_time": "constant(seconds=1)",
            **values,
        }
    )
