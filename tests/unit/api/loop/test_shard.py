"""A worker's share of a stream, epochs, and how much a step counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from polyrhythm.api.loop.shard import EveryNth, Seat, Shard, StepWeight


class Weighted:
    """Batches 0, 1, 2 of every epoch, with weights 1, 1 and 0.5."""

    seat = Seat(0, 1)
    draws = False

    def __len__(self) -> int:
        return 3

    def share(self, epoch: int) -> int:
        return 3

    def epoch(self, epoch: int, *, leaves_repeats_out: bool = False) -> Iterator[tuple[Any, float]]:
        yield from [((epoch, 0), 1.0), ((epoch, 1), 1.0), ((epoch, 2), 0.5)]


class Diary:
    """A host that notes what it hears."""

    def __init__(self, leaves_out: int = 0) -> None:
        self.heard: list[tuple[int, int]] = []
        self.seats: list[tuple[int, int]] = []
        self.ends: list[tuple[int, bool]] = []
        self.leaves_out = leaves_out

    def seat(self, shard: int, epoch: int) -> Seat:
        self.seats.append((shard, epoch))
        return Seat(0, 1, self.leaves_out)

    def left_out(self, batches: int) -> None:
        self.leaves_out -= batches

    def rest(self) -> None:
        pass

    def took(self, taken: int, of: int, batch: Any) -> None:
        self.heard.append((taken, of))

    def through(self, of: int, *, broken_off: bool) -> None:
        self.ends.append((of, broken_off))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


@pytest.mark.parametrize(("worker", "last"), [(0, (9, 1.0)), (1, (10, 1.0)), (2, (10, 0.0))])
def test_each_takes_every_nth_and_the_last_comes_again_for_whom_none_is_left(
    worker: int, last: tuple[int, float]
) -> None:
    share = EveryNth(range(11), worker, 3)
    whole = [(worker, 1.0), (worker + 3, 1.0), (worker + 6, 1.0)]
    assert list(share.epoch(0)) == [*whole, last]
    assert len(share) == 4
    tested = [last] if last[1] else []
    assert list(share.epoch(0, leaves_repeats_out=True)) == [*whole, *tested]


def test_a_stream_is_shared_out_among_those_who_are_left() -> None:
    share = EveryNth(range(11), 2, 3)
    share.seat = Seat(1, 2, taken=3)
    assert list(share.epoch(0)) == [(7, 1.0), (9, 1.0), (10, 0.0)]
    assert len(share) == 6


def test_iterable_data_sets_are_streams_of_batches() -> None:
    share = EveryNth(DataLoader(Stream(), batch_size=2), 1, 2)
    assert [batch.tolist() for batch, _ in share.epoch(0)] == [[2, 3], [6, 7], [10]]
    with pytest.raises(TypeError, match="len"):
        len(EveryNth(iter([1, 2]), 0, 1))


@pytest.mark.parametrize(("leaves_out", "rest"), [(2, 0), (3, 0), (1 << 62, (1 << 62) - 3)])
def test_what_a_share_is_too_short_to_leave_out_is_for_the_next_one(leaves_out: int, rest: int) -> None:
    diary = Diary(leaves_out)
    shard = Shard(EveryNth(range(3), 0, 1), StepWeight(), diary)
    assert list(shard) == list(range(min(leaves_out, 3), 3))
    assert diary.leaves_out == rest


def test_a_step_weighs_the_mean_of_its_batches() -> None:
    weight = StepWeight()
    shard = Shard(Weighted(), weight, Diary())
    taken = []
    for _, step in shard:
        if step != 1:  # the second step has two batches
            taken.append(weight.take())
    assert taken == [1.0, 0.75]
    assert weight.take() == 1.0


def test_a_validation_pass_inside_an_epoch_does_not_count() -> None:
    weight = StepWeight()
    training, validation = (Shard(Weighted(), weight, Diary()) for _ in range(2))
    taken = []
    for _, step in training:
        if step == 2:
            for _, seen in validation:
                if seen == 1:
                    break
        taken.append(weight.take())
    assert taken == [1.0, 1.0, 0.5]
