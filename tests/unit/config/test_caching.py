from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import polyrhythm
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.cached_split import CachedSplit, use_of
from polyrhythm.data.dataset import TensorSplit
from polyrhythm.data.decoded_files import DecodedFiles
from polyrhythm.data.image_files import ImageFileSplit
from polyrhythm.data.resized import WindowSplit
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import CheckpointConfig, Job

CLASSES, EACH = ("cat", "dog"), 6


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in CLASSES:
            (root / part / name).mkdir(parents=True)
            for number in range(EACH):
                pixels = random.integers(256, size=(12, 14, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def job(pictures: Path, **values: Any) -> Job:
    given = {"data": str(pictures), "image_size": 8, "model": "mlp", "device": "cpu"}
    return assemble(configure(given, values), CheckpointConfig())


def test_image_files_are_kept_in_memory_by_default(pictures: Path) -> None:
    dataset = job(pictures).dataset
    assert isinstance(dataset.train, CachedSplit)
    assert isinstance(dataset.test, ImageFileSplit)
    dataset.train.images(torch.arange(4))
    dataset.train.images(torch.arange(6))
    use = use_of(dataset.train)
    assert use is not None
    assert (use.images, use.hits, use.kept_bytes) == (10, 4, 6 * 3 * 8 * 8)


def test_none_keeps_nothing_and_a_size_keeps_as_many_as_fit(pictures: Path) -> None:
    assert isinstance(job(pictures, cache="none").dataset.train, ImageFileSplit)
    train = job(pictures, cache=str(5 * 3 * 8 * 8 + 1)).dataset.train
    train.images(torch.arange(8))
    use = use_of(train)
    assert use is not None
    assert use.kept_bytes == 5 * 3 * 8 * 8


def test_what_is_in_memory_is_kept_no_second_time() -> None:
    given = {"data": "digits", "model": "mlp", "device": "cpu"}
    assert isinstance(assemble(configure(given), CheckpointConfig()).dataset.train, TensorSplit)
    with pytest.raises(RequestError, match="the images of digits are in memory already: leave cache out"):
        assemble(configure(given, {"cache": "1GB"}), CheckpointConfig())
    with pytest.raises(RequestError, match="digits is not made of them"):
        assemble(configure(given, {"decoded": "kept"}), CheckpointConfig())


def test_windows_are_cut_out_of_kept_pictures(pictures: Path, tmp_path: Path) -> None:
    plain = job(pictures, scale=10, cache="none").dataset.train
    for values in ({}, {"decoded": str(tmp_path / "kept")}):
        train = job(pictures, scale=10, **values).dataset.train
        assert isinstance(train, WindowSplit)
        assert isinstance(train.larger, DecodedFiles if values else CachedSplit)
        for _ in range(2):
            assert torch.equal(train.images(torch.arange(5)), plain.images(torch.arange(5)))


def test_decoded_files_are_kept_for_training_and_tests(pictures: Path, tmp_path: Path) -> None:
    dataset = job(pictures, decoded=str(tmp_path / "kept")).dataset
    assert isinstance(dataset.train, DecodedFiles)
    assert isinstance(dataset.test, DecodedFiles)
    with pytest.raises(RequestError, match="kept by the system"):
        job(pictures, decoded=str(tmp_path / "kept"), cache="1GB")


def test_a_run_tells_the_share_of_hits_and_learns_the_same(pictures: Path, tmp_path: Path) -> None:
    told = {}
    for cache in ("auto", "none"):
        run = polyrhythm.simulate(
            cluster="office",
            data=str(pictures),
            image_size=8,
            model="mlp",
            workers=2,
            batch_size=3,
            epochs=3,
            cache=cache,
            keep_checkpoints=0,
            out=tmp_path / cache,
        )
        told[cache] = run.figures
    assert told["auto"]["cache"] == {
        "images": 3 * 2 * EACH,
        "hits": 2 * 2 * EACH,
        "hit_share": 2 / 3,
        "kept_bytes": 2 * EACH * 3 * 8 * 8,
    }
    assert "cache" not in told["none"]
    assert told["auto"]["parameters_sha256"] == told["none"]["parameters_sha256"]
    page = (tmp_path / "auto" / "report.html").read_text()
    assert "66.7 % of the 36 requested training images were served decoded from memory (0.0 MB)" in page
