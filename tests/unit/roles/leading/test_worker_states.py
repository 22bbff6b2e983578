"""The workers' states, as the leader has them."""

from __future__ import annotations

from polyrhythm.events import Event, WorkerJoined, WorkerLost, WorkerProgress
from polyrhythm.roles.checkpointing.worker_state import Account, WorkerState
from polyrhythm.roles.leading.leader import WorkerStates
from polyrhythm.roles.ledger import Attendance

RANKS = (0, 2, 4)


def state_of(worker: int, *, final: bool = False) -> WorkerState:
    return WorkerState(Account(worker, 5, 5, 0, 0, 0.0, 0, {}, final=final), {}, {}, {})


def roll() -> tuple[WorkerStates, Attendance, list[Event]]:
    said: list[Event] = []
    attendance = Attendance(len(RANKS))
    return WorkerStates(RANKS, attendance, said.append), attendance, said


def test_a_loss_takes_the_workers_state_along_and_is_said_with_its_last_step() -> None:
    workers, attendance, said = roll()
    for worker in (2, 0):
        workers.take(state_of(worker))
    attendance.note(
        WorkerProgress(
            time_s=1, worker=2, epoch=0, step=7, steps=7, images=28, loss=0.0, learning_rate=0.1, wait_s=0.0
        )
    )
    workers.lose(2)
    assert said == [WorkerLost(time_s=0, worker=2, rank=4, step=7)]
    assert [state.account.worker for state in workers.in_order] == [0]
    assert attendance.present == {0, 1}


def test_who_is_known_is_entered_without_a_word() -> None:
    workers, attendance, said = roll()
    workers.see(1, 0)
    assert (said, attendance.present) == ([], {0, 1, 2})


def test_the_second_successor_says_that_two_are_lost() -> None:
    workers, attendance, said = roll()
    workers.take(state_of(1))
    workers.see(1, 2)
    loss = WorkerLost(time_s=0, worker=1, rank=2, step=0)
    assert said == [loss, loss, WorkerJoined(time_s=0, worker=1, rank=2)]
    assert (attendance.lost, attendance.joined, workers.states) == (2, 1, {})


def test_last_words_are_told_from_others() -> None:
    workers, _, _ = roll()
    workers.take(state_of(0))
    workers.take(state_of(1, final=True))
    assert [workers.is_final(worker) for worker in range(3)] == [False, True, False]
