"""The ledger of a run, by hand: what has been said, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    RunStarted,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.roles.ledger import Ledger

STARTED = RunStarted(
    time_s=0.0,
    strategy="ssp",
    data="blobs",
    model="mlp",
    workers=3,
    servers=1,
    epochs=9,
    steps_per_epoch=5,
    start_epoch=2,
    earlier_s=40.0,
)


def _did(worker: int, step: int, time_s: float) -> WorkerProgress:
    return WorkerProgress(
        time_s=time_s, worker=worker, epoch=2, step=step, steps=5, images=20, loss=1.0, learning_rate=0.1
    )


def _tested(epoch: int, time_s: float) -> Evaluated:
    return Evaluated(time_s=time_s, epoch=epoch, test_loss=0.5, test_top1=0.75, test_top5=1.0)


def ledger_of(*events: Event) -> Ledger:
    made = Ledger.of(3)
    for event in events:
        made.note(event, 100.0 + event.time_s)
    return made


def test_before_training_nothing_has_begun() -> None:
    made = ledger_of(Notice(time_s=0.0, text="soon"))
    assert not made.began
    assert made.attendance.present == {0, 1, 2}


def test_a_resumed_run_owes_nothing_to_the_epochs_before() -> None:
    made = ledger_of(STARTED)
    assert (made.began, made.began_at_s, made.earlier_s) == (True, 100.0, 40.0)
    assert (made.tested, made.tested_epochs, made.saved_epochs) == (None, 2, 2)


def test_tests_checkpoints_and_workers_are_entered() -> None:
    made = ledger_of(
        STARTED,
        _did(0, 15, 3.0),
        _did(1, 14, 3.5),
        _tested(3, 3.75),  # which took three quarters of a second of the leader's time
        CheckpointSaved(time_s=3.875, path="a", epoch=3, step=15),
        WorkerLost(time_s=4.0, worker=1, rank=1, step=14),
        WorkerJoined(time_s=5.0, worker=1, rank=1),
        _did(0, 20, 6.0),
        _tested(4, 6.5),
    )
    assert (made.tested_epochs, made.saved_epochs, made.paused_s) == (4, 3, 1.25)
    attendance = made.attendance
    assert (attendance.lost, attendance.joined, attendance.present) == (1, 1, {0, 1, 2})
    assert (attendance.losses(0), attendance.losses(1)) == (0, 1)
    assert (attendance.images_of_lost, attendance.last_step(0)) == (20, 20)


def test_it_travels_as_text_and_what_comes_later_is_not_in_it() -> None:
    made = ledger_of(
        STARTED, _did(2, 7, 1.0), _tested(3, 2.0), WorkerLost(time_s=3.0, worker=2, rank=2, step=7)
    )
    stated = made.copy()
    assert stated.to_json() == made.to_json()
    assert stated.tested == _tested(3, 2.0)
    made.note(WorkerLost(time_s=4.0, worker=1, rank=1, step=0), 104.0)
    assert (stated.attendance.present, stated.attendance.lost) == ({0, 1}, 1)
    assert stated.attendance.lose(0) == 0
    assert made.attendance.present == {0}
    assert replace(stated, began_at_s=1.0).began_at_s == 1.0
