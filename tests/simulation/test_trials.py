"""Trials of every strategy, and what they say of those that fail."""

from __future__ import annotations

import gc
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch

from polyrhythm.cli.main import _status
from polyrhythm.communication.transports.simulated.rank import SimulatedRank
from polyrhythm.communication.transports.simulated.virtual_time import Deadlock
from polyrhythm.errors import RunError
from polyrhythm.events import Event, RunEnded, WorkerJoined, WorkerLost, WorkerProgress
from polyrhythm.simulation.cluster import Link
from polyrhythm.simulation.injection.fault import Fault
from polyrhythm.simulation.injection.faults.kill import Kill
from polyrhythm.simulation.trials import ExactGradients, Trial, drawn_faults, faults_of, play, try_seeds
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.training.optimizers.sgd import SGD
from polyrhythm.verification.invariant import Violation
from sample import failures_of
from simulation.traces import default_strategies
from simulation.trying import STEP_S, trial

SEEDS = 40
SLOW_S = 4.0
STRATEGIES = [
    *default_strategies(),
    "parameter_server(servers=2, consistency=synchronous)",
    "mixed(consistency=synchronous)",
]


@pytest.mark.parametrize("spec", STRATEGIES)
def test_every_strategy_holds_what_it_declares_under_many_seeds(spec: str) -> None:
    assert failures_of(trial(spec, workers=3, steps=4), range(SEEDS)) == ()


def on_slow_links(tried: Trial) -> Trial:
    """Gives a trial in which the model of 400 kB takes four seconds from one host to another."""
    nic = Link(latency_s=0, bandwidth_bytes_per_s=4e5 / SLOW_S)
    slow = tried.layout.cluster.model_copy(update={"nic": nic})
    return replace(tried, layout=replace(tried.layout, cluster=slow))


def test_successors_that_come_late_find_all_servers_or_none() -> None:
    """A server that ended by itself once let another wait for ever for a successor which waited for the first."""
    faults = "delay(probability=0.2, seconds=0.02); kill(rank=any, every_s=0.06, restart_after_s=0.02)"
    assert failures_of(trial("parameter_server(servers=2)", steps=6, faults=faults), range(70)) == ()


def _events(seed: int, **options: Any) -> list[Event]:
    events: list[Event] = []
    play(trial("parameter_server(servers=2)", **options), seed, events.append)
    return events


def test_a_dry_run_says_who_is_lost_and_who_has_come() -> None:
    events = _events(
        0, steps=20, faults="kill(rank=2, after_step=5, restart_after_s=0.02); kill(rank=3, after_step=7)"
    )
    (lost, gone), (joined,) = (
        [event for event in events if isinstance(event, kind)] for kind in (WorkerLost, WorkerJoined)
    )
    assert isinstance(lost, WorkerLost)
    assert isinstance(gone, WorkerLost)
    assert isinstance(joined, WorkerJoined)
    assert {lost.worker, gone.worker} == {2, 3}
    assert (joined.worker, joined.rank) == (2, 2)
    assert joined.time_s > 0
    later = events[events.index(joined) + 1 :]
    told = [event.time_s for event in later if isinstance(event, WorkerProgress) and event.worker == 2]
    assert told  # its times count from the run's beginning, as the others' do
    assert min(told) > joined.time_s / 2  # the leader hears its first word a step or two later
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    assert (ended.result["workers_lost"], ended.result["workers_joined"]) == (2, 1)


def test_the_same_seed_gives_the_same_run() -> None:
    faults = "kill(rank=any, every_s=0.05, restart_after_s=0.01); delay(probability=0.2, seconds=0.01)"
    first = _events(3, faults=faults)
    assert list(map(str, first)) == list(map(str, _events(3, faults=faults)))
    assert str(first[-1]) != str(_events(4, faults=faults)[-1])


def test_to_be_watched_changes_no_time() -> None:
    faults = "kill(rank=2, at_s=0.1, restart_after_s=0.02)"
    plain = trial("parameter_server(servers=2)", faults=faults, check=False)
    dry_run = replace(plain.dry_run, optimizer=SGD(lr=1, momentum=0))  # its text travels, too
    alone: list[Event] = []
    play(replace(plain, dry_run=dry_run), 1, alone.append)
    assert list(map(str, alone)) == list(map(str, _events(1, faults=faults)))


def test_a_killed_workers_successor_does_the_steps_that_are_left() -> None:
    """Steps of 8/7 s beside the server, which takes one core of eight; messages take a few thousandths of that.

    Three are done at 3.43 s; the successor begins at 5.5 s.
    """
    where = {"faults": "kill(rank=1, at_s=3.5, restart_after_s=2)", "step_time": "constant(seconds=1)"}
    ended = _events(0, workers=2, steps=8, **where)[-1].to_json()["result"]
    assert ended["seconds"] == pytest.approx(5.5 + 5 * 8 / 7, rel=0.003)


def test_a_strategy_that_does_not_go_on_ends_with_the_cause() -> None:
    tried = trial("hybrid", faults="kill(rank=2, at_s=0.05)")
    with pytest.raises(RunError, match=r"worker 2 was killed at 0\.05 s, and the run needs it"):
        play(tried, 0, lambda event: None)


def test_a_dropped_push_is_a_deadlock_at_once() -> None:
    tried = trial("parameter_server", faults="drop(source=2, to=4, from_s=0.05, count=1)")
    with pytest.raises(Deadlock, match="worker 2 waits for a message from rank 4"):
        play(tried, 0, lambda event: None)


def test_a_corrupt_gradient_is_found_where_it_is_applied() -> None:
    tried = trial("parameter_server", faults="corrupt(source=2, to=4, from_s=0.05, count=1)")
    with pytest.raises(
        Violation, match=r"rank 4: parameters for rank 2, the sum of what was acknowledged"
    ) as error:
        play(tried, 0, lambda event: None)
    assert error.value.rank == 4


def test_a_server_dies_after_another_only_when_that_ones_successor_has_had_time_to_get_its_shards() -> None:
    tried = on_slow_links(trial("parameter_server(servers=3, replicas=2)", steps=4))
    servers = tried.layout.roles.servers
    drawn = [[fault for fault in faults_of(tried, seed) if _rank(fault) in servers] for seed in range(40)]
    pairs = [deaths for deaths in drawn if len(deaths) == 2]
    assert len(pairs) > 10
    for first, second in pairs:
        assert isinstance(first, Kill)
        assert isinstance(second, Kill)
        assert first.at_s is not None
        assert second.at_s is not None
        assert second.at_s - first.at_s > 10 * SLOW_S * 0.99  # times are rounded to three digits


def test_deaths_that_go_on_and_on_leave_the_others_the_time_to_meet() -> None:
    tried = on_slow_links(trial("d_psgd", steps=4))
    gaps_s = [getattr(fault, "every_s", None) for seed in range(60) for fault in faults_of(tried, seed)]
    known_s = [gap_s for gap_s in gaps_s if gap_s is not None]
    assert len(known_s) > 10
    assert min(known_s) >= 10 * SLOW_S


def _rank(fault: Fault) -> int | str | None:
    return fault.rank if isinstance(fault, Kill) else None


@pytest.mark.parametrize("spec", ["parameter_server", "synchronous", "d_psgd"])
def test_links_may_be_so_slow_that_a_message_takes_hundreds_of_steps_time(spec: str) -> None:
    events: list[Event] = []
    play(on_slow_links(trial(spec, steps=3, faults="")), 0, events.append)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].time_s > 3 * SLOW_S > 1000 * STEP_S


def test_failures_are_collected_or_end_the_trials() -> None:
    wrong = trial("parameter_server", faults="corrupt(source=2, to=4, from_s=0.05, count=1)")
    every = try_seeds(wrong, range(5, 9))
    assert [failure.seed for failure in every.failures] == [5, 6, 7, 8]
    first = try_seeds(wrong, range(5, 9), on_failure=lambda failure: False)
    assert (first.seeds, len(first.failures)) == (1, 1)
    assert first.failures[0].what == every.failures[0].what


def test_drawn_faults_depend_on_the_seed_alone_and_spare_whom_they_must() -> None:
    roles = roles_in_order(4, 2)
    assert drawn_faults(roles, 7, 1.0, spares=3) == drawn_faults(roles, 7, 1.0, spares=3)
    names = {fault.name for seed in range(200) for fault in drawn_faults(roles, seed, 1.0, spares=3)}
    assert names == {"kill", "slow", "delay", "cut"}
    spared = {fault.name for seed in range(200) for fault in drawn_faults(roles, seed, 1.0, spares=0)}
    assert spared == {"slow", "delay", "cut"}
    kills = [
        sum(fault.name == "kill" for fault in drawn_faults(roles, seed, 1.0, spares=1)) for seed in range(200)
    ]
    assert set(kills) == {0, 1}


def test_means_of_exact_gradients_are_whole_numbers() -> None:
    gradients = ExactGradients(100, 5)
    rows = torch.stack([gradients(worker, 3) for worker in range(5)])
    assert torch.equal(rows.double().mean(0), rows.double().mean(0).round())
    assert torch.equal(rows[:3].double().mean(0), rows[:3].double().mean(0).round())
    assert rows.count_nonzero() == rows.numel()
    assert not ExactGradients.possible(19, 20)
    assert ExactGradients.possible(8, 100)


def test_the_command_of_a_failure_repeats_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    request = [
        *("simulate", "--cluster", "office", "--data", "digits", "--model", "mlp", "--gradients", "none"),
        *("--steps", "6", "--strategy", "parameter_server(servers=2)", "--workers", "3", "--seed", "4"),
        *("--faults", "corrupt(source=1, from_s=0.1, count=1)"),
    ]
    assert _status([*request, "--seeds", "2", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["seeds"] == 2
    assert [failure["seed"] for failure in told["failures"]] == [4, 5]
    failure = told["failures"][1]
    assert list(tmp_path.iterdir()) == []
    assert _status(shlex.split(failure["command"])[1:]) == 1
    assert f"error: {failure['what']}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (["--seeds", "0", "--gradients", "none"], "seeds must be at least 1"),
        (["--seeds", "3"], "--seeds goes with --gradients none"),
        (["--seeds", "3", "--gradients", "none", "--out", "x"], "--seeds leaves no run folder"),
        (["--check"], "--check goes with --gradients none"),
        (["--faults", "kill(rank=9, at_s=1)"], "there is no rank 9; ranks are 0 to 1"),
        (["--faults", "kill(rank=9, at_s=1)", "--seeds", "3", "--gradients", "none"], "there is no rank 9"),
    ],
)
def test_requests_that_cannot_be_are_one_line(
    extra: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    request = ["simulate", "--cluster", "office", "--data", "digits", "--model", "mlp", "--workers", "2"]
    assert _status([*request, *extra]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec", ["parameter_server", "synchronous", "d_psgd"])
def test_a_run_that_a_death_has_ended_leaves_nothing_behind(spec: str) -> None:
    def alive() -> int:
        gc.collect()
        return sum(type(entry) is SimulatedRank for entry in gc.get_objects())

    before = alive()
    for seed in range(3):
        with pytest.raises(RunError, match="and the run needs it"):
            play(trial(spec, steps=4, faults="kill(rank=0, after_step=2)"), seed, lambda event: None)
    assert alive() <= before
