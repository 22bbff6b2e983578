import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.data.dealing import batch_indices, epoch_order, steps_per_epoch

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
        assert alone.tolist() == order.tolist()[step * workers * batch_size :][: workers * batch_size]
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@given(**SIZES)
def test_all_steps_but_the_last_are_full(n, workers, batch_size):
    order = epoch_order(n, epoch=0, seed=0)
    for step in range(steps_per_epoch(n, workers, batch_size) - 1):
        assert all(
            len(batch_indices(order, step, worker, workers, batch_size)) == batch_size
            for worker in range(workers)
        )


def test_the_table_of_the_documentation():
    order = torch.arange(14)
    dealt = [[batch_indices(order, step, worker, 3, 2).tolist() for worker in range(3)] for step in range(3)]
    assert dealt == [
        [[0, 3], [1, 4], [2, 5]],
        [[6, 9], [7, 10], [8, 11]],
        [[12], [13], []],
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
