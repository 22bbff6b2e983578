"""The leader's list of workers, by hand."""

from __future__ import annotations

from polyrhythm.events import WorkerProgress
from polyrhythm.roles.ledger import Attendance


def _did(worker: int, step: int, steps: int, images: int) -> WorkerProgress:
    return WorkerProgress(
        time_s=1.0, worker=worker, epoch=0, step=step, steps=steps, images=images, loss=1.0, learning_rate=0.1
    )


def test_what_the_lost_had_done_is_kept_and_its_successor_counts_anew() -> None:
    made = Attendance(3)
    for event in (_did(1, 5, 5, 20), _did(2, 3, 3, 12), _did(1, 9, 4, 15)):
        made.note(event)
    assert made.lose(1) == 9
    assert made.present == {0, 2}
    assert (made.lost, made.joined, made.steps_of_lost, made.images_of_lost) == (1, 0, 9, 35)
    made.join(1)
    made.note(_did(1, 11, 1, 4))
    assert made.present == {0, 1, 2}
    assert made.lose(1) == 11
    assert (made.lost, made.joined, made.steps_of_lost, made.images_of_lost) == (2, 1, 10, 39)


def test_one_who_never_spoke_has_done_nothing() -> None:
    made = Attendance(2)
    assert made.lose(1) == 0
    assert made.last_step(1) == 0
    assert (made.steps_of_lost, made.images_of_lost) == (0, 0)
