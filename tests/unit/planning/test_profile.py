"""A profile becomes a cluster that says the same."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import pytest
import torch

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.planning import step
from polyrhythm.planning.link import MeasuredLink
from polyrhythm.planning.profile import Host, Profile, measure_host, overhead_share
from polyrhythm.planning.step import StepProfile, measure_server_update, profile_step
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.simulation.cluster import ServerUpdate, cluster_text, parse_cluster
from polyrhythm.simulation.step_times.log_normal import LogNormal

MOST = 1e10
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


def test_a_servers_update_is_what_a_cluster_says_of_it() -> None:
    update = ServerUpdate(seconds=1e-4, bandwidth_bytes_per_s=2e9)
    assert (
        parse_cluster(cluster_text(replace(ONE, server_update=update).cluster("mine")), "mine").server_update
        == update
    )
    assert ONE.cluster("mine").server_update is None
    assert ONE.to_json()["server_update"] is None


def test_a_servers_updates_take_longer_of_more_numbers_and_of_a_costlier_rule() -> None:
    """Medians of one thread, compared over factors that no other process's load makes up for."""

    def seconds(optimizer: str, width: int) -> float:
        model = f"mlp(hidden=[{width}])"
        options = {"data": "digits", "model": model, "optimizer": optimizer, "workers": 1}
        found = measure_server_update(assemble(configure(options), CheckpointConfig(checkpoints=0)), MOST)
        assert found is not None
        assert 0 < found.seconds < 0.01
        assert 0 < found.bandwidth_bytes_per_s <= MOST
        return found.seconds + 4 * 75 * width / found.bandwidth_bytes_per_s

    small, large = seconds("sgd", 100), seconds("sgd", 20_000)
    assert large > 20 * small
    assert large < 20_000 * small
    assert seconds("adamw", 20_000) > large


def test_an_optimizer_of_all_workers_data_has_no_server() -> None:
    options = {"data": "digits", "model": "mlp", "optimizer": "kfac", "workers": 1}
    assert measure_server_update(assemble(configure(options), CheckpointConfig(checkpoints=0)), MOST) is None


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


def test_more_steps_are_measured_than_the_epochs_have() -> None:
    """The data's own number of epochs may be one, of few steps: they are taken again."""
    options = {
        "data": "synthetic(classes=2, size=8, channels=1, train=16, test=2)",
        "model": "mlp",
        "device": "cpu",
    }
    config = configure({"workers": 1, "batch_size": 8, "strategy": "synchronous"}, options)
    assert len(profile_step(assemble(config, CheckpointConfig(checkpoints=0)), 5).step_s) == 5


def test_steps_whose_time_counts_wait_for_the_device_five_times_whatever_the_number_of_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []
    take, finish = step._parts, step.finish_work

    def counted(device: torch.device) -> None:
        waits[-1] += 1
        finish(device)

    def parts(*arguments: Any) -> Any:
        waits.append(0)
        return take(*arguments)

    monkeypatch.setattr(step, "finish_work", counted)
    monkeypatch.setattr(step, "_parts", parts)
    config = configure(
        {}, {"data": "digits", "model": "lenet5", "batch_size": 8, "strategy": "synchronous", "workers": 1}
    )
    found = profile_step(assemble(config, CheckpointConfig(checkpoints=0)), 6)
    assert waits[: step.WARM_UP + 6] == [5] * (
        step.WARM_UP + 6
    )  # four ends of parts, and that of the forward pass
    assert min(waits[step.WARM_UP + 6 :]) > 5 + len(found.layers)
    assert min(layer.forward_s for layer in found.layers) > 0
