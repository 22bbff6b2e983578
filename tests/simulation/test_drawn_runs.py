"""Drawn runs: any strategy and options, whatever goes wrong and whenever someone wants to stop, come to an end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.jobs import blobs, make_job
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RunError
from polyrhythm.events import Event, RunEnded, WorkerJoined
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.run import ConstantCluster, job_program
from polyrhythm.simulation.simulated_run import constant_run
from polyrhythm.simulation.trials import play
from polyrhythm.strategies.role_assignment import roles_in_order
from simulation.drawing import OPTIONS, Drawn, drawn
from simulation.trying import layers

ROUNDS = 5
"""Each strategy is drawn so many times, by turns run dry and trained."""
SEEDS = range(ROUNDS * len(OPTIONS))


def told(play: Callable[[Callable[[Event], None]], None]) -> tuple[list[Event], str]:
    """Plays; gives the events, and what the run was ended by, if it was."""
    events: list[Event] = []
    try:
        play(events.append)
    except RunError as error:
        return events, str(error)
    return events, ""


def check_end(run: Drawn, events: list[Event], error: str) -> None:
    """A run ends as it was meant to, or for the want of a rank that was killed and that it needs."""
    if error:
        assert run.fatal, f"{run}: {error}"
        assert "and the run needs it" in error, f"{run}: {error}"
        return
    ended = events[-1]
    assert isinstance(ended, RunEnded), str(run)
    assert ended.outcome == "done" or run.stop_s is not None, str(run)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_run_ends_keeps_what_is_declared_and_is_the_same_when_it_is_played_again(seed: int) -> None:
    run = drawn(seed)
    play = run.work_dry if seed % 2 else run.train
    events, error = told(play)
    check_end(run, events, error)
    again, same_error = told(play)
    assert error == same_error
    assert list(map(str, events)) == list(map(str, again))


def test_the_draws_have_all_that_may_happen() -> None:
    runs = [drawn(seed) for seed in SEEDS]
    assert {run.strategy.name for run in runs} == set(OPTIONS)
    assert {fault.name for run in runs for fault in run.faults} == {"kill", "slow", "delay", "cut"}
    assert {run.workers for run in runs} == {1, 2, 3, 4, 5, 6}
    assert sum(run.fatal for run in runs) > 3
    assert sum(run.stop_s is not None for run in runs) > 20


def played(spec: str, paces: list[float], faults: str, stop_s: float | None = None) -> list[Event]:
    """Trains two epochs of three steps with steps that take these times; gives the events."""
    job = make_job(spec, len(paces), dataset=blobs(12 * len(paces), 6))
    roles, events = roles_in_order(len(paces), job.strategy.traits(len(paces)).servers), list[Event]()
    around = ConstantCluster(step_s=paces.__getitem__, latency_s=1e-3, stop_at_s=stop_s)
    FaultInjector(
        constant_run(roles, job_program(job), events.append, around), job.strategy, parse_faults(faults)
    ).play()
    return events


def test_worker_0_waits_for_nobody_of_its_site_who_is_behind() -> None:
    """A site goes in step, though sites do not: its successor's last step needs worker 0, which was at its desk."""
    events = played("gaia(lag=0)", [0.01] * 4, "kill(rank=1, at_s=0.005, restart_after_s=0.002)")
    assert any(isinstance(event, WorkerJoined) for event in events)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].outcome == "done"


def test_a_new_worker_0_waits_for_nobody_who_waits_for_its_batch() -> None:
    """An epoch ends in the middle of a batch, before others have heard who leads: they have handed theirs in."""
    events = played("sandblaster", [0.01, 0.01], "kill(rank=0, after_step=3, restart_after_s=0.002)")
    assert any(isinstance(event, WorkerJoined) for event in events)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].outcome == "done"


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        # A group lets newcomers in before a step, and worker 0 had none left: all others died while it took the last.
        (
            183,
            "delay(probability=0.217, seconds=0.0115); kill(rank=any, every_s=0.0616, restart_after_s=0.0)",
        ),
        # A newcomer's first batch was of an epoch that its group had left behind: it alone ended that epoch again.
        (
            363,
            "kill(rank=any, every_s=0.0925, restart_after_s=0.0146); kill(rank=any, every_s=0.1, restart_after_s=0.0)",
        ),
    ],
)
def test_groups_that_draw_batches_go_on_together_whoever_comes_when(seed: int, faults: str) -> None:
    generator, labels = torch.Generator().manual_seed(7), torch.arange(240) % 3
    pictures = torch.randn(240, 1, 4, 4, generator=generator)
    options = {
        "data": ((pictures, labels), (pictures[:30], labels[:30])),
        "model": "mlp(hidden=[5])",
        "strategy": "mixed(replicas=2)",
        "workers": 4,
        "batch_size": 8,
        "epochs": 2,
        "seed": seed,
    }
    job, events = assemble(configure(options), CheckpointConfig(checkpoints=0)), list[Event]()
    cluster = ConstantCluster(step_s=[0.01, 0.01, 0.01, 0.03].__getitem__)
    run = constant_run(roles_in_order(4, 1), job_program(job), events.append, cluster)
    FaultInjector(run, job.strategy, parse_faults(faults)).play()
    assert isinstance(events[-1], RunEnded)


@pytest.mark.parametrize(
    "spec",
    [
        "backup_workers",
        "gaia(sites=1)",
        "hierarchical",
        "parameter_server(consistency=synchronous, servers=2)",
        "sandblaster(portions=1)",
        "ssp(s=1)",
    ],
)
def test_a_successor_that_comes_when_others_have_stopped_takes_no_step(spec: str) -> None:
    """Its push would wait for those of others, who push no more."""
    ended = []
    for place in range(12):
        fault = f"kill(rank=2, at_s={0.03 + place * 1e-3}, restart_after_s=0)"
        events = played(spec, [0.01, 0.0101, 0.0102], fault, stop_s=0.032)
        assert isinstance(events[-1], RunEnded)
        ended.append(events[-1].outcome)
    assert set(ended) == {"interrupted"}


@pytest.mark.parametrize("servers", ["servers=1", "servers=3", "servers=2, replicas=2"])
def test_nobody_waits_for_a_late_worker_0_that_was_told_to_stop(servers: str) -> None:
    """Its gradient was dropped, two others have pushed theirs of the next step, and the fourth worker is lost."""
    events = played(f"backup_workers({servers})", [0.045, 0.01, 0.01, 0.01], "kill(rank=3, at_s=0.02)", 0.011)
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].outcome, events[-1].result["workers_lost"]) == ("interrupted", 1)


def test_after_a_stop_an_update_may_be_of_the_few_who_are_left() -> None:
    run = drawn(11514, only="backup_workers")
    assert run.spec == "backup_workers(servers=3)"
    check_end(run, *told(run.work_dry))


@pytest.mark.parametrize("back_s", [0.001, 0.004, 0.007])
def test_a_rank_lost_and_back_while_sums_are_under_way_is_missed_by_all_of_them(back_s: float) -> None:
    """Buckets are added up under the backward pass: a successor may come before a sum has heard of the loss."""
    joined = 0
    for place in range(8):
        faults = f"kill(rank=2, at_s={0.021 + place * 2e-3:.4f}, restart_after_s={back_s})"
        spec = "synchronous(collective=rabenseifner, transfer=bfloat16, bucket_bytes=64)"
        events: list[Event] = []
        play(layers(spec, step_time="constant(seconds=0.01)", faults=faults), 1, events.append)
        ended = events[-1]
        assert isinstance(ended, RunEnded)
        assert ended.outcome == "done"
        joined += sum(isinstance(event, WorkerJoined) for event in events)
    assert joined == 8


def test_replicas_whose_numbers_have_overflowed_are_equal() -> None:
    """Delay compensation of whole numbers grows beyond all bounds, and what is no number equals nothing."""
    run = drawn(1321, only="mixed")
    assert run.spec == "mixed(replicas=2, consistency=bounded_staleness(s=1), merge=delay_compensated)"
    check_end(run, *told(run.work_dry))


@pytest.mark.parametrize(
    "spec",
    [
        "backup_workers(spare=0)",
        "gaia(sites=1)",
        "parameter_server(consistency=synchronous, servers=2)",
        "ssp(s=0)",
    ],
)
def test_a_new_worker_0_that_is_told_to_stop_holds_up_no_step(spec: str) -> None:
    """Those who have pushed the step that it comes in at wait for its gradient, and it for their end."""
    ended = []
    for place in range(8):
        fault = f"kill(rank=0, at_s={0.0205 + place * 5e-4}, restart_after_s=0)"
        events = played(spec, [0.0102, 0.01, 0.0101], fault, stop_s=0.011)
        assert isinstance(events[-1], RunEnded)
        ended.append(events[-1].outcome)
    assert set(ended) == {"interrupted"}
