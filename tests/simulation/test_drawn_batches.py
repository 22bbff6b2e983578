"""Workers that draw their batches, in simulation: uneven machines add up, and every image is seen once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest

from conformance.jobs import blobs, make_job, resumed, strategy
from polyrhythm.api import simulate as api
from polyrhythm.config.assemble import draws
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.events import (
    BatchesDrawn,
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.world import StopRequest
from polyrhythm.simulation.cluster import Cluster, Link
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import job_program, simulate, simulate_dry_on, simulate_on
from polyrhythm.simulation.simulated_run import ConstantCluster, constant_run
from polyrhythm.simulation.trials import Trial, play
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.training.model_sizes import ModelSizes
from simulation.drawing import Drawn, drawn, sizes_of
from simulation.test_drawn_runs import check_end, told

FREE = ["parameter_server", "softsync", "staleness_aware", "dc_asgd", "downpour", "easgd", "eamsgd"]
FREE += ["periodic_averaging", "hogwild", "ad_psgd"]
GROUPS = ["mixed", "hierarchical(consistency=asynchronous)"]
SEEDS = range(6)


def uneven(*slow: float) -> Cluster:
    """Returns a host of workers on links that cost nothing, whose steps take 0.1 s times these factors."""
    free = {"latency_s": 0, "bandwidth_bytes_per_s": 1e15}
    return Cluster.model_validate(
        {
            "name": "uneven",
            "hosts": [{"name": "host", "count": 1, "cores": 64, "workers": len(slow), "server_takes": 0}],
            "nic": free,
            "inside": free,
            "step_time": "constant(seconds=0.1)",
            "slow": {rank: factor for rank, factor in enumerate(slow) if factor != 1},
        }
    )


def seconds(spec: str, cluster: Cluster, *, draws: bool, workers: int = 4, steps: int = 100) -> float:
    chosen, sizes = strategy(spec), ModelSizes((1000,), (1.0,))
    layout = lay_out(cluster, workers, chosen.traits(workers).servers, chosen.traits(workers).placement)
    dry_run = DryRun(strategy=chosen, workers=workers, sizes=sizes, steps=steps, draws=draws)
    events: list[Event] = []
    simulate_dry_on(layout, dry_run, events.append)
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    return float(ended.result["seconds"])


@pytest.mark.parametrize("spec", FREE)
def test_one_slow_worker_of_four_costs_its_own_speed_and_no_more(spec: str) -> None:
    cluster = uneven(1, 1, 1, 5)
    assert seconds(spec, cluster, draws=False) == pytest.approx(50, rel=1e-3)
    assert (
        seconds(spec, cluster, draws=True) <= 13.01
    )  # 400 batches at 32 a second, and one of the slow worker


@pytest.mark.parametrize("spec", FREE)
def test_even_machines_lose_nothing(spec: str) -> None:
    assert seconds(spec, uneven(1, 1, 1, 1), draws=True) == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize("spec", GROUPS)
def test_groups_draw_for_all_their_members(spec: str) -> None:
    # A group takes its steps together: 10 and 2 of two batches a second, and 200 of those are to be done.
    assert seconds(spec, uneven(1, 1, 1, 5), draws=True) <= 200 / 12 + 0.51


def test_batches_are_there_before_they_are_needed() -> None:
    """Though a message takes a tenth of a step, and the first of each worker is waited for."""
    slow_link = Link(latency_s=0.01, bandwidth_bytes_per_s=1e15)
    assert seconds("hogwild", uneven(1, 1, 1, 5).model_copy(update={"inside": slow_link}), draws=True) <= 13.1


def test_the_schedule_follows_the_run_and_not_a_workers_own_steps() -> None:
    """Rates of a worker four times slow are those that others have at the time, down to the end."""
    job = make_job("parameter_server", 4, dataset=blobs(640), epochs=4, schedule="cosine", batch_size=4)
    job = dataclasses.replace(job, draws=True)
    events = simulate(job, ConstantCluster(step_s=[0.1, 0.1, 0.1, 0.4].__getitem__))
    lr, total_s = job.learning.optimizer.lr, events[-1].result["seconds"]
    rates = [
        (event.time_s, event.worker, event.learning_rate)
        for event in events
        if isinstance(event, WorkerProgress) and event.steps
    ]
    for time_s, worker, rate in rates:
        # Speeds are estimates, of steps that are few here: within a tenth of the run.
        expected = [(1 + cos(pi * min(1, max(0, time_s / total_s + shift)))) / 2 for shift in (-0.1, 0.1)]
        assert lr * expected[1] - 1e-9 <= rate <= lr * expected[0] + 1e-9, (time_s, worker)


def test_waiting_is_a_share_of_the_runs_length(tmp_path: Path) -> None:
    """Of 10 s, three of four workers have nothing left to do for 8; dynamic: all end within a step of the slow one."""
    shares = {}
    for batches in ("static", "dynamic"):
        run = api.simulate(
            cluster=uneven(1, 1, 1, 5),
            gradients="none",
            steps=20,
            strategy="easgd",
            workers=4,
            data="digits",
            model="mlp",
            batches=batches,
            out=tmp_path / batches,
        )
        shares[batches] = run.figures["nothing_left_share"]
        assert run.figures["waiting_share"] == pytest.approx(shares[batches])
        assert run.figures["held_back"]["nothing_left_share"] == pytest.approx(shares[batches])
    assert shares["static"] == pytest.approx(3 * 8 / 40)
    assert shares["dynamic"] < 0.15


def covered(events: list[Event]) -> Counter[tuple[int, int]]:
    """Returns how often each place of each epoch was dealt and not given back, as the events tell."""
    found: Counter[tuple[int, int]] = Counter()
    for event in events:
        if isinstance(event, BatchesDrawn):
            change = 1 if event.batches else -1
            for place in range(event.start, event.stop):
                found[event.epoch, place] += change
    return Counter({place: times for place, times in found.items() if times})


@pytest.mark.parametrize("spec", [*FREE, "mixed(replicas=2)"])
def test_each_image_is_dealt_once_an_epoch(spec: str) -> None:
    job = make_job(spec, 4, dataset=blobs(103), epochs=3, batch_size=4)
    events = simulate(dataclasses.replace(job, draws=True), ConstantCluster(step_s=[1, 1, 2, 5].__getitem__))
    assert covered(events) == dict.fromkeys(((epoch, place) for epoch in range(3) for place in range(103)), 1)
    result = events[-1].result
    assert (result["epochs"], result["images_not_seen"]) == (3, 0)
    seen = sum(event.images for event in events if isinstance(event, WorkerProgress))
    assert seen == 3 * 103


@pytest.mark.parametrize("spec", [*FREE, "mixed(replicas=2)"])
@pytest.mark.parametrize("slow", [1, 20])
def test_every_epoch_is_tested_and_saved_though_worker_0_draws_nothing_in_it(
    spec: str, slow: float, tmp_path: Path
) -> None:
    """Of epochs of two batches and four workers, in one run and in one that is interrupted."""
    epochs = list(range(1, 6))
    around = ConstantCluster(step_s=[0.01 * slow, 0.01, 0.011, 0.013].__getitem__, latency_s=1e-3)
    whole, halves = (
        dataclasses.replace(
            make_job(spec, 4, dataset=blobs(8), epochs=len(epochs), batch_size=4, folder=tmp_path / name),
            draws=True,
        )
        for name in ("whole", "halves")
    )
    assert epochs_of(simulate(whole, around)) == (epochs, epochs)
    first = simulate(halves, dataclasses.replace(around, stop_at_s=0.015))
    before, after = epochs_of(first), (list[int](), list[int]())
    if first[-1].to_json()["outcome"] == "interrupted":  # some notice it at an exchange, after the end
        after = epochs_of(simulate(resumed(halves), around))
    assert [*before[0], *after[0]] == epochs
    assert sorted({*before[1], *after[1]} - {0}) == epochs


@pytest.mark.parametrize(("tested", "found"), [(2, [3, 4, 5]), (3, [4, 5])])
def test_a_test_that_was_lost_with_its_run_is_made_up_for(
    tested: int, found: list[int], tmp_path: Path
) -> None:
    """The log of the run that is resumed has its newest test after so many epochs; its checkpoint is of three."""
    job = dataclasses.replace(
        make_job("ad_psgd", 3, dataset=blobs(20), epochs=3, folder=tmp_path, schedule="constant"), draws=True
    )
    simulate(job)
    kept = dataclasses.replace(resumed(job).checkpointing, tested=tested)
    longer = dataclasses.replace(job.learning, epochs=5)
    events = simulate(dataclasses.replace(job, learning=longer, checkpointing=kept))
    assert epochs_of(events)[0] == found


def epochs_of(events: list[Event]) -> tuple[list[int], list[int]]:
    """Returns the epochs after which the model was tested, and saved."""
    found = (
        [event.epoch for event in events if isinstance(event, kind)] for kind in (Evaluated, CheckpointSaved)
    )
    return next(found), next(found)


def work_dry(run: Drawn, emit: Callable[[Event], None]) -> None:
    stop, sizes = StopRequest(), sizes_of(run.strategy)
    dry_run = DryRun(strategy=run.strategy, workers=run.workers, steps=run.steps, sizes=sizes, draws=True)
    play(
        Trial(layout=run.layout, dry_run=dry_run, faults=run.faults_and_wish(stop)), run.seed, emit, stop=stop
    )


def train(run: Drawn, emit: Callable[[Event], None]) -> None:
    stop = StopRequest()
    where = run.cluster.model_copy(update={"faults": run.faults_and_wish(stop)})
    job = dataclasses.replace(run.job(), draws=True)
    simulate_on(dataclasses.replace(run.layout, cluster=where), job, emit, stop=stop)


@pytest.mark.parametrize("name", [*FREE, "mixed", "hierarchical"])
@pytest.mark.parametrize("seed", SEEDS)
def test_invariants_hold_and_images_are_seen_whatever_goes_wrong(name: str, seed: int) -> None:
    run = drawn(seed, only=name)
    if not run.strategy.traits(run.workers).draws:
        run = drawn(seed + len(SEEDS), only=name)
    for way in (work_dry, train) if run.strategy.traits(run.workers).draws else ():
        events, error = told(lambda emit, way=way: way(run, emit))  # type: ignore[misc]
        check_end(run, events, error)
        if error or way is work_dry or events[-1].result.get("outcome") == "interrupted":
            continue
        lost = any(isinstance(event, WorkerLost) for event in events)
        assert lost or not events[-1].result["images_not_seen"] or run.stop_s is not None, str(run)


def with_faults(spec: str, servers: int, faults: str) -> dict[str, Any]:
    """Returns the figures of two epochs of 60 images on three workers, a batch of one image every 10 ms each."""
    job = dataclasses.replace(make_job(spec, 3, dataset=blobs(60), epochs=2, batch_size=1), draws=True)
    events: list[Event] = []
    around = ConstantCluster(step_s=lambda _: 0.01, latency_s=1e-3)
    stage = constant_run(roles_in_order(3, servers), job_program(job), events.append, around)
    FaultInjector(stage, job.strategy, parse_faults(faults)).play()
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    return ended.result


@pytest.mark.parametrize("without", [3, 4])
def test_the_last_batch_of_a_killed_worker_is_computed_again_unless_all_servers_have_it(without: int) -> None:
    faults = f"drop(source=1, to={without}, from_s=0.089); kill(rank=1, at_s=0.1)"
    figures = with_faults("parameter_server(servers=2)", 2, faults)
    assert (figures["workers_lost"], figures["images_not_seen"]) == (1, 0)
    assert sum(figures["staleness"]["histogram"].values()) == 2 * 120 + 1  # the other server counts it twice


@pytest.mark.parametrize("server", [3, 4])
def test_a_worker_that_dies_after_a_server_leaves_its_batches_to_others(server: int) -> None:
    faults = f"kill(rank={server}, at_s=0.05); kill(rank=1, at_s=0.1)"
    figures = with_faults("parameter_server(servers=2, replicas=2)", 2, faults)
    assert (figures["servers_lost"], figures["workers_lost"], figures["images_not_seen"]) == (1, 1, 0)


def test_lock_step_has_fixed_shares_and_others_draw_unless_told_otherwise() -> None:
    auto, static, dynamic = (configure({"batches": batches}) for batches in ("auto", "static", "dynamic"))
    for spec in FREE:
        assert draws(auto, strategy(spec), 4)
        assert not draws(static, strategy(spec), 4)
    for spec in ("synchronous", "ssp", "backup_workers", "local_sgd", "gaia", "d_psgd"):
        assert not draws(auto, strategy(spec), 4)
        with pytest.raises(RequestError, match="equally many steps"):
            draws(dynamic, strategy(spec), 4)
    config = configure({"data": "digits", "strategy": "easgd", "batches": "static"})
    assert not assemble_dry_run(config, 10)[0].draws
