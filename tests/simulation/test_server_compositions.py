"""Timing, staleness, losses and bytes of the parameter server's compositions, in virtual time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conformance.jobs import PARAMETERS, blobs, make_job, resumed, simulated, stop_at
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import RunError
from polyrhythm.events import Event, RunEnded, WorkerLost
from polyrhythm.roles.checkpointing.archive import Archive
from polyrhythm.roles.world import DrawnPace
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.simulation.trials import play, try_seeds
from polyrhythm.strategies.parameter_server.consistency.backup import Backup, BackupGate
from polyrhythm.strategies.parameter_server.consistency.bounded_staleness import (
    BoundedStaleness,
    BoundedStalenessGate,
)
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync, SoftsyncGate
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.parameter_server.serving.gate import Decision, Gate
from polyrhythm.strategies.parameter_server.serving.rule import Applied
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import ShardRule
from sample import failures_of
from simulation.trying import trial

Times = Callable[[int, int], float]
FREE = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e30}


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int, int]]:
    """Gives a list that fills with every update: virtual time, version, step of the pushes."""
    found: list[tuple[float, int, int]] = []
    clocks: dict[str, Any] = {}
    draw, apply = DrawnPace.forward, ShardRule.apply

    def forward(self: DrawnPace, shares: Any, use: Any, work: float = 1.0) -> None:
        clocks["now"] = self.clock.now
        draw(self, shares, use, work)

    def noted(self: ShardRule, batch: Any, version: int) -> Any:
        applied = apply(self, batch, version)
        assert isinstance(applied, Applied)
        found.append((clocks["now"](), version + applied.updates, batch[0].step))
        return applied

    monkeypatch.setattr(DrawnPace, "forward", forward)
    monkeypatch.setattr(ShardRule, "apply", noted)
    return found


def drawn(seed: int, workers: int, steps: int) -> list[list[float]]:
    """Draws the compute seconds of every worker's steps."""
    random = Random(seed)
    return [[random.expovariate(100) for _ in range(steps)] for _ in range(workers)]


def run_with(times: list[list[float]], spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains on free links, each step taking the time that is drawn for its number."""
    workers = len(times)

    def draws(worker: int) -> float:
        return times[worker][taken[worker]]

    taken = [0] * workers
    take = ServerSession.on_message

    def on_message(self: ServerSession, source: int, message: Message) -> list[Any]:
        replies = take(self, source, message)
        for to, reply in (
            replies if message.kind is Kind.PUSH else ()
        ):  # with one server, ranks of workers are their numbers
            taken[to] = min(reply.step, len(times[to]) - 1)
        return replies

    monkeypatch.setattr(ServerSession, "on_message", on_message)
    job = make_job(spec, workers, dataset=blobs(train=workers * 4 * len(times[0])), epochs=1)
    simulated(job, ConstantCluster(step_s=draws, **FREE))


@pytest.mark.parametrize("seed", range(4))
def test_a_step_with_backup_workers_takes_as_long_as_its_nth_quickest(
    seed: int, updates: list[tuple[float, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step: the 4th of 6 draws. Later ones: as a plain replay says, and never later than any fixed four."""
    needed, workers, steps = 4, 6, 5
    times = drawn(seed, workers, steps)
    run_with(times, "backup_workers(spare=2)", monkeypatch)
    ends = [time for time, _, _ in updates]
    assert ends[0] == pytest.approx(sorted(row[0] for row in times)[needed - 1])
    assert ends == pytest.approx(_replayed(times, needed))
    for fixed in combinations(range(workers), needed):
        alone = 0.0
        for step, end in enumerate(ends):
            alone += max(times[worker][step] for worker in fixed)
            assert end <= alone + 1e-12
    assert [step for _, _, step in updates] == list(range(steps))


def _replayed(times: list[list[float]], needed: int) -> list[float]:
    """Gives when each update is made: a worker that is free begins the step that all updates by then have led to."""
    ends: list[float] = []
    free = [0.0] * len(times)
    for step in range(len(times[0])):
        come = []
        for worker, row in enumerate(times):
            while (
                begun := sum(end <= free[worker] for end in ends)
            ) < step:  # it comes late, and is answered at once
                free[worker] += row[begun]
            come.append((free[worker] + row[step], worker))
        come.sort()
        ends.append(come[needed - 1][0])
        for _, worker in come[:needed]:
            free[worker] = ends[-1]
    return ends


@pytest.mark.parametrize(("n", "workers"), [(1, 6), (2, 6), (3, 6), (2, 8)])
def test_softsync_is_about_n_updates_stale(n: int, workers: int) -> None:
    events: list[Event] = []
    play(trial(f"softsync(n={n})", workers=workers, steps=60, faults=(), check=False), 0, events.append)
    assert isinstance(events[-1], RunEnded)
    staleness = events[-1].result["staleness"]
    assert n - 1 < staleness["mean"] < n + 0.5  # as with n = lambda, which is asynchronous: n - 1
    assert staleness["max"] <= 6 * n  # steps are exponential here; the paper's are far more even


@pytest.mark.parametrize("s", [1, 2, 4])
def test_cached_reads_of_equal_workers_cost_one_in_s_and_1(s: int) -> None:
    job = make_job(f"ssp(s={s})", 3, dataset=blobs(train=12 * 60), epochs=1)
    result = simulated(job, ConstantCluster(latency_s=0.0, bandwidth_bytes_per_s=1e30)).result
    model, headers = PARAMETERS * 4, 2 * 64
    down = result["bytes_sent_per_step"] - headers - model
    assert model / (s + 1) <= down <= model / s


@pytest.mark.parametrize("spec", ["ssp(s=1)", "parameter_server(consistency=bounded_staleness(s=1))"])
def test_ssp_waits_for_the_slowest_and_asynchronous_does_not(spec: str) -> None:
    def one_slow(worker: int) -> float:
        return 0.1 if worker == 2 else 0.01

    def waited(spec: str) -> dict[int, float]:
        job = make_job(spec, 3, dataset=blobs(train=48), epochs=4)
        found: defaultdict[int, float] = defaultdict(float)
        for event in simulated(job, ConstantCluster(step_s=one_slow)).events:
            if hasattr(event, "wait_s"):
                found[event.worker] += event.wait_s
        return found

    bound, free = waited(spec), waited("parameter_server")
    assert bound[0] > 1.2  # 16 steps of 0.1 s pass, of which it computes 0.16
    assert bound[2] < 0.05
    assert max(free.values()) < 0.1


@pytest.mark.parametrize("spare", [1, 2])
def test_dead_workers_are_survived_iff_there_are_as_many_spare_ones(spare: int) -> None:
    for dead in (1, 2, 3):
        faults = "; ".join(f"kill(rank={1 + rank}, at_s={0.03 + 0.02 * rank})" for rank in range(dead))
        tried = trial(f"backup_workers(spare={spare}, servers=2)", workers=5, steps=12, faults=faults)
        events: list[Event] = []
        if dead <= spare:
            play(tried, 1, events.append)
            ended = events[-1]
            assert isinstance(ended, RunEnded)
            assert ended.result["steps"] == 12
            assert sum(isinstance(event, WorkerLost) for event in events) == dead
        else:
            with pytest.raises(
                RunError, match=rf"{spare + 1} workers are lost .* can spare {spare}: continue with"
            ):
                play(tried, 1, events.append)


COMPOSITIONS = [
    "ssp(s=1, servers=2)",
    "parameter_server(servers=2, consistency=bounded_staleness(s=2))",
    "backup_workers(spare=2, servers=2)",
    "softsync(n=2, merge=plain, servers=2)",
    "dc_asgd(servers=2, variant=c)",
    "parameter_server(servers=3, consistency=synchronous, aggregator=multi_krum(f=0))",
    "parameter_server(consistency=synchronous, aggregator=coordinate_median)",
    "mixed(consistency=softsync, merge=staleness_aware)",
    "mixed(replicas=2, consistency=backup)",
]


@pytest.mark.parametrize("spec", COMPOSITIONS)
def test_what_is_declared_holds_under_faults(spec: str) -> None:
    assert failures_of(trial(spec, workers=5, steps=4), range(20)) == ()


class HastyGate(BoundedStalenessGate):
    """Off by one: compares completed steps instead of those in progress."""

    def _decide(self, apply: tuple[int, ...] = ()) -> Decision:
        self._s += 1
        decision = super()._decide(apply)
        self._s -= 1
        return decision


class LazyGate(BoundedStalenessGate):
    """Reads one step too rarely."""

    def _must_read(self, pusher: int) -> bool:
        return self._cached_reads and self._copied[pusher] < self._clocks[pusher] - self._s - 1


class LenientGate(BackupGate):
    """Takes late gradients for the current step."""

    def arrive(self, pusher: int, step: int) -> Decision:
        return super().arrive(pusher, max(step, self._step))


class GreedyGate(SoftsyncGate):
    """Counts to c + 1."""

    def __init__(self, pushers: int, gathers: int) -> None:
        super().__init__(pushers, gathers + 1)


@pytest.mark.parametrize(
    ("consistency", "gate", "found"),
    [
        (BoundedStaleness(s=1), lambda: HastyGate(4, 1, False), "the step with which rank"),
        (BoundedStaleness(s=1, cached_reads=True), lambda: LazyGate(4, 1, True), "the copy with which rank"),
        (Backup(spare=1), lambda: LenientGate(4, 3), "staleness"),
        (Softsync(n=2), lambda: GreedyGate(4, 2), "gradients of an update"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_planted_bug_is_found(
    consistency: Any, gate: Callable[[], Gate], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(consistency), "gate", lambda self, pushers: gate())
    tried = try_seeds(trial(ParameterServer(consistency=consistency), faults=()), range(20))
    assert any(found in failure.what for failure in tried.failures)


def test_a_late_worker_leaves_out_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 steps, a worker that is ten times as slow takes three or so, and all end together."""
    pushed: defaultdict[int, list[int]] = defaultdict(list)
    take = ServerSession.on_message

    def noted(self: ServerSession, source: int, message: Message) -> list[Any]:
        if message.kind is Kind.PUSH:
            pushed[source].append(message.step)
        return take(self, source, message)

    monkeypatch.setattr(ServerSession, "on_message", noted)

    def one_slow(worker: int) -> float:
        return 0.095 if worker == 1 else 0.01

    job = make_job("backup_workers", 3, dataset=blobs(train=240), epochs=1)
    result = simulated(job, ConstantCluster(step_s=one_slow)).result
    assert pushed[0] == pushed[2] == list(range(20))
    assert pushed[1] == [0, 9, 18]
    assert result["seconds"] < 0.3
    assert result["bytes_sent_per_step"] == 2 * (PARAMETERS * 4 + 64)  # of the 43 steps that were taken


@pytest.mark.parametrize("variant", ["c", "a"])
def test_gradients_that_are_held_are_compensated_after_a_resumption(variant: str, tmp_path: Path) -> None:
    """The server holds a gradient when the run is stopped, and must know then what it was computed from."""
    spec = f"parameter_server(consistency=softsync, merge=delay_compensated(variant={variant}))"
    job = make_job(spec, 3, dataset=blobs(31), batch_size=2, folder=tmp_path)
    simulated(job, stop_at(0.03))
    [(tensors, facts)] = Archive(resumed(job)).load().servers
    assert facts["held"]
    assert all(f"seen.{number}" in tensors for number in range(len(facts["held"])))
    ended = simulated(resumed(job))
    assert ended.events[-1].outcome == "done"
    assert sum(ended.result["staleness"]["histogram"].values()) == 2 * 18  # batches
