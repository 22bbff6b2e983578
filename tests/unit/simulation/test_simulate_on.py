"""Whole jobs on modeled clusters."""

from __future__ import annotations

from fractions import Fraction

import pytest

from conformance.jobs import blobs, make_job, result_of
from polyrhythm.events import Event
from polyrhythm.roles.job import Job
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.simulation.timeline import Timeline
from simulation.traces import wide
from unit.simulation.clusters import cluster


def on(where: Cluster, job: Job, timeline: Timeline | None = None) -> list[Event]:
    events: list[Event] = []
    strategy = job.strategy
    layout = lay_out(
        where, job.workers, strategy.traits(job.workers).servers, strategy.traits(job.workers).placement
    )
    simulate_on(layout, job, events.append, timeline=timeline)
    return events


def test_steps_in_step_take_as_long_as_the_slowest_of_exponential_workers() -> None:
    """Each takes μ H_N on average; 4 standard errors of the mean of so many maxima are allowed."""
    workers, epochs = 8, 40
    job = make_job("synchronous", workers, epochs=epochs, batch_size=1, dataset=blobs(train=24, test=3))
    result = result_of(on(cluster({"count": workers}, step_time="exponential(mean=2)"), job))
    steps = 3 * epochs
    expected = 2 * float(sum(Fraction(1, number) for number in range(1, workers + 1)))
    deviation = 2 * float(sum(Fraction(1, number**2) for number in range(1, workers + 1))) ** 0.5
    assert result["steps"] == steps
    assert result["seconds"] / steps == pytest.approx(expected, abs=4 * deviation / steps**0.5)


def test_a_servers_nic_saturates_and_a_second_server_helps() -> None:
    """The shape of Campos et al., ICCS 2017, figure 1."""
    slow, fast = ({"latency_s": 0, "bandwidth_bytes_per_s": speed} for speed in (4e5, 4e6))
    where = cluster({"count": 8, "nic": fast}, {"count": 2}, nic=slow, step_time="exponential(mean=0.1)")

    def throughput(spec: str, workers: int) -> float:
        data = blobs(train=100 * workers, test=3)
        job = make_job(spec, workers, model=wide, batch_size=1, epochs=1, dataset=data)
        return float(result_of(on(where, job))["images_per_s"])

    one, two = "parameter_server(placement=dedicated)", "parameter_server(servers=2, placement=dedicated)"
    # 40 kB take 0.1 s into a server's NIC and 0.1 s out of it, at once. Eight workers that wait at two stations of 10 a
    # second, and compute for one more, pass 10 * 8 / (8 + 2) of them or more; 10 would be a NIC that never rests.
    alone = throughput(one, 8)
    assert 8 <= alone < 10
    assert throughput(two, 8) == pytest.approx(2 * alone, rel=0.05)


@pytest.mark.parametrize("spec", ["synchronous", "parameter_server(servers=2)", "mixed"])
def test_the_same_seed_gives_the_same_events_with_and_without_a_timeline(spec: str) -> None:
    where = cluster(
        {"count": 2, "workers": 2, "cores": 4},
        nic={"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e5},
        inside={"latency_s": 1e-4, "bandwidth_bytes_per_s": 1e6},
        step_time="exponential(mean=0.01)",
    )
    first, second = (on(where, make_job(spec, 4)) for _ in range(2))
    timeline = Timeline()
    third = on(where, make_job(spec, 4), timeline)
    told = [[event.to_json() for event in events] for events in (first, second, third)]
    assert told[0] == told[1] == told[2]
    assert {span.rank for span in timeline.spans} >= {0, 1, 2, 3}


def test_the_timeline_of_a_worker_is_whole() -> None:
    """What worker 0 computes and waits for adds up to its steps and to the whole run."""
    timeline = Timeline()
    where = cluster({"count": 2}, nic={"latency_s": 0.01, "bandwidth_bytes_per_s": 1e4})
    result = result_of(on(where, make_job("synchronous", 2), timeline))
    own = [span for span in timeline.spans if span.rank == 0]
    computed = sum(span.end_s - span.start_s for span in own if span.kind == "compute")
    waited = sum(span.end_s - span.start_s for span in own if span.kind == "wait")
    assert computed == pytest.approx(result["steps"], rel=1e-9)
    assert computed + waited == pytest.approx(own[-1].end_s, rel=1e-9)
    assert {sending.rank for sending in timeline.sendings} == {0, 1}
