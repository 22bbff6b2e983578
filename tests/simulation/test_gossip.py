"""Gossip in virtual time: nobody waits for ever, whatever the times; and who looks finds what is planted."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from conformance.jobs import blobs, make_job, result_of, simulated, stop_at
from polyrhythm.errors import RunError
from polyrhythm.events import Event, Notice, RunEnded, WorkerJoined, WorkerLost
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.simulation.trials import play
from polyrhythm.strategies.gossip.ad_psgd import ADPSGD
from polyrhythm.strategies.gossip.d_psgd import DPSGDWorker
from polyrhythm.strategies.gossip.pairing.keeper import Averaged, Keeper
from polyrhythm.strategies.gossip.sgp import SGPWorker
from polyrhythm.strategies.topologies.complete import Complete
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.strategies.topologies.star import Star
from polyrhythm.verification.invariant import Violation
from sample import failures_of
from simulation.trying import trial
from unit.simulation.clusters import cluster
from unit.strategies.gossip.parts import play as play_parts
from unit.strategies.gossip.parts import whole_numbers


@pytest.mark.parametrize(
    ("spec", "workers", "seeds"),
    [
        ("ad_psgd", 2, 20),
        ("ad_psgd", 8, 50),
        ("ad_psgd(topology=star)", 5, 10),
        ("ad_psgd(topology=complete)", 6, 10),
    ],
)
def test_pairs_never_wait_in_a_circle_whatever_steps_take(spec: str, workers: int, seeds: int) -> None:
    """Exponential times, no faults: a standstill would end the run as a deadlock."""
    assert failures_of(trial(spec, workers=workers, steps=6, faults=()), range(seeds)) == ()


@pytest.mark.parametrize(
    "spec", ["ad_psgd(topology=complete)", "sgp(topology=star, overlap=True)", "d_psgd(topology=exponential)"]
)
def test_promises_hold_under_faults(spec: str) -> None:
    assert failures_of(trial(spec, workers=4, steps=6), range(20)) == ()


def test_promises_hold_where_workers_die_all_the_time() -> None:
    faults = "kill(rank=any, every_s=0.06, restart_after_s=0.02); delay(probability=0.2, seconds=0.02)"
    assert failures_of(trial("ad_psgd", workers=4, steps=15, faults=faults), range(12)) == ()


@pytest.mark.parametrize("topology", [Ring(), Star(), Complete()], ids=str)
def test_averages_in_pairs_lose_nothing(topology: Any) -> None:
    """The mean of all in the end is the mean at the start, less every gradient's share, however times fall."""
    workers, steps = 5, 6
    starts, gradients = whole_numbers(workers), whole_numbers(workers, seed=2) / 64
    generator = torch.Generator().manual_seed(8)
    times = torch.rand(workers, steps, generator=generator)
    played = play_parts(
        ADPSGD(topology=topology),
        starts,
        steps,
        lambda worker, step: gradients[worker] * (step + 1),
        lambda worker, step: 0.001 + 0.01 * float(times[worker, step]),
    )
    expected = starts.mean(0) - gradients.mean(0) * sum(range(1, steps + 1))
    torch.testing.assert_close(played.ends[0], expected)
    assert sum(sum(part.staleness.values()) for part in played.parts) == workers * steps
    assert max(max(part.staleness) for part in played.parts) > 0


class _Plants:
    """Bugs, as changes of one method."""

    @staticmethod
    def doubled(keeper: Keeper, source: int, answer: Averaged) -> Any:
        """Goes the other half of the way twice, now and then."""
        if answer.half is not None and answer.step % 5 == 3:
            keeper.values.sub_(answer.half)
        return _AVERAGED(keeper, source, answer)

    @staticmethod
    def forgotten(keeper: Keeper) -> Any:
        """Forgets an update, now and then."""
        before = keeper.values.clone()
        replies = _UPDATE(keeper)
        if replies and keeper._step % 7 == 5:
            keeper.values.copy_(before)
        return replies

    @staticmethod
    def impatient(keeper: Keeper, step: int) -> Any:
        """Does not wait for the answer to its last question."""
        replies = _ASK(keeper, step)
        if step % 4 == 2:
            keeper._asked = None
        return replies


_AVERAGED, _UPDATE, _ASK = Keeper._averaged, Keeper._update_if_averaged, Keeper._ask


@pytest.mark.parametrize(
    ("method", "bug", "found"),
    [
        ("_averaged", _Plants.doubled, r"parameters after step"),
        ("_update_if_averaged", _Plants.forgotten, r"what answer \d+ shows|parameters after step"),
        ("_ask", _Plants.impatient, r"parameters after step|an answer of rank|what answer"),
    ],
)
def test_a_bug_in_the_keeper_is_found(method: str, bug: Any, found: str) -> None:
    with mock.patch.object(Keeper, method, bug), pytest.raises(Violation, match=found):
        play(trial("ad_psgd", workers=4, steps=20, faults=()), 1, lambda event: None)


@pytest.mark.parametrize(
    ("kind", "spec"), [(DPSGDWorker, "d_psgd"), (SGPWorker, "sgp"), (SGPWorker, "sgp(overlap=True)")]
)
def test_a_neighbor_that_is_left_out_is_found(kind: Any, spec: str) -> None:
    take_step = kind.gradients_ready

    def forgetful(part: Any, step: Any, learning_rate: float) -> bool:
        if step.number == 3 and part.exchanger.workers.rank == 2:
            part._flat.gradients.zero_()
        return bool(take_step(part, step, learning_rate))

    with (
        mock.patch.object(kind, "gradients_ready", forgetful),
        pytest.raises(Violation, match=r"after step 3: .*matrices"),
    ):
        play(trial(spec, workers=4, steps=8, faults=()), 0, lambda event: None)


def _train(spec: str, faults: str, workers: int = 4) -> list[Event]:
    """Trains with real gradients: four steps an epoch of a second each, four epochs."""
    job = make_job(spec, workers, epochs=4, batch_size=4, dataset=blobs(train=16 * workers, test=6))
    where: Cluster = cluster({"count": workers, "cores": 4}, faults=[faults] if faults else [])
    events: list[Event] = []
    simulate_on(lay_out(where, workers, 0, job.strategy.traits(workers).placement), job, events.append)
    return events


@pytest.mark.parametrize("worker", [1, 2])
def test_the_others_go_on_without_a_worker_that_asks_or_answers(worker: int) -> None:
    events = _train("ad_psgd", f"kill(rank={worker}, after_step=5)")
    result = result_of(events)
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].outcome, result["workers_lost"]) == ("done", 1)
    assert [event.worker for event in events if isinstance(event, WorkerLost)] == [worker]
    assert result["steps"] == 16
    assert result["seconds"] == pytest.approx(16, rel=0.01)  # nobody waited


@pytest.mark.parametrize("worker", [1, 2])
def test_a_successor_does_the_steps_that_are_left(worker: int) -> None:
    """It dies in its sixth step. The leader lets another in after its own eighth, and that begins where it died."""
    events = _train("ad_psgd", f"kill(rank={worker}, at_s=5.5, restart_after_s=2)")
    result = result_of(events)
    assert [event.worker for event in events if isinstance(event, WorkerJoined)] == [worker]
    assert (result["workers_lost"], result["workers_joined"], result["images_not_seen"]) == (1, 1, 0)
    assert result["seconds"] == pytest.approx(8 + 11, rel=0.01)


def test_a_straggler_holds_up_its_neighbors_only_where_all_go_in_step() -> None:
    """Worker 2 is five times as slow. The quickest of the others take their 16 steps in 16 s if they need not wait."""
    slow = "slow(rank=2, factor=5, from_s=0, to_s=1000)"

    def last_of_others(spec: str) -> float:
        return max(
            event.time_s
            for event in _train(spec, slow)
            if getattr(event, "worker", 2) != 2 and hasattr(event, "step")
        )

    assert last_of_others("ad_psgd") == pytest.approx(16, rel=0.01)
    assert last_of_others("d_psgd") > 60


def test_a_wish_to_stop_reaches_all_and_the_gap_is_told_at_the_start() -> None:
    for spec in ("ad_psgd", "d_psgd", "sgp"):
        events = simulated(make_job(spec, 5), stop_at(0.03)).events
        assert isinstance(events[-1], RunEnded)
        assert events[-1].outcome == "interrupted"
        notices = [event.text for event in events if isinstance(event, Notice)]
        assert len(notices) == 1
        assert "of 5 workers: spectral gap" in notices[0]


@pytest.mark.parametrize("spec", ["d_psgd", "sgp", "ad_psgd"])
def test_without_the_leader_a_run_ends_with_the_cause(spec: str) -> None:
    with pytest.raises(RunError, match=r"worker 0 was killed at 0\.05 s, and the run needs it"):
        play(trial(spec, faults="kill(rank=0, at_s=0.05)"), 0, lambda event: None)
