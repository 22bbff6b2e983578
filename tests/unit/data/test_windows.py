"""Windows of larger pictures, from files to batches."""

from io import BytesIO
from pathlib import Path
from tarfile import TarInfo
from tarfile import open as open_tar

import numpy as np
import pytest
import torch
from PIL import Image

from polyrhythm.augmentation.chain import build_chain
from polyrhythm.data.image_files import ImageFileSplit
from polyrhythm.data.images import NORMALIZATIONS
from polyrhythm.data.loader import Loader, Share
from polyrhythm.data.open import open_data
from polyrhythm.data.resized import WindowSplit
from polyrhythm.data.seeding import sample_keys
from polyrhythm.data.shards import Streamed
from polyrhythm.errors import RequestError

LANDSCAPE = (90, 60)


def picture(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(LANDSCAPE, Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(8):
        part = "test" if number > 5 else "train"
        path = tmp_path / part / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
    return tmp_path


def by_pillow(seed: int, scale: int) -> torch.Tensor:
    """The middle square, scaled, (1, 3, scale, scale) normalized."""
    left = (LANDSCAPE[0] - LANDSCAPE[1]) / 2
    box = (left, 0, left + LANDSCAPE[1], LANDSCAPE[1])
    square = picture(seed).resize((scale, scale), Image.Resampling.BILINEAR, box=box)
    return NORMALIZATIONS["imagenet"](torch.from_numpy(np.array(square))[None])


def test_tests_see_the_middle_of_the_picture_at_its_scale(folder: Path) -> None:
    dataset = open_data(str(folder), image_size=24, scale=40)
    assert dataset.image_shape == (3, 24, 24)
    assert dataset.shown == 24 / 40
    seen = dataset.test.images(torch.tensor([0, 1]))
    for row, seed in enumerate((6, 7)):
        assert torch.equal(seen[row], by_pillow(seed, 40)[0, :, 8:32, 8:32])


def test_training_sees_a_window_anywhere_in_it_and_the_same_for_the_same_epoch(folder: Path) -> None:
    split = open_data(str(folder), image_size=24, scale=40).train
    loader = Loader(split, Share(0, 1, 6, seed=3), build_chain("window(size=24)"))
    (first,), (again,), (other,) = (list(loader.epoch(epoch)) for epoch in (0, 0, 1))
    assert torch.equal(first.images, again.images)
    assert sorted(first.images.flatten(1).sum(1)) != sorted(other.images.flatten(1).sum(1))
    known = {seed: by_pillow(seed, 40)[0] for seed in range(6)}
    for image in first.images:
        windows = [
            whole[:, top : top + 24, left : left + 24]
            for whole in known.values()
            for top in range(17)
            for left in range(17)
        ]
        assert any(torch.equal(image, window) for window in windows)


def test_windows_are_224_of_256_where_nobody_says(folder: Path) -> None:
    assert open_data(str(folder), scale=64).image_shape == (3, 56, 56)


def test_without_a_scale_nothing_changes(folder: Path) -> None:
    assert isinstance(open_data(str(folder), image_size=24).train, ImageFileSplit)


def test_pictures_of_any_data_can_be_scaled_up_and_cut() -> None:
    dataset = open_data("digits", image_size=8, scale=10)
    assert dataset.train.images(torch.tensor([3, 5])).shape == (2, 1, 8, 8)
    assert dataset.train.uncut(torch.tensor([3])).shape == (1, 1, 10, 10)
    assert len(dataset.train.whole(torch.tensor([3]), 20)) == 1


def test_a_window_larger_than_the_scale_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="windows of 48 pixels cannot be cut out of images of scale 40"):
        open_data(str(folder), image_size=48, scale=40)


def test_another_split_of_larger_pictures_is_cut_alike(folder: Path) -> None:
    split = open_data(str(folder), image_size=24, scale=40).train
    assert isinstance(split, WindowSplit)
    indices = torch.arange(6)
    assert torch.equal(split.over(split.larger).images(indices), split.images(indices))


def test_shards_are_read_in_their_order_and_cut(tmp_path: Path) -> None:
    with open_tar(tmp_path / "train-0.tar", "w") as tar:
        for number in range(10):
            buffer = BytesIO()
            picture(number).save(buffer, "PNG")
            for name, content in (
                (f"{number}.png", buffer.getvalue()),
                (f"{number}.cls", b"%d" % (number % 2)),
            ):
                entry = TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, BytesIO(content))
    split = open_data(str(tmp_path / "train-*.tar"), image_size=24, scale=40).train
    assert isinstance(split, Streamed)
    loader = Loader(split, Share(0, 1, 4, seed=0), build_chain("window(size=24)"))
    batch = next(loader.epoch(0))
    order = split.order(0, 0, 1)[:4]
    kept, uncut = split.read(order)
    keys = sample_keys("transform", 0, 0, kept)
    assert uncut.shape == (4, 3, 40, 40)
    assert torch.equal(batch.images, build_chain("window(size=24)")(uncut, keys))
