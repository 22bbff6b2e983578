import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.data.dealing import (
    batch_images,
    batch_indices,
    epoch_order,
    images_dealt,
    steps_per_epoch,
)

SIZES = {"n": st.integers(0, 200), "workers": st.integers(1, 9), "batch_size": st.integers(1, 17)}


@given(**SIZES, seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_an_epoch_covers_every_image_once(n, workers, batch_size, seed, epoch):
    order = epoch_order(n, epoch, seed)
    seen = [
        index
        for step in range(steps_per_epoch(n, workers, batch_size))
        for worker in range(workers)
        for index in batch_indices(order, step, worker, workers, batch_size).tolist()
    ]
    assert sorted(seen) == list(range(n))


@given(**SIZES)
def test_all_workers_together_see_the_batch_of_one_worker_of_their_joint_size(n, workers, batch_size):
    order = epoch_order(n, epoch=3, seed=1)
    for step in range(steps_per_epoch(n, workers, batch_size)):
        parts = [batch_indices(order, step, worker, workers, batch_size) for worker in range(workers)]
        alone = batch_indices(order, step, 0, 1, workers * batch_size)
        assert sorted(torch.cat(parts).tolist()) == sorted(alone.tolist())
        steps = steps_per_epoch(n, workers, batch_size)
        assert alone.tolist() == order.tolist()[n * step // steps : n * (step + 1) // steps]
        # whoever reads a stream of its own finds its images there
        assert all(
            order.tolist().index(image) % workers == worker
            for worker, part in enumerate(parts)
            for image in part.tolist()
        )


@given(**SIZES)
def test_batches_of_an_epoch_differ_by_at_most_one_image(n, workers, batch_size):
    order = epoch_order(n, epoch=0, seed=0)
    sizes = [
        [len(batch_indices(order, step, worker, workers, batch_size)) for worker in range(workers)]
        for step in range(steps_per_epoch(n, workers, batch_size))
    ]
    together = [sum(each) for each in sizes]
    batches = [size for each in sizes for size in each]
    assert max(together, default=0) - min(together, default=0) <= 1
    assert max(batches, default=0) - min(batches, default=0) <= 1
    assert max(batches, default=0) <= batch_size
    assert all(
        batch_images(n, step, worker, workers, batch_size) == size
        for step, each in enumerate(sizes)
        for worker, size in enumerate(each)
    )


@given(**SIZES, drop_last=st.booleans(), steps=st.integers(0, 30))
def test_what_an_epoch_deals(n, workers, batch_size, drop_last, steps):
    together, epochs = workers * batch_size, 3
    dealt = images_dealt(n, [together] * epochs, drop_last=drop_last, steps=steps)
    whole = n // together * together if drop_last else n
    assert dealt[:-1] == (whole,) * (epochs - 1)
    each = steps_per_epoch(whole, workers, batch_size)
    if 2 * each < steps <= 3 * each:
        assert 2 * each + steps_per_epoch(dealt[-1], workers, batch_size) == steps
        assert steps == 3 * each or dealt[-1] % together == 0
    if not steps:
        assert dealt[-1] == whole


def test_the_table_of_the_documentation():
    order = torch.arange(14)
    dealt = [[batch_indices(order, step, worker, 3, 2).tolist() for worker in range(3)] for step in range(3)]
    assert dealt == [
        [[0, 3], [1], [2]],
        [[6], [4, 7], [5, 8]],
        [[9, 12], [10, 13], [11]],
    ]


@pytest.mark.parametrize(
    ("n", "workers", "batch_size", "steps"),
    [(60_000, 2, 64, 469), (128, 2, 64, 1), (129, 2, 64, 2), (0, 1, 1, 0)],
)
def test_steps_per_epoch(n, workers, batch_size, steps):
    assert steps_per_epoch(n, workers, batch_size) == steps


def test_the_order_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    first = epoch_order(1000, epoch=2, seed=7)
    torch.manual_seed(2)
    assert torch.equal(epoch_order(1000, epoch=2, seed=7), first)
    others = [epoch_order(1000, epoch=3, seed=7), epoch_order(1000, epoch=2, seed=8), epoch_order(1000, 7, 2)]
    # Two independent shuffles agree in about one place.
    assert all((other == first).sum() < 20 for other in others)


def test_every_place_is_reached_from_everywhere():
    # 2,000 shuffles of 5: each of the 25 (image, place) pairs is hit 400 ± 18 times if they are uniform.
    hits = torch.zeros(5, 5)
    for epoch in range(2000):
        hits[torch.arange(5), epoch_order(5, epoch, seed=0)] += 1
    assert (hits - 400).abs().max() < 90
