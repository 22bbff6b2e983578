"""What is left of an epoch that others began, against going through their batches one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.data.dataset import TensorSplit
from polyrhythm.data.dealing import Begun, epoch_order, images_left, left_of, steps_per_epoch
from polyrhythm.data.loader import Loader, Share


def split_of(n: int) -> TensorSplit:
    """Makes pictures whose labels are their numbers."""
    return TensorSplit(torch.zeros(n, 1, 1, 1), torch.arange(n))


def test_an_example() -> None:
    order = torch.arange(100, 113)
    left = left_of(order, [(2, 1)], 2)
    assert left.tolist() == [103, 105, 106, 107, 108, 109, 110, 111, 112]
    assert left_of(order, [(2, 1), (0, 1, 1)], 1).tolist() != left.tolist()
    assert left_of(order, [], 2) is order
    assert images_left(13, [(2, 1)], 2) == 9
    assert images_left(13, [(4, 4)], 2) == images_left(13, [(9, 9)], 2) == 0


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 90),
    batch_size=st.integers(1, 5),
    chain=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), max_size=5),
    last=st.integers(1, 6),
    ahead=st.booleans(),
)
def test_every_image_is_seen_once_however_often_it_is_dealt_out_anew(
    n: int, batch_size: int, chain: list[list[int]], last: int, ahead: bool
) -> None:
    split, seen = split_of(n), []
    begun: tuple[tuple[int, ...], ...] = ()
    for steps in chain:
        for worker, done in enumerate(steps):
            share = Share(worker, len(steps), batch_size, 7, begun=begun)
            batches = Loader(split, share).epoch(3)
            seen += [batch.labels for _, batch in zip(range(done), batches, strict=False)]
        begun = (*begun, tuple(steps))
    left = n - sum(map(len, seen))
    assert images_left(n, begun, batch_size) == left
    for worker in range(last):
        loader = Loader(split, Share(worker, last, batch_size, 7, begun=begun), ahead=int(ahead))
        batches = list(loader.epoch(3))
        assert len(batches) == loader.steps_per_epoch == steps_per_epoch(left, last, batch_size)
        assert [batch.step for batch in batches] == list(range(len(batches)))
        seen += [batch.labels for batch in batches]
    assert sorted(torch.cat(seen).tolist()) == list(range(n))


def test_in_step_what_is_left_is_the_rest_of_the_order() -> None:
    order = epoch_order(53, 1, 5)
    # 53 images in steps of 12 at most: five steps, of 10 or 11
    assert torch.equal(left_of(order, [(2, 2, 2)], 4), order[21:])
    # 32 are left for one worker: eight steps of 4
    assert torch.equal(left_of(order, [(2, 2, 2), (3,)], 4), order[33:])


def test_it_survives_being_written_down() -> None:
    begun = Begun({2: ((1, 1), (0, 3, 1)), 3: ((0, 1),)}, left_out=4)
    assert Begun.from_json(begun.to_json()) == begun
    assert begun.to_json()["epochs"]["2"] == [[1, 1], [0, 3, 1]]
    assert Begun().to_json() == {}
    assert Begun.from_json({}) == Begun()
