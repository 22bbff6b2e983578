"""Which step belongs to which epoch, against counting."""

import pytest

from polyrhythm.data.dealing import Begun, batch_images, steps_per_epoch
from polyrhythm.roles.job import Calendar


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 8, 8, 16), (1, 2), (60,), (3, 300)])
@pytest.mark.parametrize("workers", [1, 3])
def test_against_counting(sizes, workers):
    calendar = Calendar(53, workers, sizes)
    step = 0
    for epoch, size in enumerate(sizes):
        assert calendar.start(epoch) == step
        assert calendar.batch_size(epoch) == size
        assert calendar.work(epoch) == size / sizes[0]
        seen, steps = 0, steps_per_epoch(53, workers, size)
        for in_epoch in range(steps):
            assert calendar.epoch_of(step) == epoch
            assert calendar.epochs_done(step) == (
                epoch if not in_epoch else round(epoch + in_epoch / steps, 3)
            )
            for worker in range(workers):
                assert calendar.images(step, worker) == batch_images(53, in_epoch, worker, workers, size)
                seen += calendar.images(step, worker)
            step += 1
        assert seen == 53
    assert calendar.total_steps == calendar.length.total_steps == calendar.start(len(sizes)) == step
    assert calendar.epoch_of(step) == calendar.epochs_done(step) == len(sizes)


def test_an_epoch_that_others_began_has_the_numbers_of_its_last_steps():
    calendar = Calendar(
        53, 2, (4, 4, 4), Begun({1: ((2, 2, 2),)})
    )  # 21 images are seen, 32 left: 4 steps of 8
    assert [calendar.start(epoch) for epoch in range(4)] == [0, 10, 14, 21]
    assert calendar.total_steps == calendar.length.total_steps == 21
    assert [calendar.epoch_of(step) for step in (10, 13, 14)] == [1, 1, 2]
    assert calendar.epochs_done(10) == round(1 + 3 / 7, 3)
    assert sum(calendar.images(step, worker) for step in range(10, 14) for worker in range(2)) == 32
    assert [calendar.length.nominal(step) for step in (10, 14, 21)] == [10, 14, 21]


def test_schedules_of_growing_batches_go_on_at_the_images_that_were_seen():
    usual = Calendar(48, 2, (4, 8)).length
    calendar = Calendar(48, 2, (4, 8), Begun({1: ((1, 1, 1),)}))  # half of the second epoch
    assert [calendar.start(epoch) for epoch in range(3)] == [
        0,
        7,
        9,
    ]  # of 6 and 3 steps, 2 of the latter are left
    assert calendar.length == usual
    assert [calendar.length.nominal(step) for step in (6, 7, 8, 9)] == [6, 8, 10, 12]


def test_what_makes_no_full_step_can_be_left_out():
    calendar = Calendar(53, 2, (4, 8), drop_last=True)
    assert calendar.dealt == (48, 48)
    assert {calendar.images(step, worker) for step in range(6) for worker in range(2)} == {4}
    assert [calendar.start(epoch) for epoch in range(3)] == [0, 6, 9]
    begun = Begun(calendar.begun_with([1, 1]))
    again = Calendar(53, 3, (4, 8), begun, drop_last=True)  # 40 images of the first epoch are left
    assert [again.images_left(epoch) for epoch in range(2)] == [40, 48]
