import threading
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from polyrhythm.data.dataset import TensorSplit
from polyrhythm.data.dealing import batch_indices, epoch_order
from polyrhythm.data.loader import Batch, Loader, Share
from polyrhythm.errors import RequestError


def numbered(n: int) -> TensorSplit:
    """Image i holds the number i, and so does its label."""
    numbers = torch.arange(n)
    return TensorSplit(numbers.float().view(n, 1, 1, 1).expand(n, 1, 2, 3).clone(), numbers)


def noise(images: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return images + (keys % 1009).view(-1, 1, 1, 1) / 1009


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "polyrhythm-loader" in thread.name]


def same(left: list[Batch], right: list[Batch]) -> bool:
    pairs = list(zip(left, right, strict=True))
    return all(
        (a.epoch, a.step) == (b.epoch, b.step)
        and torch.equal(a.images, b.images)
        and torch.equal(a.labels, b.labels)
        for a, b in pairs
    )


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_batches_are_the_workers_share_in_order(ahead):
    loader = Loader(numbered(23), Share(worker=1, workers=2, batch_size=3, seed=5), ahead=ahead)
    batches = list(loader.epoch(4))
    order = epoch_order(23, 4, 5)
    assert [(batch.epoch, batch.step) for batch in batches] == [(4, step) for step in range(4)]
    for batch in batches:
        indices = batch_indices(order, batch.step, 1, 2, 3)
        assert torch.equal(batch.labels, indices)
        assert torch.equal(batch.images[:, 0, 0, 0], indices.float())
        assert batch.images.shape[1:] == (1, 2, 3)


def test_every_worker_takes_as_many_steps_even_if_one_is_empty():
    loaders = [Loader(numbered(7), Share(worker, 4, 1, seed=0)) for worker in range(4)]
    batches = [list(loader.epoch(0)) for loader in loaders]
    assert [loader.steps_per_epoch for loader in loaders] == [2, 2, 2, 2]
    assert [[len(batch.labels) for batch in worker] for worker in batches] == [[1, 1], [1, 1], [1, 1], [0, 1]]
    assert batches[3][0].images.shape == (0, 1, 2, 3)


@pytest.mark.parametrize("ahead", [0, 2])
def test_resuming_inside_an_epoch_gives_the_same_batches(ahead):
    loader = Loader(numbered(40), Share(0, 2, 4, seed=1), noise, ahead)
    assert same(list(loader.epoch(3, start=2)), list(loader.epoch(3))[2:])


def test_preparing_ahead_changes_nothing():
    share = Share(1, 3, 2, seed=9)
    inline, ahead = (Loader(numbered(31), share, noise, ahead) for ahead in (0, 3))
    assert same(list(inline.epoch(1)), list(ahead.epoch(1)))


def test_a_sample_has_the_same_key_on_every_worker_and_another_in_every_epoch_and_seed():
    def keys(workers, batch_size, epoch=0, seed=0):
        """Gives every sample's key, by the sample's own number."""
        found = {}

        def note(images, keys):
            found.update(zip(images[:, 0, 0, 0].int().tolist(), keys.tolist(), strict=True))
            return images

        for worker in range(workers):
            loader = Loader(numbered(16), Share(worker, workers, batch_size, seed), note)
            assert list(loader.epoch(epoch))
        return found

    alone = keys(1, 16)
    assert len(set(alone.values())) == 16
    assert alone == keys(2, 4) == keys(3, 5)
    for other in (keys(1, 16, epoch=1), keys(1, 16, seed=1)):
        assert not set(alone.values()) & set(other.values())


@pytest.mark.parametrize("ahead", [0, 2])
def test_waiting_for_batches_is_counted_with_the_processor_time_meanwhile(ahead, monkeypatch):
    """Clocks by hand: each batch takes 3 s, of which the process computes 1 s."""
    clocks = SimpleNamespace(perf_counter=count(0, 3).__next__, process_time=count(0, 1).__next__)
    monkeypatch.setattr("polyrhythm.data.loader.time", clocks)
    loader = Loader(numbered(12), Share(0, 1, 4, seed=1), noise, ahead)
    assert len(list(loader.epoch(0))) == 3
    assert loader.waits.taken() == (9, 3)
    assert loader.waits.taken() == (0, 0)


def test_an_exception_in_the_background_surfaces_at_its_batch():
    order = epoch_order(20, 0, 0)

    def fail_at_third(images, _):
        if images[0, 0, 0, 0] == order[4]:
            raise RequestError("cat.jpg cannot be read")
        return images

    batches = Loader(numbered(20), Share(0, 1, 2, seed=0), fail_at_third, ahead=5).epoch(0)
    assert [next(batches).step, next(batches).step] == [0, 1]
    with pytest.raises(RequestError, match="cat"):
        next(batches)
    assert threads() == []


@pytest.mark.parametrize(
    ("workers", "batch_size", "what"), [(1, 0, "batch size 0"), (0, 1, "0 workers"), (1, -4, "-4")]
)
def test_sizes_below_one_are_refused(workers, batch_size, what):
    with pytest.raises(RequestError, match=what):
        Share(0, workers, batch_size, seed=0)


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 21])
@pytest.mark.parametrize(("workers", "together"), [(1, 0), (2, 0), (3, 0), (2, 9)])
def test_batches_gathered_many_at_a_time_are_those_of_their_indices(
    monkeypatch, block_bytes, workers, together
):
    monkeypatch.setattr("polyrhythm.data.loader.BLOCK_BYTES", block_bytes)
    count, size = 53, 4
    pixels = torch.randint(0, 256, (count, 1, 3, 3), dtype=torch.uint8)
    split = TensorSplit(pixels, torch.arange(count), mean=73.0, std=90.0)
    order = epoch_order(count, 2, 7)
    for worker in range(workers):
        loader = Loader(split, Share(worker, workers, size, seed=7, together=together))
        a_step = together or workers * size
        for start in (0, 3, loader.steps_per_epoch - 1, loader.steps_per_epoch):
            batches = list(loader.epoch(2, start))
            assert [batch.step for batch in batches] == list(range(start, loader.steps_per_epoch))
            for batch in batches:
                steps = -(-count // a_step)
                places = range(count * batch.step // steps, count * (batch.step + 1) // steps)
                indices = order[[place for place in places if place % workers == worker]]
                assert torch.equal(batch.labels, indices)
                assert torch.equal(batch.images, split.images(indices))
                assert torch.allclose(
                    batch.images, (pixels[indices].double() - 73).div(90).float(), atol=1e-6
                )


def test_gathering_for_many_workers_takes_no_more_than_its_bound_together(monkeypatch):
    gathered = []

    class Noting(TensorSplit):
        def decoded(self, indices):
            gathered.append(len(indices))
            return super().decoded(indices)

    monkeypatch.setattr("polyrhythm.data.loader.BLOCKS_BYTES", 4000)
    split = Noting(torch.zeros(6000, 1, 5, 4, dtype=torch.uint8), torch.zeros(6000), std=2.0)
    for workers, images in ((1, 200), (4, 50), (50, 5), (400, 5)):
        gathered.clear()
        next(iter(Loader(split, Share(0, workers, 5, seed=0)).epoch(0)))
        assert gathered == [images]
