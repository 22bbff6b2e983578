"""Dealing a loader's batches out: tables by hand, and the plain loader with a batch size N times as large."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from polyrhythm.api.loop.random_state import RandomStateToRestore, random_state
from polyrhythm.api.loop.shard import DealtLoader, Seat
from polyrhythm.errors import RequestError


@dataclass
class Member:
    """One worker's place in a group whose broadcasts carry what worker 0 had."""

    rank: int
    size: int
    heard: list[Tensor]
    told: dict[str, str] = field(default_factory=dict)

    def first(self, what: str, text: str) -> str:
        return self.told.setdefault(what, text)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.rank == root:
            self.heard.append(tensor.clone())
        else:
            tensor.copy_(self.heard.pop(0))


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def deal(workers: int, make: Any, parts: tuple[float, ...] = ()) -> list[DealtLoader]:
    """Makes all workers' loaders, each from a loader of its own, as in separate processes."""
    heard: list[Tensor] = []
    told: dict[str, str] = {}
    dealt = [DealtLoader(make(), Member(0, workers, heard, told), parts=parts)]  # type: ignore[arg-type]
    for rank in range(1, workers):
        member = Member(rank, workers, list(heard), told)
        dealt.append(DealtLoader(make(), member, parts=parts))  # type: ignore[arg-type]
    return dealt


def seen(loader: DealtLoader, epoch: int = 0) -> list[tuple[list[int], float]]:
    return [(batch[0].tolist(), weight) for batch, weight in loader.epoch(epoch)]


def test_the_table_of_the_module() -> None:
    dealt = deal(3, lambda: DataLoader(numbers(14), batch_size=2))
    assert [seen(loader) for loader in dealt] == [
        [([0, 3], 1.0), ([6, 9], 1.0), ([12], 0.5)],
        [([1, 4], 1.0), ([7, 10], 1.0), ([13], 0.5)],
        [([2, 5], 1.0), ([8, 11], 1.0), ([12], 0.0)],
    ]
    assert [len(loader) for loader in dealt] == [3, 3, 3]


def test_parts_by_weight() -> None:
    dealt = deal(3, lambda: DataLoader(numbers(14), batch_size=2), (3, 2, 1))
    assert [seen(loader) for loader in dealt] == [
        [([0, 1, 2], 1.5), ([6, 7, 8], 1.5), ([12], 0.5)],
        [([3, 4], 1.0), ([9, 10], 1.0), ([13], 0.5)],
        [([5], 0.5), ([11], 0.5), ([12], 0.0)],
    ]
    dealt = deal(2, lambda: DataLoader(numbers(12), batch_size=4), (3, 1))
    assert [seen(loader) for loader in dealt] == [
        [([0, 1, 2, 3, 4, 5], 1.5), ([8, 9, 10], 0.75)],
        [([6, 7], 0.5), ([11], 0.25)],
    ]
    assert [len(loader) for loader in dealt] == [2, 2]


def test_parts_are_equal_while_a_worker_is_absent() -> None:
    first, *_ = deal(3, lambda: DataLoader(numbers(8), batch_size=2), (4, 1, 1))
    first.seat = Seat(0, 2)
    assert seen(first) == [([0, 2], 1.0), ([4, 6], 1.0)]


def test_whole_batches_have_no_parts_by_weight() -> None:
    data = numbers(12)
    with pytest.raises(RequestError, match="weights are for a DataLoader with a batch_size"):
        deal(
            2, lambda: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)), (2, 1)
        )


def test_a_ragged_last_step_is_dropped_if_the_loader_drops_it() -> None:
    dealt = deal(3, lambda: DataLoader(numbers(14), batch_size=2, drop_last=True))
    assert [seen(loader) for loader in dealt] == [
        [([0, 3], 1.0), ([6, 9], 1.0)],
        [([1, 4], 1.0), ([7, 10], 1.0)],
        [([2, 5], 1.0), ([8, 11], 1.0)],
    ]
    assert len(dealt[0]) == 2


def test_those_who_are_left_share_an_epoch_out_among_themselves() -> None:
    _, second, third = deal(3, lambda: DataLoader(numbers(10), batch_size=2))
    second.seat, third.seat = Seat(0, 2), Seat(1, 2)
    assert [seen(second, 1), seen(third, 1)] == [
        [([0, 2], 1.0), ([4, 6], 1.0), ([8], 0.5)],
        [([1, 3], 1.0), ([5, 7], 1.0), ([9], 0.5)],
    ]
    assert (len(second), len(third)) == (3, 3)


def test_a_successor_loads_only_what_is_left_of_its_share() -> None:
    loaded: list[int] = []

    class Noted(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            loaded.append(index)
            return super().__getitem__(index)

    _, second = deal(2, lambda: DataLoader(Noted(torch.arange(13)), batch_size=2))
    second.seat = Seat(1, 2, taken=2)
    assert seen(second) == [([9, 11], 1.0), ([12], 0.0)]
    assert loaded == [9, 11, 12]


@pytest.mark.parametrize("loading_processes", [0, 1])
def test_a_seeded_shuffle_is_that_of_one_worker_with_the_whole_batch_size(loading_processes: int) -> None:
    gc.collect()  # stores that other tests have left must not be torn down in a forked process

    def make(batch_size: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(7)
        return DataLoader(
            numbers(45), batch_size, shuffle=True, generator=generator, num_workers=loading_processes
        )

    plain = make(10)
    dealt = deal(2, lambda: make(5))
    orders = []
    for epoch in range(2):
        whole = [sorted(batch[0].tolist()) for batch in plain]
        shares = [seen(loader, epoch) for loader in dealt]
        assert [sorted(a + b) for (a, _), (b, _) in zip(*shares, strict=True)] == whole
        assert [weight for _, weight in shares[1]] == [1, 1, 1, 1, 2 / 5]
        orders.append(whole)
    assert orders[0] != orders[1]


def test_a_shuffle_from_the_global_generator_is_the_same_on_all_and_new_each_epoch() -> None:
    seeds = iter([11, 22])

    def make() -> DataLoader[Any]:
        torch.manual_seed(next(seeds))  # separate processes have different global generators
        return DataLoader(numbers(32), batch_size=4, shuffle=True)

    first, second = deal(2, make)
    epochs = []
    for epoch in range(2):
        torch.manual_seed(epoch)
        one = seen(first, epoch)
        torch.manual_seed(100)
        before = torch.get_rng_state()
        two = seen(second, epoch)
        assert torch.equal(torch.get_rng_state(), before)
        assert sorted(number for batch, _ in one + two for number in batch) == list(range(32))
        epochs.append([batch for batch, _ in one])
    assert epochs[0] != epochs[1]
    assert [batch for batch, _ in seen(first, 0)] == epochs[0]  # an epoch is a function of its number


class RestoringSampler(Sampler[int]):
    """Draws an order while another thread begins to restore the state of the global generators."""

    def __init__(self) -> None:
        saved = RandomStateToRestore(random_state(torch.device("cpu")), torch.device("cpu"))
        self.thread = Thread(target=saved.restore)

    def __iter__(self) -> Iterator[int]:
        self.thread.start()
        self.thread.join(0.2)  # in vain: it has to wait until the order is drawn
        yield from RandomSampler(range(32))

    def __len__(self) -> int:
        return 32


def test_an_order_does_not_depend_on_a_state_that_another_thread_restores() -> None:
    restoring = RestoringSampler()
    samplers: Iterator[Sampler[int]] = iter([RandomSampler(range(32)), restoring])
    orders = [seen(loader) for loader in deal(2, lambda: DataLoader(numbers(32), 4, sampler=next(samplers)))]
    restoring.thread.join()
    assert sorted(number for order in orders for batch, _ in order for number in batch) == list(range(32))


def test_a_weighted_sampler_keeps_its_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 1.0])
    dealt = deal(2, lambda: DataLoader(numbers(4), 5, sampler=WeightedRandomSampler(weights.tolist(), 40)))
    counted = Counter(number for loader in dealt for batch, _ in seen(loader) for number in batch)
    assert set(counted) == {1, 3}
    assert counted.total() == 40


def test_batches_of_a_batch_sampler_are_taken_in_turns() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(numbers(14), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7], [8]])

    dealt = deal(2, make)
    assert [seen(loader) for loader in dealt] == [
        [([0, 1, 2], 1.0), ([4, 5], 2 / 3), ([8], 1 / 3)],
        [([3], 1 / 3), ([6, 7], 2 / 3), ([8], 0.0)],
    ]
    assert len(dealt[0]) == 3


def test_a_sampler_of_whole_batches_without_collation_is_taken_in_turns() -> None:
    def make() -> DataLoader[Any]:
        sampler = BatchSampler(SequentialSampler(range(9)), 2, drop_last=False)
        return DataLoader(numbers(9), batch_size=None, sampler=sampler)

    dealt = deal(2, make)
    assert [seen(loader) for loader in dealt] == [
        [([0, 1], 1.0), ([4, 5], 1.0), ([8], 0.5)],
        [([2, 3], 1.0), ([6, 7], 1.0), ([8], 0.0)],
    ]


def test_a_last_step_of_less_than_two_images_a_worker_shares_those_of_the_step_before() -> None:
    """34 images: 32 and 2 would leave each of two workers one image, which a batch norm cannot be trained on."""
    dealt = deal(2, lambda: DataLoader(numbers(34), batch_size=16))
    assert [[len(batch) for batch, _ in seen(loader)] for loader in dealt] == [[9, 9], [8, 8]]
    shares = [seen(loader) for loader in dealt]
    assert sorted(number for share in shares for batch, _ in share for number in batch) == list(range(34))
    assert [weight for _, weight in shares[0]] == [9 / 16, 9 / 16]
    three = deal(3, lambda: DataLoader(numbers(30 + 5), batch_size=5))
    assert [[len(batch) for batch, _ in seen(loader)] for loader in three] == [
        [5, 4, 4],
        [5, 3, 3],
        [5, 3, 3],
    ]


def test_what_is_left_of_such_an_epoch_is_dealt_once() -> None:
    """Saved after each number of steps, also of unequal ones; resumed by one worker more."""
    for handed in ([0, 0], [1, 1], [2, 2], [1, 0], [2, 1]):
        dealt = deal(2, lambda: DataLoader(numbers(34), batch_size=16))
        taken = [
            number
            for loader, steps in zip(dealt, handed, strict=True)
            for batch, _ in seen(loader)[:steps]
            for number in batch
        ]
        state = dealt[0].chance(under_way=True) | {
            "epoch": 0,
            "before": 0,
            "passed": dealt[0].passed(handed[0]),
        }
        if len(set(handed)) > 1:
            state["handed_to_each"] = handed
        for loader in (others := deal(3, lambda: DataLoader(numbers(34), batch_size=16))):
            loader.seat = loader.seat._replace(passed=loader.resume(state, None))  # type: ignore[arg-type]
        left = [number for loader in others for batch, weight in seen(loader) if weight for number in batch]
        assert sorted(taken + left) == list(range(34))


def test_an_evaluation_leaves_out_what_another_worker_has() -> None:
    dealt = deal(2, lambda: DataLoader(numbers(13), batch_size=2))
    shares = [
        [batch[0].tolist() for batch, _ in loader.epoch(0, leaves_repeats_out=True)] for loader in dealt
    ]
    assert shares == [[[0, 2], [4, 6], [8, 10], [12]], [[1, 3], [5, 7], [9, 11]]]


class Drawing(Sampler[int]):
    """Draws an order as a user's own sampler does."""

    def __init__(self, draw: Callable[[list[int]], object], count: int = 40) -> None:
        self._draw = draw
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._count))
        self._draw(order)
        return iter(order)


@pytest.mark.parametrize("draw", [random.shuffle, np.random.shuffle])
def test_a_sampler_that_draws_from_a_global_generator_draws_alike_on_all(draw: Any) -> None:
    seeds = iter([1, 2])

    def make() -> DataLoader[Any]:
        return DataLoader(numbers(40), 5, sampler=Drawing(draw))

    random.seed(next(seeds))
    np.random.seed(3)
    before = random.getstate()
    dealt = deal(2, make)
    orders = []
    for epoch in range(2):
        shares = [seen(loader, epoch) for loader in dealt]
        assert sorted(number for share in shares for batch, _ in share for number in batch) == list(range(40))
        orders.append(shares)
    assert orders[0] != orders[1]
    assert random.getstate() == before


def test_an_order_that_differs_between_workers_is_refused() -> None:
    generators = iter([random.Random(1), random.Random(2)])
    first, second = deal(2, lambda: DataLoader(numbers(40), 5, sampler=Drawing(next(generators).shuffle)))
    seen(first)
    with pytest.raises(
        RequestError, match=r"^group\.shard: worker 1 has another order of samples in epoch 0 than worker 0"
    ):
        seen(second)


def test_data_of_another_length_are_refused() -> None:
    counts = iter([40, 41])
    first, second = deal(2, lambda: DataLoader(numbers(next(counts)), 5))
    seen(first)
    with pytest.raises(RequestError, match=r"\(41 and 40 samples\)"):
        seen(second)


def test_generators_of_the_loader_agree_whatever_one_worker_has_drawn_besides() -> None:
    """As a worker that tests more than others, or the successor of a lost one, whose generator is an epoch behind."""

    def make() -> DataLoader[Any]:
        return DataLoader(numbers(40), 5, shuffle=True, generator=torch.Generator().manual_seed(1))

    first, second = deal(2, make)
    seen(first, 0)
    shares = [seen(first, 1), seen(second, 1)]
    assert sorted(number for share in shares for batch, _ in share for number in batch) == list(range(40))


def test_the_other_settings_of_the_loader_stay() -> None:
    dealt = deal(
        2,
        lambda: DataLoader(numbers(8), 2, collate_fn=lambda items: [torch.stack([i[0] for i in items]) * 10]),
    )
    assert seen(dealt[1]) == [([10, 30], 1.0), ([50, 70], 1.0)]


def test_loaders_that_cannot_be_shared_out_are_refused() -> None:
    data = numbers(10)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(RequestError, match="DistributedSampler"):
        deal(2, lambda: DataLoader(data, 2, sampler=sampler))
    with pytest.raises(RequestError, match="do not make one step of 3 workers"):
        deal(3, lambda: DataLoader(data, 4, drop_last=True))


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_tensors_in_memory_make_the_batches_of_the_plain_loader(format: torch.memory_format) -> None:
    images = torch.randn(13, 3, 4, 4).to(memory_format=format)
    data = TensorDataset(images, torch.arange(13, dtype=torch.int32))
    loaders = (DataLoader(data, 4), DataLoader(data, 4, collate_fn=lambda items: default_collate(items)))
    gathered, plain = (
        [batch for batch, _ in deal(2, lambda made=made: made)[1].epoch(0)] for made in loaders
    )
    assert len(gathered) == len(plain) == 2
    for batch, other in zip(gathered, plain, strict=True):
        assert type(batch) is type(other)
        for tensor, same in zip(batch, other, strict=True):
            assert torch.equal(tensor, same)
            assert (tensor.dtype, tensor.stride()) == (same.dtype, same.stride())
