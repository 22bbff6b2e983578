"""Whole dry runs in virtual time, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.jobs import strategy
from polyrhythm.events import Event
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import dry_events, simulate_dry_on
from polyrhythm.simulation.simulated_run import ConstantCluster
from polyrhythm.simulation.timeline import Timeline
from polyrhythm.specs import build
from polyrhythm.strategies.role_assignment import PLACEMENTS
from polyrhythm.training.model_sizes import ModelSizes
from unit.simulation.clusters import cluster

STEP_S, BANDWIDTH = 0.3, 1e8


def _dry_run(spec: str, workers: int, steps: int, sizes: ModelSizes) -> DryRun:
    return DryRun(strategy=strategy(spec), workers=workers, steps=steps, sizes=sizes, batch_size=1)


def _seconds(sizes: ModelSizes, steps: int, latency_s: float = 0.0) -> float:
    around = ConstantCluster(
        step_s=lambda worker: STEP_S, latency_s=latency_s, bandwidth_bytes_per_s=BANDWIDTH
    )
    made = _dry_run("synchronous", 2, steps, sizes)
    one, both = (
        dry_events(_dry_run("synchronous", 2, count, made.sizes), around) for count in (1, steps + 1)
    )
    return float((both[-1].time_s - one[-1].time_s) / steps)


def test_one_bucket_hides_nothing() -> None:
    """40 MB of two workers: each sends half of the gradients and half of the sums, 0.4 s at 100 MB/s."""
    assert _seconds(ModelSizes((10_000_000,), (1.0,)), 4) == pytest.approx(STEP_S + 0.4, rel=2e-3)


def test_two_buckets_overlap_as_they_do_by_hand() -> None:
    """Bucket 0 is ready 0.3/3 + 0.2 · 0.25 = 0.15 s into the step, bucket 1 when it is over, at 0.3 s.

    bucket 0, 8 MB     computing ends 0.15 │ 0.04 s gradients, 0.04 s sums: over at 0.23 s, hidden
    bucket 1, 32 MB    computing ends 0.30 │ 0.16 s gradients, 0.16 s sums: over at 0.62 s
    """
    sizes = ModelSizes((2_000_000, 8_000_000), (0.25, 0.75))
    step_s = _seconds(sizes, 4)
    assert step_s == pytest.approx(0.62, rel=2e-3)
    assert step_s < STEP_S + 0.4 - 0.07


def test_buckets_that_meet_on_the_link_take_turns() -> None:
    """Bucket 0's 32 MB, ready at 0.2 s, still travel when bucket 1's 8 MB are ready at 0.3 s.

    0.20 … 0.36 s    gradients of bucket 0
    0.36 … 0.40 s    gradients of bucket 1, which queued behind them since 0.3 s
    0.40 … 0.56 s    sums of bucket 0, which queued since 0.36 s
    0.56 … 0.60 s    sums of bucket 1
    """
    sizes = ModelSizes((8_000_000, 2_000_000), (0.5, 0.5))
    assert _seconds(sizes, 4) == pytest.approx(0.60, rel=2e-3)


def test_two_servers_halve_what_their_links_must_carry() -> None:
    """20 workers push and pull 40 MB a step; links of 1 GB/s let a server take 25 gradients a second."""
    sizes = ModelSizes((10_000_000,), (1.0,))
    link = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e9}
    where = cluster({"count": 22}, nic=link, inside=link, step_time="exponential(mean=0.2)")

    def images_per_s(spec: str) -> float:
        made = _dry_run(spec, 20, 25, sizes)
        layout = lay_out(where, 20, made.strategy.traits(20).servers, made.strategy.traits(20).placement)
        events: list[Event] = []
        simulate_dry_on(layout, made, events.append)
        return float(events[-1].to_json()["result"]["images_per_s"])

    one = images_per_s("parameter_server(placement=dedicated)")
    two = images_per_s("parameter_server(servers=2, placement=dedicated)")
    assert one == pytest.approx(25, rel=0.1)
    assert two == pytest.approx(2 * one, rel=0.15)


@pytest.mark.parametrize("spec", ["downpour", "decoupled_diloco(steps=2, servers=1)"])
def test_workers_that_fetch_compute_while_their_pushes_travel(spec: str) -> None:
    """A push and an answer of 8 MB take 0.08 s each on the link, and a step 0.3 s."""
    link = {"latency_s": 0.0, "bandwidth_bytes_per_s": BANDWIDTH}
    where = cluster({"count": 2}, nic=link, inside=link, step_time=f"constant(seconds={STEP_S})")
    steps, ends = (8, 24), []
    for count in steps:
        made = _dry_run(spec, 1, count, ModelSizes((2_000_000,), (1.0,)))
        placement = build("placement", "dedicated", PLACEMENTS)
        events: list[Event] = []
        simulate_dry_on(lay_out(where, 1, 1, placement), made, events.append)
        ends.append(events[-1].time_s)
    assert (ends[1] - ends[0]) / (steps[1] - steps[0]) == pytest.approx(STEP_S, rel=1e-6)


def _events(seed: int, timeline: Timeline | None = None) -> list[dict[str, Any]]:
    made = DryRun(
        strategy=strategy("parameter_server(servers=2)"),
        workers=12,
        steps=6,
        sizes=ModelSizes((1_000_000,), (1.0,)),
        seed=seed,
    )
    link = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1e8}
    where = cluster(
        {"count": 12, "cores": 4}, nic=link, inside=link, step_time="log_normal(median=0.5, sigma=0.5)"
    )
    events: list[Event] = []
    simulate_dry_on(
        lay_out(where, 12, 2, made.strategy.traits(12).placement), made, events.append, timeline=timeline
    )
    return [{**event.to_json(), "loss": None} for event in events]


def test_the_same_seed_gives_the_same_events_watched_or_not() -> None:
    first = _events(1)
    assert first == _events(1) == _events(1, Timeline()) == _events(1, Timeline(frozenset({0, 3}), most=10))
    assert first != _events(2)


def test_a_timeline_keeps_the_ranks_that_it_watches() -> None:
    timeline = Timeline(frozenset({0, 3, 12}))
    _events(1, timeline)
    assert {span.rank for span in timeline.spans} == {0, 3, 12}
    assert {(sending.rank, sending.to) for sending in timeline.sendings} >= {
        (0, 12),
        (12, 0),
        (3, 12),
        (12, 3),
    }
    assert {sending.to for sending in timeline.sendings} <= {0, 3, 12}
    assert timeline.full_at_s is None


def test_a_full_timeline_says_when_it_was_full() -> None:
    whole, timeline = Timeline(), Timeline(most=50)
    _events(1, whole)
    _events(1, timeline)
    assert len(timeline.spans) + len(timeline.sendings) == 50
    assert timeline.full_at_s is not None
    assert max(span.end_s for span in timeline.spans) <= timeline.full_at_s < whole.spans[-1].end_s


def test_the_clusters_own_faults_happen() -> None:
    made = _dry_run("parameter_server", 3, 8, ModelSizes((1_000,), (1.0,)))
    where = cluster(
        {"count": 3, "cores": 4}, step_time="constant(seconds=1)", faults="kill(rank=2, at_s=3.5)"
    )
    events: list[Event] = []
    simulate_dry_on(lay_out(where, 3, 1, made.strategy.traits(3).placement), made, events.append)
    result = events[-1].to_json()["result"]
    assert (result["workers_lost"], result["workers_joined"], result["steps"]) == (1, 0, 8)
