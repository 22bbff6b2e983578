"""A profile becomes a cluster that says the same."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from polyrhythm.planning.link import MeasuredLink
from polyrhythm.planning.profile import Host, Profile, measure_host, overhead_share
from polyrhythm.planning.step import StepProfile
from polyrhythm.simulation.cluster import cluster_text, parse_cluster
from polyrhythm.simulation.step_times.log_normal import LogNormal

STEP = StepProfile((0.5 * exp(-0.2), 0.5, 0.5 * exp(0.2)), 0.0, 0.1, 0.2, 0.2, ())
ONE = Profile(
    hosts=(Host("here", 8, 1 << 34, 1e10, ()),),
    speeds=(1.0,),
    threads=2,
    inside=MeasuredLink(1e-5, 4e9),
    between=None,
    step=STEP,
    model="a model",
)


def test_one_host() -> None:
    cluster = parse_cluster(cluster_text(ONE.cluster("mine")), "mine")
    (host,) = cluster.hosts
    assert (host.name, host.cores, host.places, host.speed) == ("here", 8, 4, 1.0)
    assert cluster.nic == cluster.inside
    assert "not measured" in cluster.source
    assert isinstance(cluster.step_time, LogNormal)
    assert cluster.step_time.median == 0.5
    assert cluster.step_time.sigma == pytest.approx(0.2 * (2 / 3) ** 0.5)


def test_two_hosts() -> None:
    chips = Host("there", 4, 1 << 34, 1e10, ("chip", "chip"))
    two = replace(ONE, hosts=(*ONE.hosts, chips), speeds=(1.0, 2.5), between=MeasuredLink(1e-4, 1e8))
    cluster = two.cluster("mine")
    assert [(host.speed, host.places) for host in cluster.hosts] == [(1.0, 4), (2.5, 2)]
    assert (cluster.nic.latency_s, cluster.nic.bandwidth_bytes_per_s) == (1e-4, 1e8)
    assert two.to_json()["hosts"][1]["accelerators"] == ["chip", "chip"]


def test_a_host_is_as_the_system_says() -> None:
    host = measure_host()
    assert host.cores >= 1
    assert 1e8 < host.memory_bandwidth_bytes_per_s < 1e13
    with open("/proc/meminfo", encoding="ascii") as facts:
        total_kib = int(facts.readline().split()[1])
    assert host.memory_bytes == pytest.approx(total_kib * 1024, rel=0.01)


def test_overhead_is_what_does_not_grow_with_the_batch() -> None:
    """Steps of 0.2 + 0.0125 b seconds."""
    assert overhead_share(64, 1.0, 16, 0.4) == pytest.approx(0.2)
    assert overhead_share(64, 1.0, 16, 0.2) == 0.0  # more than proportional, as noise may have it
    assert overhead_share(64, 1.0, 16, 1.1) == 0.95
    assert overhead_share(1, 1.0, 2, 1.0) == 0.0
