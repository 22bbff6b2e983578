"""A run is asked to stop while workers are lost and come back: it ends, and nobody goes on alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from conformance.jobs import blobs, make_job, resumed, simulated, uneven
from polyrhythm.events import Event, RunEnded, WorkerJoined, WorkerLost, WorkerProgress
from polyrhythm.roles.world import StopRequest
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.run import ConstantCluster, job_program, program_of
from polyrhythm.simulation.simulated_run import constant_run, modeled_run
from polyrhythm.simulation.trials import play
from polyrhythm.strategies.role_assignment import roles_in_order
from simulation.trying import trial

FAULTS = "kill(rank=2, at_s=0.04, restart_after_s=0.01); kill(rank=1, at_s=0.05, restart_after_s=0.01)"


@pytest.mark.parametrize(
    "spec", ["synchronous(collective=ring)", "local_sgd(steps=3)", "d_psgd", "slowmo(steps=3, base=sgp)"]
)
def test_a_wish_to_stop_is_heard_by_those_who_are_left_and_by_those_who_come(spec: str) -> None:
    """Successors are let in before the last step, and when the others have left it behind them."""
    outcomes = set()
    for seed in range(12):
        events: list[Event] = []
        stop = StopRequest()

        def hear(event: Event, events: list[Event] = events, stop: StopRequest = stop) -> None:
            events.append(event)
            if isinstance(event, WorkerLost):
                stop.request()

        play(trial(spec, steps=40, faults=FAULTS), seed, hear, stop=stop)
        assert isinstance(events[-1], RunEnded)
        outcomes.add(events[-1].outcome)
    assert outcomes == {"interrupted"}


@pytest.mark.parametrize("spec", ["ad_psgd", "hogwild", "easgd", "downpour", "parameter_server"])
def test_who_has_taken_all_steps_holds_up_nobody_who_is_stopped(spec: str, tmp_path: Path) -> None:
    """Worker 0 is in its first epoch when the others have taken all steps; it stops, and the run can be resumed."""
    around = ConstantCluster(step_s=lambda worker: 0.001 if worker else 0.05, stop_at_s=0.06)
    job = make_job(spec, 3, folder=tmp_path)
    assert simulated(job, around).events[-1].outcome == "interrupted"
    ended = simulated(resumed(job))
    assert ended.events[-1].outcome == "done"
    assert ended.result["images_not_seen"] == 0


@pytest.mark.parametrize("spec", ["sgp", "d_psgd", "sgp(overlap=True)", "slowmo(steps=50, base=sgp)"])
def test_a_successor_that_comes_after_the_last_step_waits_for_no_turn(spec: str, tmp_path: Path) -> None:
    """Worker 0, alone, is asked to stop in its third step, at whose end it finds the successor at the door."""
    job = make_job(spec, 2, epochs=3, dataset=blobs(25), folder=tmp_path)
    events: list[Event] = []
    around = ConstantCluster(step_s=lambda worker: 0.01 if worker else 0.05, stop_at_s=0.125)
    stage = constant_run(roles_in_order(2, 0), job_program(job), events.append, around)
    FaultInjector(stage, job.strategy, parse_faults("kill(rank=1, at_s=0.035, restart_after_s=0.15)")).play()
    assert events[-1].outcome == "interrupted"
    assert [type(event) for event in events if isinstance(event, WorkerLost | WorkerJoined)] == [
        WorkerLost,
        WorkerJoined,
    ]


def test_who_missed_the_mean_after_which_others_have_stopped_stops_there_too(tmp_path: Path) -> None:
    """The mean in which a wish is heard breaks for some, since a successor comes: nobody takes a step more."""
    job = make_job("hierarchical_averaging", 6, dataset=blobs(49, test=5), batch_size=1, folder=tmp_path)
    events: list[Event] = []
    around = ConstantCluster(step_s=uneven, bandwidth_bytes_per_s=1e5, stop_at_s=0.4916)
    stage = constant_run(roles_in_order(6, 0), job_program(job), events.append, around)
    FaultInjector(
        stage, job.strategy, parse_faults("kill(rank=2, at_s=0.38029, restart_after_s=0.20621)")
    ).play()
    assert events[-1].outcome == "interrupted"
    assert (
        max(event.step for event in events if isinstance(event, WorkerProgress)) == 16
    )  # the end of a round


@pytest.mark.parametrize(
    "spec",
    [
        "lazy_synchronous(collective=direct)",
        "synchronous(collective=direct)",
        "synchronous(compress=one_bit(dense_below=0))",
        "post_local_sgd(collective=direct)",
    ],
)
def test_a_successor_that_worker_0_lets_in_after_its_last_step_finds_the_run_over(
    spec: str, tmp_path: Path
) -> None:
    """The others have left; only the successor is there, and would wait for worker 0 in the next step."""
    job = make_job(spec, 4, dataset=blobs(53, test=3), batch_size=2, folder=tmp_path)
    events: list[Event] = []
    paces = [0.05, 0.011, 0.012, 0.013]
    around = ConstantCluster(step_s=paces.__getitem__, latency_s=1e-3, stop_at_s=0.0783)
    stage = constant_run(roles_in_order(4, 0), job_program(job), events.append, around)
    FaultInjector(
        stage, job.strategy, parse_faults("kill(rank=2, at_s=0.071, restart_after_s=0.0339)")
    ).play()
    assert events[-1].outcome == "interrupted"
    assert any(isinstance(event, WorkerJoined) for event in events)


def stopped(spec: str, seed: int, faults: str, stop_at_s: float) -> str:
    """Run 5 steps of 6 workers dry, with faults and a request to stop; return the outcome."""
    tried, events, stop = trial(spec, workers=6, steps=5), list[Event](), StopRequest()
    dry_run = replace(tried.dry_run, seed=seed)
    stage = modeled_run(
        tried.layout, program_of(dry_run, faultless=False), events.append, seed=seed, stop=stop
    )
    stage.time.at(stop_at_s, stop.request)
    FaultInjector(
        stage, dry_run.strategy, parse_faults(faults), seed=seed, host_of=tried.layout.host_of
    ).play()
    assert isinstance(events[-1], RunEnded)
    return events[-1].outcome


@pytest.mark.parametrize(
    ("seed", "faults", "stop_at_s"),
    [
        (1041, "kill(rank=2, at_s=0.013663); kill(rank=4, at_s=0.021082)", 1e-4),
        (1096, "kill(rank=5, at_s=0.022336); kill(rank=4, at_s=0.020042)", 0.0061449163456882006),
    ],
)
def test_a_group_whose_speaker_dies_between_the_answers_of_two_servers_is_waited_for_by_neither(
    seed: int, faults: str, stop_at_s: float
) -> None:
    """The first server has told the speaker to stop, the second has yet to hear of that step."""
    assert stopped("mixed(replicas=2, servers=2)", seed, faults, stop_at_s) == "interrupted"


def test_groups_stop_whenever_members_die_and_come_back() -> None:
    """Deaths are about the moment of the wish."""
    random = Random(5)
    for seed in range(24):
        at_s, stop_at_s = (random.uniform(0.002, 0.06) for _ in range(2))
        ranks = random.sample(range(1, 6), 2)
        kills = [f"kill(rank={rank}, at_s={at_s + random.uniform(0, 0.01):.4g}" for rank in ranks]
        faults = f"{kills[0]}); {kills[1]}{random.choice(['', ', restart_after_s=0.004'])})"
        when_s = random.choice([stop_at_s, at_s + 0.005])
        assert stopped("mixed(replicas=2, servers=2)", seed, faults, when_s) in ("interrupted", "done")
