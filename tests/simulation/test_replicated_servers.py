"""Servers that are killed where every shard is on two of them: nothing that a worker heard of is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conformance.jobs import blobs, make_job, result_of, resumed, simulated
from polyrhythm.errors import RunError
from polyrhythm.events import CheckpointSaved, Event, Notice, RunEnded, WorkerProgress
from polyrhythm.simulation.injection.faults.kill import Kill
from polyrhythm.simulation.run import job_program
from polyrhythm.simulation.simulated_run import constant_run
from polyrhythm.simulation.trials import Tried, faults_of, try_seeds
from polyrhythm.strategies.parameter_server.replication.shard_copy import ShardCopy
from polyrhythm.strategies.parameter_server.serving.pushers import Pushers
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.state import State
from simulation.deaths import AROUND, BATCH_SIZE, IMAGES, STEPS, WHOLE_S, WORKERS, events_of
from simulation.trying import layers, trial

MOMENTS = [round(WHOLE_S * number / 20, 5) for number in range(20)]
SPECS = [
    "parameter_server(servers=2, replicas=2)",
    "parameter_server(servers=3, replicas=2, consistency=synchronous)",
    "ssp(s=1, servers=2, replicas=2)",
    "softsync(servers=3, replicas=2)",
    "backup_workers(servers=2, replicas=2)",
    "dc_asgd(servers=2, replicas=2)",
    "staleness_aware(servers=2, replicas=2)",
    "downpour(servers=2, replicas=2)",
    "downpour(servers=3, replicas=2, n_push=2, n_fetch=3)",
    "downpour(servers=2, replicas=2, n_push=3, compress=top_k(density=0.2, dense_below=0))",
    "parameter_server(servers=2, replicas=2, compress=top_k(density=0.2, dense_below=0))",
    "parameter_server(servers=3, replicas=2, consistency=synchronous, compress=one_bit(dense_below=0))",
]


def job_of(spec: str, **options: Any) -> Any:
    return make_job(spec, WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE, **options)


eight_steps = partial(trial, steps=8)


def deaths_of(spec: str, seed: int, made: Callable[..., Any] = eight_steps) -> int:
    """Gives how many servers die with a seed; with a second one, the first has had a successor for long."""
    about = made(spec)
    servers = about.layout.roles.servers
    return sum(isinstance(fault, Kill) and fault.rank in servers for fault in faults_of(about, seed))


def tried(spec: str, seed: int, **options: Any) -> Tried:
    """Tries a seed with its faults, the death of a server among them."""
    about = trial(spec, steps=8, **options)
    deaths = [fault for fault in faults_of(about, seed) if isinstance(fault, Kill)]
    assert any(death.rank in about.layout.roles.servers for death in deaths)
    return try_seeds(about, [seed])


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_acknowledged_is_lost_or_applied_twice_and_replicas_agree(spec: str) -> None:
    """The ledger of every shard, its versions and staleness, and both replicas, bit for bit, after every entry."""
    assert [failure for seed in range(5) for failure in tried(spec, seed).failures] == []


@pytest.mark.parametrize("spec", SPECS)
def test_a_server_that_is_started_again_has_all_that_the_other_had(spec: str) -> None:
    """Then the other may be lost, and be started again: the same invariants, and the successor lives on alone."""
    seeds = [seed for seed in range(40) if deaths_of(spec, seed) == 2][:4]
    assert [failure for seed in seeds for failure in tried(spec, seed).failures] == []


@pytest.mark.parametrize("spec", [*SPECS[:3], "backup_workers(servers=2, replicas=2)"])
def test_so_it_is_where_pushes_and_answers_travel_in_parts(spec: str) -> None:
    """One or both servers of a shard are lost while parts are under way, and each has a successor."""
    seeds = [seed for seed in range(40) if deaths_of(spec, seed, layers) == 1][:3]
    seeds += [seed for seed in range(40) if deaths_of(spec, seed, layers) == 2][:4]
    assert [failure for seed in seeds for failure in try_seeds(layers(spec), [seed]).failures] == []


@pytest.mark.parametrize("victim", [WORKERS, WORKERS + 1])
@pytest.mark.parametrize("at_s", MOMENTS)
def test_a_run_goes_on_whenever_a_server_dies(at_s: float, victim: int) -> None:
    events = events_of(job_of("parameter_server(servers=2, replicas=2)"), [(at_s, victim)])
    result = result_of(events)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].outcome == "done"
    assert result["servers_lost"] == any(
        "is lost" in event.text for event in events if isinstance(event, Notice)
    )
    gradients = sum(result["staleness"]["histogram"].values())
    assert gradients == 2 * WORKERS * STEPS  # each on both shards, as who is left has counted
    assert result["images_not_seen"] == 0


@pytest.mark.parametrize("at_s", MOMENTS[::4])
@pytest.mark.parametrize(
    "keys", ["servers=2", "servers=3", "servers=2, compress=top_k(density=0.2, dense_below=0)"]
)
def test_a_loss_changes_no_bit_of_what_goes_in_step(keys: str, at_s: float) -> None:
    plain = f"parameter_server({keys}, consistency=synchronous"
    optimizer = {"optimizer": "sgd(momentum=0.9)"}
    expected = result_of(events_of(job_of(f"{plain})", **optimizer)))["parameters_sha256"]
    found = events_of(job_of(f"{plain}, replicas=2)", **optimizer), [(at_s, WORKERS)])
    assert result_of(found)["parameters_sha256"] == expected


@pytest.mark.parametrize(
    "spec", ["parameter_server(servers=2, replicas=2, consistency=synchronous)", SPECS[1], SPECS[-1]]
)
def test_servers_lost_one_after_the_other_change_no_bit_of_what_goes_in_step(spec: str) -> None:
    optimizer = {"optimizer": "sgd(momentum=0.9)"}
    servers = job_of(spec).strategy.traits(WORKERS).servers
    expected = result_of(events_of(job_of(spec, **optimizer)))["parameters_sha256"]
    deaths = [(0.04 + 0.03 * number, WORKERS + number) for number in range(servers)]
    births = [(at_s + 0.01, rank) for at_s, rank in deaths]
    found = result_of(events_of(job_of(spec, **optimizer), deaths, births))
    assert (found["servers_lost"], found["servers_joined"]) == (servers, servers)
    assert found["parameters_sha256"] == expected
    assert sum(found["staleness"]["histogram"].values()) == servers * WORKERS * STEPS


def test_the_other_server_may_not_be_lost_before_the_shard_has_been_handed_over() -> None:
    with pytest.raises(RunError, match="is gone"):
        events_of(
            job_of("parameter_server(servers=2, replicas=2)"),
            [(0.05, WORKERS), (0.0605, WORKERS + 1)],
            [(0.06, WORKERS)],
        )


def test_servers_that_are_not_neighbors_may_be_lost_together_and_neighbors_not() -> None:
    job = job_of("parameter_server(servers=4, replicas=2)")
    apart = result_of(events_of(job, [(0.05, 3), (0.05, 5)]))
    assert apart["servers_lost"] == 2
    assert sum(apart["staleness"]["histogram"].values()) == 4 * WORKERS * STEPS
    with pytest.raises(RunError, match="is gone"):
        events_of(job, [(0.05, 3), (0.08, 4)])


def test_a_checkpoint_holds_the_shard_of_a_lost_server(tmp_path: Any) -> None:
    """Stopped after the loss, and resumed with all servers: the steps go on where they were, on every shard."""
    job = job_of("parameter_server(servers=2, replicas=2)", folder=tmp_path)
    events: list[Event] = []
    stage = constant_run(
        roles_in_order(WORKERS, 2), job_program(job), events.append, replace(AROUND, stop_at_s=0.1)
    )
    stage.time.at(0.05, lambda: stage.cluster.kill(WORKERS))
    stage.play()
    stopped = result_of(events)
    assert events[-1].outcome == "interrupted"
    before = sum(stopped["staleness"]["histogram"].values())
    assert 0 < before < 2 * WORKERS * STEPS
    result = simulated(resumed(job), AROUND).result
    assert result["servers_lost"] == 0
    assert sum(result["staleness"]["histogram"].values()) == 2 * WORKERS * STEPS


def test_a_resumed_run_may_lose_a_server_at_once(tmp_path: Any) -> None:
    """What was handed out is on both servers of a shard before anyone asks."""
    spec = "parameter_server(servers=2, replicas=2, consistency=synchronous)"
    whole = simulated(job_of("parameter_server(servers=2, consistency=synchronous)"), AROUND).result
    stopped = tmp_path / "stopped"
    simulated(job_of(spec, folder=stopped), replace(AROUND, stop_at_s=0.1))
    for at_s in (0.0005, 0.002, 0.0035, 0.005):
        job = job_of(spec, folder=shutil.copytree(stopped, tmp_path / str(at_s)))
        found = result_of(events_of(resumed(job), [(at_s, WORKERS)]))
        assert found["parameters_sha256"] == whole["parameters_sha256"]


def hasty(self: ShardCopy, pusher: int, message: Any) -> Any:
    """Lets answers go before the backup has what they acknowledge."""
    relayed = enter(self, pusher, message)
    owed = self._unacknowledged[-1][1] if self._unacknowledged else []
    early = [*owed]
    owed.clear()
    return relayed + early


def forgetful(self: ShardCopy, pusher: int, message: Any, losses: int) -> Any:
    """Takes what it is asked once more as new."""
    self._requests.forget(pusher)
    return ask_after_loss(self, pusher, message, losses)


enter, ask_after_loss = ShardCopy._enter, ShardCopy.ask_after_loss
load_exact_state = Pushers.load_exact_state


def without_reads(self: Pushers, state: State) -> None:
    load_exact_state(self, state)
    for row in self.rows:
        row.forget_reads()


@pytest.mark.parametrize("seeds", [range(40)])
def test_answers_that_leave_too_early_are_found(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardCopy, "_enter", hasty)
    found = [tried(SPECS[0], seed).failures for seed in seeds]
    assert any(found)


def test_what_is_asked_again_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardCopy, "ask_after_loss", forgetful)
    found = [tried("backup_workers(servers=2, replicas=2)", seed).failures for seed in range(40)]
    assert any(found)


def test_what_is_not_handed_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pushers, "load_exact_state", without_reads)
    spec = "staleness_aware(servers=2, replicas=2)"
    seeds = [seed for seed in range(40) if deaths_of(spec, seed) == 2][:4]
    found = [failure.what for seed in seeds for failure in tried(spec, seed).failures]
    assert any("the replicas of shard" in what for what in found)


def test_deaths_of_two_workers_and_a_server_on_slow_links_leave_nobody_waiting() -> None:
    """The server dies while a successor asks for the first time, and what it was asked is late."""
    faults = (
        "delay(probability=0.157, seconds=0.0102); kill(rank=2, at_s=0.0209, restart_after_s=0.00095); "
        "kill(rank=3, at_s=0.127, restart_after_s=0.0); kill(rank=5, at_s=0.014)"
    )
    for steps in (8, 20):
        found = try_seeds(trial(SPECS[0], steps=steps, faults=faults), [38])
        assert (found.seeds, found.failures) == (1, ())


def test_in_lock_step_a_worker_comes_in_again_and_then_either_server_is_lost() -> None:
    """What acknowledges a worker's JOIN must not be taken for a server's, which asks for a shard."""
    spec = "parameter_server(servers=2, replicas=2, consistency=synchronous)"
    faults = (
        "kill(rank=1, after_step=2, restart_after_s=0.0129); kill(rank=5, at_s=0.0147, restart_after_s=0.00299); "
        "kill(rank=4, at_s=0.073, restart_after_s=0.00631)"
    )
    found = try_seeds(trial(spec, steps=8, faults=faults), [28])
    assert (found.seeds, found.failures) == (1, ())


@pytest.mark.parametrize("first", [WORKERS, WORKERS + 1])
def test_a_leader_that_is_through_asks_the_successors_of_all_servers_for_their_shards(
    first: int, tmp_path: Path
) -> None:
    """It exchanges nothing with them any more, and so hears nothing of who they are now, until it saves the end."""
    job = job_of("parameter_server(servers=2, replicas=2)", folder=tmp_path)
    second = 2 * WORKERS + 1 - first
    deaths, births = [(0.15, first), (0.17, second)], [(0.16, first), (0.18, second)]
    events = events_of(job, deaths, births)
    told_at = [event.time_s for event in events if isinstance(event, WorkerProgress) and event.worker == 0]
    assert max(told_at) < deaths[0][0]
    result = result_of(events)
    assert (result["servers_lost"], result["servers_joined"], result["images_not_seen"]) == (2, 2, 0)
    assert [event.epoch for event in events if isinstance(event, CheckpointSaved)] == [1, 2]
