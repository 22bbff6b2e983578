"""Which step belongs to which epoch, against counting."""

import pytest

from polyrhythm.data.sharding import batch_images, steps_per_epoch
from polyrhythm.roles.calendar import Calendar


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


def test_epochs_that_are_alike_need_no_starts():
    length = Calendar(53, 3, (4, 4)).length
    assert (length.steps_per_epoch, length.epochs, length.global_batch, length.starts) == (5, 2, 12, ())
    assert [length.nominal(step) for step in (0, 7, 12)] == [0, 7, 12]


def test_the_nominal_place_follows_the_images():
    length = Calendar(48, 1, (4, 8, 24)).length  # 12, 6 and 2 steps
    assert (length.total_steps, length.nominal_steps) == (20, 36)
    found = [length.nominal(step) for step in (0, 11, 12, 15, 18, 19, 20)]
    assert found == [0, 11, 12, 18, 24, 30, 36]
