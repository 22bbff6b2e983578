"""Flipped bits in training with real gradients: found within K steps, named, and repaired."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count, product
from typing import Any

import pytest
import torch

from conformance.jobs import blobs, make_job, named, result_of, strategies
from polyrhythm.errors import RunError
from polyrhythm.events import Event, StateDiffers
from polyrhythm.roles import digests
from polyrhythm.roles.job import Job
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.run import ConstantCluster, job_program
from polyrhythm.simulation.simulated_run import constant_run
from polyrhythm.strategies.role_assignment import roles_in_order

EVERY = 5
STEPS = 32


def job_of(spec: str, workers: int, every: int = EVERY, epochs: int = 1, **learning: Any) -> Job:
    learning = {"optimizer": "sgd(momentum=0.9)"} | learning
    images = 4 * STEPS * workers // epochs
    job = make_job(spec, workers, dataset=blobs(train=images, test=6), epochs=epochs, **learning)
    return replace(job, fault_tolerance=replace(job.fault_tolerance, digest_every=every))


def trained(job: Job, faults: str = "", seed: int = 0) -> tuple[list[Event], list[torch.Tensor]]:
    """Returns the events and the final parameters of every worker."""
    events: list[Event] = []
    around = ConstantCluster(step_s=lambda worker: 0.01 * (1 + 0.3 * worker))
    run = constant_run(roles_in_order(job.workers, 0), job_program(job), events.append, around)
    injector = FaultInjector(run, job.strategy, parse_faults(faults), seed=seed)
    injector.play()
    return events, [injector.states[worker][1].vector for worker in range(job.workers)]


@cache
def healthy(spec: str, workers: int) -> str:
    events, _ = trained(job_of(spec, workers, every=0))
    digest: str = result_of(events)["parameters_sha256"]
    return digest


def found_in(events: list[Event]) -> list[StateDiffers]:
    return [event for event in events if isinstance(event, StateDiffers)]


def same_bits(vectors: list[torch.Tensor]) -> bool:
    return all(torch.equal(vector.view(torch.int32), vectors[0].view(torch.int32)) for vector in vectors[1:])


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("spec", "where"),
    [
        *product(
            [
                "synchronous",
                "synchronous(collective=ring)",
                "synchronous(compress=one_bit(dense_below=0))",
                "lazy_synchronous",
            ],
            ["parameters", "optimizer"],
        ),
        ("post_local_sgd(after=99, steps=4)", "parameters"),  # each worker has its own optimizer
    ],
)
def test_of_three_workers_the_odd_one_is_named_and_gets_the_others_state(
    spec: str, rank: int, where: str
) -> None:
    events, vectors = trained(job_of(spec, 3), f"flip(rank={rank}, after_step=12, where={where})")
    [found] = found_in(events)
    assert (found.workers, found.after_step, found.step, found.returned_to) == ([rank], 10, 15, None)
    assert f"worker {rank} began to differ from the others between steps 10 and 15" in found.text
    assert same_bits(vectors)


@pytest.mark.parametrize("where", ["parameters", "optimizer"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("spec", ["synchronous", "synchronous(collective=ring)", "lazy_synchronous"])
def test_two_workers_return_to_the_state_that_agreed_as_if_nothing_had_happened(
    spec: str, rank: int, where: str
) -> None:
    events, vectors = trained(job_of(spec, 2), f"flip(rank={rank}, after_step=12, where={where})")
    [found] = found_in(events)
    assert (found.workers, found.after_step, found.step, found.returned_to) == ([0, 1], 10, 15, 10)
    assert same_bits(vectors)
    assert result_of(events)["parameters_sha256"] == healthy(spec, 2)


def test_a_flip_before_the_first_comparison_returns_to_the_start() -> None:
    events, _ = trained(job_of("synchronous", 2), "flip(rank=1, after_step=2)")
    assert [found.returned_to for found in found_in(events)] == [0]
    assert result_of(events)["parameters_sha256"] == healthy("synchronous", 2)


def test_steps_of_an_earlier_epoch_are_not_repeated() -> None:
    """The flip in step 14 is found after step 20, in the second epoch, which begins after step 16."""
    job = job_of("synchronous", 2, every=20, epochs=2)
    events, vectors = trained(job, "flip(rank=1, after_step=14)")
    assert [(found.step, found.returned_to) for found in found_in(events)] == [(20, 0)]
    assert same_bits(vectors)


@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (3, 1)])
@pytest.mark.parametrize("spec", ["diloco(steps=2)", "slowmo(steps=2)", "bmuf(steps=2)"])
def test_a_flip_in_the_state_of_the_outer_rule_is_repaired(spec: str, rank: int, workers: int) -> None:
    """In the model or the velocity of the outer rule, or in the local optimizer, which is each worker's own."""
    found = 0
    for after in range(12, 18):
        faults = f"flip(rank={rank}, after_step={after}, where=optimizer)"
        events, vectors = trained(job_of(spec, workers), faults, seed=after)
        found += len(found_in(events))
        assert all(event.workers == ([0, 1] if workers == 2 else [rank]) for event in found_in(events))
        assert same_bits(vectors)
    assert found > 0


def test_a_flip_before_a_mean_reaches_all_members_alike() -> None:
    events, vectors = trained(job_of("local_sgd(steps=4)", 3), "flip(rank=1, after_step=10)")
    assert not found_in(events)
    assert same_bits(vectors)


@pytest.mark.parametrize("rank", [1, 22])
def test_the_odd_one_of_many_is_found_along_the_tree(rank: int) -> None:
    """Digests of worker 22 pass workers 5 and 1, which look for them after each step."""
    events, vectors = trained(job_of("synchronous", 23), f"flip(rank={rank}, after_step=12)")
    [found] = found_in(events)
    assert (found.workers, found.after_step, found.step) == ([rank], 10, 15)
    assert same_bits(vectors)


def test_digests_of_the_last_step_reach_the_coordinator() -> None:
    events, _ = trained(job_of("synchronous", 23, every=STEPS), "flip(rank=22, after_step=30)")
    assert [(found.workers, found.step) for found in found_in(events)] == [([22], STEPS)]


@pytest.mark.parametrize(("rank", "at_s"), [(0, 0.205), (1, 0.19), (1, 0.22), (5, 0.205)])
def test_the_loss_of_a_worker_that_passes_digests_on_hides_nothing(rank: int, at_s: float) -> None:
    faults = f"flip(rank=22, after_step=12); kill(rank={rank}, at_s={at_s}, restart_after_s=0.001)"
    events, vectors = trained(job_of("synchronous", 23), faults)
    assert [found.workers for found in found_in(events)] == [[22]]
    assert same_bits(vectors)


IN_LOCKSTEP = [spec for spec in strategies() if "mixed" not in spec and make_job(spec, 4).traits.lockstep]


@pytest.mark.parametrize("spec", named(IN_LOCKSTEP))
def test_healthy_workers_are_left_alone(spec: str) -> None:
    """Comparisons after every step, where members are equal, change no bit."""
    job = make_job(spec, 4, optimizer="adam", epochs=1)
    compared = replace(job, fault_tolerance=replace(job.fault_tolerance, digest_every=1))
    results = []
    for each in (job, compared):
        events: list[Event] = []
        roles = roles_in_order(4, job.traits.servers)
        constant_run(roles, job_program(each), events.append, ConstantCluster()).play()
        assert not found_in(events)
        results.append(result_of(events)["parameters_sha256"])
    assert results[0] == results[1]


@pytest.mark.parametrize("optimizer", ["kfac", "adascale", "lamb"])
def test_optimizers_of_all_workers_hold_equal_bits(optimizer: str) -> None:
    events, vectors = trained(job_of("synchronous", 3, every=1, optimizer=optimizer))
    assert not found_in(events)
    assert same_bits(vectors)


def test_a_repair_and_a_failure_at_once() -> None:
    for at_s in (0.19, 0.2, 0.205, 0.21, 0.22):
        faults = f"flip(rank=2, after_step=12); kill(rank=1, at_s={at_s}, restart_after_s=0.001)"
        events, vectors = trained(job_of("synchronous", 4), faults)
        assert found_in(events)
        assert same_bits(vectors)


def test_workers_that_differ_again_after_their_return_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two hosts do that round differently: nothing would ever be done."""
    drawn = count()
    monkeypatch.setattr(digests, "digest_of", lambda tensors: next(drawn))
    with pytest.raises(RunError, match=r"workers 0 and 1 differ after step 0, .*digest_every 0"):
        trained(job_of("synchronous", 2))
