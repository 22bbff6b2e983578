"""Worker 0 of workers that go in step is killed in virtual time; its successor musters the others, and leads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conformance.jobs import result_of, with_batch_norm
from polyrhythm.communication.control_message import ControlMessage
from polyrhythm.communication.message import Message
from polyrhythm.errors import RunError
from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLost,
)
from polyrhythm.roles.checkpointing.archive import Archive
from polyrhythm.roles.control_messages import Welcome
from polyrhythm.roles.leading.training_duties import CheckpointCollector
from polyrhythm.simulation.injection.faults.kill import Kill
from polyrhythm.simulation.trials import play, try_seeds
from simulation import lost_leaders
from simulation.lost_leaders import LENGTH, WORKERS, events_of, of
from simulation.trying import trial

EPOCHS = 3
STEPS = EPOCHS * LENGTH
IN_ROUNDS = [
    "local_sgd(steps=3)",
    "post_local_sgd(steps=2)",
    "slowmo(steps=5)",
    "diloco(steps=4)",
    "bmuf",
    "parallel_sgd",
]
IN_TURNS = ["d_psgd", "sgp", "slowmo(steps=3, base=sgp)"]


job_of = partial(lost_leaders.job_of, epochs=EPOCHS)


def epochs_tested(events: list[Event]) -> list[tuple[int, float]]:
    return [(event.epoch, event.test_loss) for event in of(Evaluated, events)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    return events_of(job_of("synchronous", tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.parametrize("moment", [0.4, 3.99, 4.0001, 7.3, 11.99, 12.00005, 12.00015])
def test_a_synchronous_run_has_the_bits_of_one_that_lost_nobody(
    moment: float, undisturbed: list[Event], tmp_path: Path
) -> None:
    job = job_of("synchronous", tmp_path)
    events = events_of(job, f"kill(rank=0, at_s={moment}, restart_after_s=0.7)")
    found, expected = result_of(events), result_of(undisturbed)
    assert (found["workers_lost"], found["workers_joined"]) == (1, 1)
    assert (found["steps"], found["images_not_seen"]) == (STEPS, 0)
    assert found["parameters_sha256"] == expected["parameters_sha256"]
    assert len(of(RunStarted, events)) == len(of(RunEnded, events)) == 1
    assert epochs_tested(events) == epochs_tested(undisturbed)
    assert [event.epoch for event in of(CheckpointSaved, events)] == [1, 2, 3]
    assert Archive(job).load().step == STEPS


def test_worker_0_its_successors_and_others_die(undisturbed: list[Event], tmp_path: Path) -> None:
    faults = [
        "kill(rank=1, at_s=3.30001, restart_after_s=0.1)",
        "kill(rank=0, at_s=3.3, restart_after_s=1)",  # whose successor musters one other, and a newcomer
        "kill(rank=0, at_s=4.30003, restart_after_s=0.5)",  # while workers are collected
        "kill(rank=0, at_s=7, restart_after_s=0)",
        "kill(rank=1, at_s=7.5, restart_after_s=0)",
    ]
    events = events_of(job_of("synchronous", tmp_path), *faults)
    found = result_of(events)
    assert (found["workers_lost"], found["workers_joined"], found["images_not_seen"]) == (5, 5, 0)
    assert sorted(event.worker for event in of(WorkerLost, events)) == [0, 0, 0, 1, 1]
    assert sorted(event.worker for event in of(WorkerJoined, events)) == [0, 0, 0, 1, 1]
    expected = dict(epochs_tested(undisturbed))  # but for rounding, since others took shares of the lost ones
    assert dict(epochs_tested(events)) == pytest.approx(expected, rel=1e-4)
    assert [event.epoch for event in of(CheckpointSaved, events)] == [1, 2, 3]


def test_what_a_worker_missed_stays_known_when_the_leader_is_lost() -> None:
    """With rescaled steps the four images a step of worker 2 are not seen, whoever leads."""
    job = job_of("synchronous")
    job = replace(job, fault_tolerance=replace(job.fault_tolerance, rescale=True))
    events = events_of(job, "kill(rank=2, at_s=2.5)", "kill(rank=0, at_s=5.5, restart_after_s=0.2)")
    assert result_of(events)["images_not_seen"] == 4 * (STEPS - 2)


@pytest.mark.parametrize("spec", [*IN_ROUNDS, *IN_TURNS, "lazy_synchronous"])
def test_every_epoch_is_tested_once_whatever_workers_exchange(spec: str, tmp_path: Path) -> None:
    for number, moment in enumerate([2.5, 4.00002, 12.00001]):
        job = job_of(spec, tmp_path / str(number))
        events = events_of(job, f"kill(rank=0, at_s={moment}, restart_after_s={0.7 * number})")
        found = result_of(events)
        assert (found["workers_lost"], found["workers_joined"], found["steps"]) == (1, 1, STEPS)
        assert len(of(RunStarted, events)) == len(of(RunEnded, events)) == 1
        assert [event.epoch for event in of(Evaluated, events)] == [1, 2, 3]
        assert [event.epoch for event in of(CheckpointSaved, events)] == [1, 2, 3]
        assert Archive(job).load().epoch == EPOCHS


@pytest.mark.parametrize(
    "spec", ["local_sgd(steps=3)", "parallel_sgd", "slowmo(steps=3, base=sgp)", "synchronous"]
)
def test_worker_0_dies_while_it_tests(spec: str, tmp_path: Path) -> None:
    """The others have handed in what they held, and may have gone on; what is saved then can be gone on from."""
    inner = CheckpointCollector.evaluate

    def slowly(collector: CheckpointCollector, *epoch_and_model: Any) -> None:
        collector._world.clock.sleep(0.5)
        inner(collector, *epoch_and_model)

    ends = [f"kill(rank={rank}, at_s=8.2, restart_after_s=0.1)" for rank in range(WORKERS)]
    job = job_of(spec, tmp_path)
    events: list[Event] = []
    with (
        mock.patch.object(CheckpointCollector, "evaluate", slowly),
        pytest.raises(RunError, match="parameters have failed"),
    ):
        events_of(job, "kill(rank=0, at_s=4.3, restart_after_s=0.1)", *ends, heard=events)
    assert [event.epoch for event in of(Evaluated, events)] == [1]
    assert [event.epoch for event in of(CheckpointSaved, events)] == [1]
    again = events_of(replace(job, checkpointing=replace(job.checkpointing, resume=True)))
    assert [event.start_step for event in of(RunStarted, again)] == [LENGTH]
    assert [event.epoch for event in of(Evaluated, again)] == [2, 3]
    assert result_of(again)["steps"] == STEPS


def test_what_nobody_trains_comes_from_a_worker(tmp_path: Path) -> None:
    undisturbed = events_of(job_of("synchronous", tmp_path / "a", with_batch_norm))
    events = events_of(
        job_of("synchronous", tmp_path / "b", with_batch_norm), "kill(rank=0, at_s=6.5, restart_after_s=0.2)"
    )
    assert result_of(events)["parameters_sha256"] == result_of(undisturbed)["parameters_sha256"]
    found, expected = epochs_tested(events), epochs_tested(undisturbed)
    assert found[0] == expected[0]
    assert found[-1] != expected[-1], "one worker's statistics of the first steps are another's"
    assert found[-1][1] == pytest.approx(expected[-1][1], rel=0.2)


def test_a_newcomer_is_let_in_when_its_leader_knows_what_nobody_trains() -> None:
    """Both have come at once, and only worker 2 has seen pictures."""
    given = []

    def noted(welcome: Welcome) -> Message:
        if welcome.time_s:  # else it is given to all at the start
            given.extend(
                value.clone() for name, value in welcome.untrained.items() if name.endswith("running_mean")
            )
        return ControlMessage.message(welcome)

    with mock.patch.object(Welcome, "message", noted):
        dead = [f"kill(rank={rank}, at_s=6.5, restart_after_s=0)" for rank in (0, 1)]
        result = result_of(events_of(job_of("synchronous", None, with_batch_norm), *dead))
    assert (result["workers_lost"], result["workers_joined"], result["steps"]) == (2, 2, STEPS)
    assert given
    assert all(bool(value.any()) for value in given)


def test_if_all_are_lost_the_run_ends_with_the_cause() -> None:
    faults = [f"kill(rank={rank}, at_s=5.5, restart_after_s=0.1)" for rank in range(WORKERS)]
    with pytest.raises(
        RunError, match=r"^worker 0 was killed .* all workers with the parameters have failed"
    ):
        events_of(job_of("synchronous"), *faults)


ALSO = {
    "": (),
    "its successor": ((0, 0.004),),
    "another a moment later": ((1, 0.001),),
    "another at once": ((2, 0.0),),
}


@pytest.mark.parametrize("also", ALSO)
@pytest.mark.parametrize("spec", ["synchronous", "local_sgd(steps=3)", "d_psgd", "lazy_synchronous"])
def test_worker_0_may_die_at_any_time_with_others(spec: str, also: str) -> None:
    for seed in range(3):
        at_s = 0.02 + 0.0251 * seed
        deaths = [(0, 0.0), *ALSO[also]]
        faults = tuple(
            Kill(rank=rank, at_s=at_s + later_s, restart_after_s=0.003 * seed) for rank, later_s in deaths
        )
        assert try_seeds(trial(spec, steps=8, faults=faults), [seed]).failures == ()


def test_deaths_after_the_last_step_leave_nobody_waiting() -> None:
    """Worker 0 is killed while the others leave, and one that had handed in its final state just after it."""
    whole: list[Event] = []
    tried = trial("local_sgd(steps=2)", steps=5, faults=())
    play(tried, 1, whole.append)
    for after_s in [0.0095 + number * 1e-4 for number in range(20)]:
        moments = (whole[-1].time_s + after_s, whole[-1].time_s + after_s + 2e-4)
        kills = tuple(Kill(rank=rank, at_s=at_s, restart_after_s=0.0) for rank, at_s in enumerate(moments))
        heard: list[Event] = []
        play(replace(tried, faults=kills), 1, heard.append)  # raises where ranks wait for each other
        assert of(RunEnded, heard)
