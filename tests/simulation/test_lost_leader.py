"""Worker 0 is killed in virtual time, at every moment of a run, and a successor of it takes up the lead."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from conformance.jobs import result_of, resumed, with_batch_norm
from polyrhythm.errors import RunError
from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Notice,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLost,
)
from polyrhythm.roles import member
from polyrhythm.roles.checkpointing.archive import Archive
from polyrhythm.roles.leading import leader
from polyrhythm.roles.replica import Replica
from simulation import lost_leaders
from simulation.lost_leaders import LENGTH, WORKERS, events_of, of

EPOCHS = 4
STEPS = EPOCHS * LENGTH
SPECS = [
    "parameter_server",
    "parameter_server(servers=2)",
    "parameter_server(servers=2, replicas=2)",
    "ssp",
    "softsync",
    "backup_workers",
    "staleness_aware",
    "easgd",
    "eamsgd",
    "downpour",
    "periodic_averaging",
    "parameter_server(consistency=synchronous)",
    "ssp(s=0)",
    "easgd(mode=synchronous, tau=2)",
]
MOMENTS = [(0.4, 6.7, 13.1), (2.5, 4.05, 15.9), (1.2, 8.01, 16.3), (5.5, 11.9, 14.2)]


job_of = partial(lost_leaders.job_of, epochs=EPOCHS)


@pytest.mark.parametrize(
    ("spec", "moments"),
    [
        *zip(SPECS, itertools.cycle(MOMENTS), strict=False),
        ("hogwild", (0.4, 5.5, 15.9)),
        ("ad_psgd", (0.4, 5.5, 13.1)),
        ("ad_psgd", (15.9, 8.01, 2.5)),  # of the last step before the test at 8 s nobody else has heard
    ],
)
def test_nothing_is_lost_or_said_twice_whenever_worker_0_dies(
    spec: str, moments: tuple[float, ...], tmp_path: Path
) -> None:
    for number, moment in enumerate(moments):
        job = job_of(spec, tmp_path / str(number))
        events = events_of(job, f"kill(rank=0, at_s={moment}, restart_after_s={0.7 * number:g})")
        found = result_of(events)
        assert (found["workers_lost"], found["workers_joined"]) == (1, 1)
        assert found["steps"] == STEPS
        assert found["messages_refused"] == {}
        if job.traits.servers:  # else a gradient is counted by its own worker, and lost with it
            applied = sum(found["staleness"]["histogram"].values()) / job.traits.shards
            assert 4 * applied + found["images_not_seen"] == EPOCHS * 48
        assert len(of(RunStarted, events)) == len(of(RunEnded, events)) == 1
        assert [event.epoch for event in of(Evaluated, events)] == list(range(1, EPOCHS + 1))
        assert [event.epoch for event in of(CheckpointSaved, events)] == list(range(1, EPOCHS + 1))
        assert Archive(job).load().epoch == EPOCHS


@pytest.mark.parametrize(
    ("moment", "tested_s", "saved_s", "said"),
    [
        (
            4.8,
            6.5,
            7.9,
            False,
        ),  # its last gradient of the epoch is on its way, and lost with it: the step is taken again
        (4.9, 5.4, 5.6, True),  # that one is applied, the answer comes too late
        (5.1, 4.8, 5.8, False),  # it has tested, and waits for the servers' states
        (5.4, 4.8, 6.1, False),  # their states have come, and it has not looked for them since
    ],
)
def test_an_epoch_is_finished_by_whoever_leads_at_its_end(
    moment: float, tested_s: float, saved_s: float, said: bool, tmp_path: Path
) -> None:
    """A message takes 0.1 s, and the fourth step ends 4.8 s after the first has begun.

    The servers' states are looked for after each step, which does not wait for them.
    """
    job = job_of("parameter_server(servers=2, placement=dedicated)", tmp_path)
    events = events_of(job, f"kill(rank=0, at_s={moment}, restart_after_s=0.5)", latency_s=0.1)
    tested, saved = of(Evaluated, events)[0], of(CheckpointSaved, events)[0]
    assert (tested.epoch, tested.time_s) == (1, pytest.approx(tested_s, abs=1e-4))
    assert (saved.epoch, saved.time_s) == (1, pytest.approx(saved_s, abs=1e-4))
    assert [
        event.text.startswith("worker 0 was lost before the model was tested after epoch 1")
        for event in of(Notice, events)
    ] == [True] * said


@pytest.mark.parametrize(
    "spec",
    [
        "parameter_server(servers=2)",
        "easgd",
        "downpour",
        "parameter_server(servers=2, replicas=2)",
        "ad_psgd",
        "hogwild",
    ],
)
def test_worker_0_dies_when_it_is_through_and_waits_for_others(spec: str) -> None:
    slow = "slow(rank=2, factor=2, from_s=0, to_s=1000)"
    events = events_of(job_of(spec), slow, "kill(rank=0, at_s=25, restart_after_s=0.5)")
    found = result_of(events)
    assert [event.step for event in of(WorkerLost, events)] == [STEPS]
    assert (found["workers_joined"], found["images_not_seen"], found["messages_refused"]) == (1, 0, {})
    assert found["seconds"] > 30


@pytest.mark.parametrize(
    ("spec", "moment"),
    [
        ("parameter_server(consistency=synchronous)", 20.4),
        ("easgd(mode=synchronous, tau=2)", 18.5),  # what it left with still waits for the other's
        ("easgd(mode=synchronous, tau=2)", 20.4),
    ],
)
def test_in_lock_step_worker_0_dies_when_it_is_through_and_waits_for_one_behind(
    spec: str, moment: float
) -> None:
    behind = "kill(rank=2, at_s=1.5, restart_after_s=4)"
    events = events_of(job_of(spec), behind, f"kill(rank=0, at_s={moment}, restart_after_s=0.2)")
    found = result_of(events)
    assert [(event.worker, event.step) for event in of(WorkerLost, events)] == [(2, mock.ANY), (0, STEPS)]
    assert (found["workers_joined"], found["images_not_seen"], found["messages_refused"]) == (2, 0, {})


def test_worker_0_and_its_successors_and_others_die() -> None:
    faults = [
        "kill(rank=0, at_s=3.2, restart_after_s=1)",
        "kill(rank=0, at_s=4.5, restart_after_s=0.5)",
        "kill(rank=1, at_s=3.3, restart_after_s=0.2)",  # whose successor waits for one of worker 0
        "kill(rank=2, at_s=4.5, restart_after_s=2)",
    ]
    events = events_of(job_of("ssp"), *faults)
    found = result_of(events)
    assert (found["workers_lost"], found["workers_joined"], found["images_not_seen"]) == (4, 4, 0)
    assert sum(found["staleness"]["histogram"].values()) == WORKERS * STEPS
    assert sorted(event.worker for event in of(WorkerLost, events)) == [0, 0, 1, 2]
    assert sorted(event.worker for event in of(WorkerJoined, events)) == [0, 0, 1, 2]


def test_without_a_successor_the_run_ends_with_the_cause() -> None:
    with pytest.raises(RunError, match=r"worker 0 was killed at 3\.5 s, and the run needs it"):
        events_of(job_of("parameter_server"), "kill(rank=0, at_s=3.5)")


def test_figures_are_of_the_whole_run() -> None:
    job = job_of("parameter_server(placement=dedicated)")
    found = result_of(events_of(job, "kill(rank=0, at_s=8.5, restart_after_s=2)"))
    assert found["seconds"] == pytest.approx(8.5 + 2 + 8, abs=0.01)  # the step under way is taken again
    assert found["images_per_s"] * found["seconds"] == pytest.approx(EPOCHS * 48)
    assert found["test_top1"] > 0.5


def test_a_new_leader_has_the_statistics_of_another_worker() -> None:
    """Its own would be those of an untrained model, with which worker 0's last epoch of four steps is too short."""
    told: list[torch.Tensor] = []

    def load(replica: Replica, untrained: dict[str, torch.Tensor]) -> None:
        told.append(untrained["1.running_mean"].clone())
        original(replica, untrained)

    original = member.load_untrained
    with mock.patch.object(member, "load_untrained", load), mock.patch.object(leader, "load_untrained", load):
        events_of(
            job_of("parameter_server", model=with_batch_norm), "kill(rank=0, at_s=14.5, restart_after_s=0)"
        )
    at_first, by_successor = told[: WORKERS - 1], told[WORKERS - 1 :]
    assert [values.abs().max() for values in at_first] == [0, 0]
    assert len(by_successor) == 1
    assert by_successor[0].abs().max() > 0.01


def test_the_average_of_the_weights_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    job = job_of("parameter_server", tmp_path, weight_average=0.5)
    events_of(job, "kill(rank=0, at_s=9.5, restart_after_s=1)")
    snapshot = Archive(job).load()
    assert (
        snapshot.average["updates"] == STEPS - 1
    )  # the ninth step had been done when the last checkpoint was older


@pytest.mark.parametrize(
    "spec", ["parameter_server(consistency=synchronous)", "easgd(mode=synchronous, tau=2)"]
)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lock_step_run_whose_workers_are_apart_is_resumed(lost: int, spec: str, tmp_path: Path) -> None:
    """Whoever leads waits for none of those who are behind it, and so for an update that needs its own gradient."""
    job = job_of(spec, tmp_path)
    job = replace(job, checkpointing=replace(job.checkpointing, checkpoints=EPOCHS))
    events_of(job, f"kill(rank={lost}, at_s=1.5, restart_after_s=1.2)")
    _, *later = sorted(tmp_path.rglob("step-*"))
    for path in later[1:]:
        path.unlink()
    steps = Archive(job).load().servers[0][1]["steps"]
    assert steps[lost] < steps[2]
    for faults in [(), ("kill(rank=0, at_s=2.5, restart_after_s=0)",)]:
        found = result_of(events_of(resumed(job), *faults))
        assert (found["workers_joined"], found["images_not_seen"]) == (len(faults), 0)
        for path in sorted(tmp_path.rglob("step-*"))[2:]:
            path.unlink()
