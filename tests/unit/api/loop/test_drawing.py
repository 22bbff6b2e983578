"""Batches that workers of a user's loop draw: each is one worker's, and a fast worker has more of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from polyrhythm.api.loop.shard import DealtLoader, Drawing, Shard, StepWeight, shard_of, stretches
from polyrhythm.errors import RequestError
from unit.api.loop.test_dealing import Member
from unit.api.loop.test_shard import Diary


class Board:
    """Texts by key, as in a store; counts how often somebody asked."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.asked = 0

    def post(self, key: str, text: str) -> None:
        self.texts[key] = text

    def post_if_absent(self, key: str, text: str) -> str:
        self.asked += 1
        return self.texts.setdefault(key, text)

    def read(self, key: str) -> str | None:
        return self.texts.get(key)


def drawing(board: Board, worker: int) -> Drawing:
    return Drawing(board, "drawn", worker)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("batches", [0, 1, 2, 33, 1000])
def test_stretches_cover_an_epoch_and_become_shorter(batches: int, workers: int) -> None:
    cut = stretches(batches, workers)
    assert [batch for stretch in cut for batch in stretch] == list(range(batches))
    sizes = [len(stretch) for stretch in cut]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] == max(1, batches // (16 * workers))


@pytest.mark.parametrize("seed", range(10))
def test_each_batch_is_one_workers_whoever_asks_when(seed: int) -> None:
    random, board = Random(seed), Board()
    workers, batches = random.randint(1, 5), random.randrange(300)
    drawn = [drawing(board, worker).stretches(0, batches, workers, again=False) for worker in range(workers)]
    taken: list[int] = []
    there = list(range(workers))
    while there:
        worker = random.choice(there)
        stretch = next(drawn[worker], None)
        if stretch is None:
            there.remove(worker)
        else:
            taken += stretch
    assert sorted(taken) == list(range(batches))
    assert board.asked <= 3 * len(stretches(batches, workers)) + workers


def test_uneven_workers_end_within_a_batch_of_the_slowest() -> None:
    """1000 batches; three workers take 1 s for one, the fourth 5 s: 312.5 s if all speeds add up."""
    board, pace = Board(), [1.0, 1.0, 1.0, 5.0]
    drawn = [drawing(board, worker).stretches(0, 1000, 4, again=False) for worker in range(4)]
    free = [(0.0, worker) for worker in range(4)]
    end_s = 0.0
    while free:
        now_s, worker = heapq.heappop(free)
        if (stretch := next(drawn[worker], None)) is not None:
            heapq.heappush(free, (now_s + len(stretch) * pace[worker], worker))
            end_s = max(end_s, now_s + len(stretch) * pace[worker])
    assert 312.5 <= end_s <= 312.5 + 5
    assert board.asked < 600  # of 1000 batches, by four workers


def test_a_successor_has_what_its_predecessor_had_drawn_and_goes_on() -> None:
    board = Board()
    first, lost = (drawing(board, worker).stretches(0, 100, 2, again=False) for worker in (0, 1))
    had = [next(lost), next(first), next(lost)]
    assert drawing(board, 1).held(0, 100, 2) == len(had[0]) + len(had[2])
    again = drawing(board, 1).stretches(0, 100, 2, again=True)
    assert [next(again), next(again)] == [had[0], had[2]]
    assert next(again).start == had[2].stop
    assert drawing(board, 1).held(1, 100, 2) == 0  # of the next epoch


def loader(board: Board, worker: int, make=None) -> DealtLoader:
    member = Member(worker, 2, [torch.tensor(7)])
    plain = make() if make is not None else DataLoader(TensorDataset(torch.arange(13)), batch_size=2)
    return DealtLoader(plain, member, drawing(board, worker))  # type: ignore[arg-type]


def test_batches_are_those_of_one_worker_and_weigh_by_their_images() -> None:
    board = Board()
    first, second = loader(board, 0), loader(board, 1)
    assert (len(first), len(second)) == (4, 4)  # of seven, in the mean
    one, other = first.epoch(0), second.epoch(0)
    got = [next(one), next(other), next(one), *other]
    assert [(batch[0].tolist(), weight) for batch, weight in got] == [
        ([0, 1], 1.0),
        ([2, 3], 1.0),
        ([4, 5], 1.0),
        ([6, 7], 1.0),
        ([8, 9], 1.0),
        ([10, 11], 1.0),
        ([12], 0.5),
    ]
    assert list(one) == []
    assert (first.share(0), second.share(0)) == (2, 5)


def test_loaders_of_whole_batches_are_drawn_from_as_well() -> None:
    def make() -> DataLoader[tuple[torch.Tensor, ...]]:
        data = TensorDataset(torch.arange(7))
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, drop_last=False))

    board = Board()
    assert [batch[0].tolist() for batch, _ in loader(board, 0, make).epoch(0)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(loader(board, 1, make).epoch(0)) == []


def test_a_successor_leaves_out_the_batches_that_its_predecessor_has_taken() -> None:
    board = Board()
    before = loader(board, 1).epoch(0)
    for _ in range(3):
        next(before)  # it was lost in the third: two steps of it count
    diary = Diary(leaves_out=2)
    shard = Shard(loader(board, 1), StepWeight(), diary)
    assert [batch[0].tolist() for batch in shard] == [[4, 5], [6, 7], [8, 9], [10, 11], [12]]
    assert diary.leaves_out == 0
    assert diary.heard[0] == (2, 3)
    assert diary.ends == [(7, False)]


def test_streams_cannot_be_drawn_from() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2, 3])

    for stream in ([1, 2, 3], DataLoader(Stream())):
        with pytest.raises(RequestError, match="map-style data set only"):
            shard_of(stream, Member(0, 2, []), StepWeight(), Diary(), 0, drawing(Board(), 0))  # type: ignore[arg-type]


def test_a_place_in_the_middle_of_a_drawn_epoch_is_not_saved() -> None:
    shard = Shard(loader(Board(), 0), StepWeight(), Diary(), name="numbers")
    assert shard.state()["epoch"] == 0
    for number, _ in enumerate(shard):
        if number == 1:
            with pytest.raises(
                RequestError, match="a shard of numbers that is drawn has no place of its own"
            ):
                shard.state()
    assert (shard.state()["epoch"], shard.state()["passed"]) == (1, 0)
