"""What workers' time goes into in simulated runs of which one knows it; the shares add up to the run's length."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.jobs import strategy
from polyrhythm.config.dry_run import sizes_for
from polyrhythm.events import Notice
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.held_back import Bottleneck, held_back
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.run import ConstantCluster, dry_events

STEP_S = 0.1
FREE_LINKS = ConstantCluster(step_s=lambda worker: STEP_S, latency_s=0.0, bandwidth_bytes_per_s=1e15)
ONE_SLOW = ConstantCluster(
    step_s=lambda worker: STEP_S * (1 + 4 * (worker == 3)), latency_s=0.0, bandwidth_bytes_per_s=1e15
)


def network(layers: int = 8) -> nn.Sequential:
    """Makes a network of equal layers, on no memory."""
    with torch.device("meta"):
        return nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(layers)))


def events_of(spec: str, cluster: ConstantCluster, steps: int = 20, workers: int = 4):
    chosen = strategy(spec)
    sizes = sizes_for(network(), (1, 8, 8), chosen, workers)
    draws = chosen.traits(workers).draws
    return dry_events(
        DryRun(strategy=chosen, workers=workers, sizes=sizes, steps=steps, draws=draws), cluster
    )


def shares(spec: str, cluster: ConstantCluster) -> Bottleneck:
    found = held_back(RunFigures.of(events_of(spec, cluster)))
    assert found is not None
    assert whole(found) == pytest.approx(1)
    return found


def whole(found: Bottleneck) -> float:
    waiting = found.slower_workers_share + found.stage_share + found.server_share + found.network_share
    return found.compute_share + waiting + found.processor_share + found.nothing_left_share


@pytest.mark.parametrize(("schedule", "microbatches"), [("gpipe", 4), ("one_forward_one_backward", 8)])
def test_the_bubble_of_a_pipeline_is_waiting_for_other_stages(schedule: str, microbatches: int) -> None:
    """Of K equal stages and M microbatches: (K - 1) / (M + K - 1) of the time."""
    found = shares(f"pipeline(stages=4, microbatches={microbatches}, schedule={schedule})", FREE_LINKS)
    bubble = 3 / (microbatches + 3)
    assert found.stage_share == pytest.approx(bubble, rel=0.02)
    assert found.compute_share == pytest.approx(1 - bubble, rel=0.02)
    assert "waiting for other stages" in found.time


def test_what_hybrid_exchanges_inside_its_passes_is_the_networks() -> None:
    slow_links = ConstantCluster(step_s=lambda worker: STEP_S, latency_s=0.0, bandwidth_bytes_per_s=1e7)
    quick, slow = shares("hybrid", FREE_LINKS), shares("hybrid", slow_links)
    assert quick.compute_share == pytest.approx(1, abs=1e-3)
    ended = events_of("hybrid", slow_links)[-1]
    assert slow.compute_share == pytest.approx(20 * STEP_S / ended.result["seconds"], rel=0.05)
    assert slow.network_share == pytest.approx(1 - slow.compute_share, abs=0.05)
    assert slow.network_share > 0.3


def test_what_a_server_holds_back_is_waiting_for_slower_workers() -> None:
    """Three of four wait for 0.4 of 0.5 s; so they do where two slow ones take turns, of which no mean tells."""
    found = shares("parameter_server(consistency=synchronous)", ONE_SLOW)
    assert found.slower_workers_share == pytest.approx(3 * 0.4 / (4 * 0.5), rel=0.05)
    assert found.compute_share == pytest.approx(8 / 20, rel=0.05)
    assert found.network_share == pytest.approx(0, abs=0.02)
    turns: dict[int, int] = {}

    def by_turns(worker: int) -> float:
        turns[worker] = turns.get(worker, 0) + 1
        return STEP_S * (5 if turns[worker] % 4 == worker else 1)

    cluster = ConstantCluster(step_s=by_turns, latency_s=0.0, bandwidth_bytes_per_s=1e15)
    assert shares("parameter_server(consistency=synchronous)", cluster).slower_workers_share == pytest.approx(
        0.6, rel=0.05
    )


@pytest.mark.parametrize("spec", ["parameter_server", "ad_psgd", "softsync", "easgd"])
def test_nobody_who_goes_at_its_own_pace_waits_for_slower_workers(spec: str) -> None:
    found = shares(spec, ONE_SLOW)
    assert found.slower_workers_share == pytest.approx(0, abs=0.02)
    assert found.compute_share > 0.85  # the rest has nothing left to do


def test_a_dry_run_says_that_it_sends_nothing_that_depends_on_values() -> None:
    told = [event.text for event in events_of("gaia", FREE_LINKS, steps=2) if isinstance(event, Notice)]
    assert any("depend on the gradients' values" in text for text in told)
    told = [event.text for event in events_of("ssp", FREE_LINKS, steps=2) if isinstance(event, Notice)]
    assert not any("values" in text for text in told)
