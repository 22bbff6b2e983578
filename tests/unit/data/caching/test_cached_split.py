import os
import pickle

import pytest
import torch
from torch import Tensor

from polyrhythm.data.cached_split import CachedSplit, CacheLimit, CachePlan, placed, use_of
from polyrhythm.data.dataset import TensorSplit
from polyrhythm.data.loader import Loader, Share
from polyrhythm.data.resized import WindowSplit

IMAGES, ROW_BYTES = 10, 3 * 4 * 4


class Counting(TensorSplit):
    """Bytes in memory that count how often each was decoded."""

    def __init__(self) -> None:
        pixels = torch.randint(
            256, (IMAGES, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
        )
        super().__init__(pixels, torch.arange(IMAGES) % 3, 100.0, 50.0)
        self.decoded_of = torch.zeros(IMAGES, dtype=torch.int64)

    def decoded(self, indices: Tensor) -> Tensor:
        self.decoded_of[indices] += 1
        return super().decoded(indices)


def cached(room: int, *, shared: bool = False, processes: int = 1) -> tuple[Counting, CachedSplit]:
    split = Counting()
    plan = CachePlan(limit=CacheLimit(room * ROW_BYTES), processes=processes, shared=shared)
    made = CachedSplit(split, plan)
    split.decoded_of.zero_()  # of the example that tells how large an image is
    return split, made


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("room", [0, 1, 6, IMAGES, 50])
def test_images_are_the_same_from_memory_as_decoded(room: int, shared: bool) -> None:
    split, made = cached(room, shared=shared)
    for seed in range(4):
        indices = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(seed))[:7]
        assert torch.equal(made.images(indices), Counting().images(indices))
    assert made.images(torch.empty(0, dtype=torch.int64)).shape == (0, 3, 4, 4)
    assert torch.equal(made.labels, split.labels)
    assert len(made) == IMAGES


def test_each_image_that_fits_is_decoded_once() -> None:
    split, made = cached(6, shared=True)
    for _ in range(3):
        made.images(torch.arange(IMAGES))
    assert split.decoded_of.tolist() == [1] * 6 + [3] * 4
    use = made.use()
    assert (use.images, use.hits, use.kept_bytes) == (30, 12, 6 * ROW_BYTES)
    assert made.use().images == 0


def test_processes_apart_share_the_limit_out() -> None:
    _, made = cached(6, processes=3)
    made.images(torch.arange(IMAGES))
    assert made.use().kept_bytes == 2 * ROW_BYTES


def test_forked_processes_fill_one_cache() -> None:
    split, made = cached(IMAGES, shared=True)
    made.images(torch.arange(0, 4))
    child = os.fork()
    if child == 0:
        made.images(torch.arange(2, 8))
        os._exit(0 if int(made.use().hits) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    split.decoded_of.zero_()
    assert torch.equal(made.images(torch.arange(IMAGES)), Counting().images(torch.arange(IMAGES)))
    assert split.decoded_of.tolist() == [0] * 8 + [1] * 2


def test_a_copy_in_another_process_begins_with_an_empty_cache() -> None:
    _, made = cached(IMAGES, shared=True, processes=2)
    made.images(torch.arange(IMAGES))
    copy = pickle.loads(pickle.dumps(made))
    assert torch.equal(copy.images(torch.arange(3)), made.images(torch.arange(3)))
    assert copy.use().hits == 0
    copy.images(torch.arange(IMAGES))
    copy.use()
    copy.images(torch.arange(IMAGES))
    assert copy.use().hits == IMAGES // 2  # it has half of the limit


def test_workers_batches_are_those_without_a_cache() -> None:
    _, made = cached(6)
    for epoch in range(2):
        for worker in range(3):
            share = Share(worker, 3, 2, seed=1)
            found = [batch.images for batch in Loader(made, share).epoch(epoch)]
            wanted = [batch.images for batch in Loader(Counting(), share).epoch(epoch)]
            assert len(found) == len(wanted)
            assert all(map(torch.equal, found, wanted))


def test_windows_are_cut_out_of_what_is_kept() -> None:
    split, made = cached(IMAGES)
    windows = placed(WindowSplit(made, 2), torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(windows.images(torch.arange(4)), split.images(torch.arange(4))[..., 1:3, 1:3])
    use = use_of(windows)
    assert use is not None
    assert use.hits == 4
    assert use_of(split) is None


def test_a_cache_stays_where_it_is_wanted() -> None:
    _, made = cached(IMAGES)
    assert made.on(torch.device("cpu")) is made
    elsewhere = made.on(torch.device("meta"))
    assert elsewhere is not made
