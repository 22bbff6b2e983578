import gzip
import logging

import numpy as np
import pytest
import torch

from polyrhythm.data.sources import fashion_mnist
from polyrhythm.data.sources.fashion_mnist import FILES, MEAN, STD, FashionMNIST, find_or_fetch
from polyrhythm.errors import RequestError


@pytest.fixture(scope="module")
def dataset():
    return FashionMNIST().load()


@pytest.fixture(scope="module")
def contents(dataset):
    """The files' bytes, made again out of the loaded data."""
    parts = []
    for split in (dataset.train, dataset.test):
        pixels = split.images(torch.arange(len(split))).mul(STD).add(MEAN).mul(255).round().to(torch.uint8)
        labels = split.labels.to(torch.uint8)
        parts.append(
            b"\x00\x00\x08\x03" + np.array([len(split), 28, 28], ">u4").tobytes() + pixels.numpy().tobytes()
        )
        parts.append(b"\x00\x00\x08\x01" + np.array([len(split)], ">u4").tobytes() + labels.numpy().tobytes())
    return parts


def test_shapes_and_classes(dataset):
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    assert dataset.image_shape == (1, 28, 28)
    assert dataset.default_epochs == 5
    assert len(dataset.classes) == 10
    assert dataset.train.labels.bincount().tolist() == [6000] * 10
    assert dataset.test.labels.bincount().tolist() == [1000] * 10


def test_training_images_are_normalized(dataset):
    images = dataset.train.images(torch.arange(60_000))
    assert images.dtype == torch.float32
    assert images.shape == (60_000, 1, 28, 28)
    assert abs(images.mean().item()) < 5e-4
    assert abs(images.std().item() - 1) < 5e-4


def test_the_bytes_have_the_published_digests(contents):
    for file, content in zip(FILES, contents, strict=True):
        assert len(content) == file.size_bytes
        assert file.verify(content, "memory") == content


def test_a_given_folder_is_read(contents, tmp_path):
    for file, content in zip(FILES, contents, strict=True):
        (tmp_path / file.name).write_bytes(content)
    given = FashionMNIST(folder=str(tmp_path)).load()
    assert given.train.labels[:5].tolist() == [9, 0, 0, 3, 0]


def test_a_given_folder_is_the_only_place_looked_at(tmp_path):
    with pytest.raises(RequestError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
        FashionMNIST(folder=str(tmp_path)).load()


def test_a_damaged_system_folder_is_passed_by_for_the_cache(contents, tmp_path):
    system, cache = tmp_path / "system", tmp_path / "cache"
    for folder in (system, cache):
        folder.mkdir()
        for file, content in zip(FILES, contents, strict=True):
            (folder / f"{file.name}.gz").write_bytes(gzip.compress(content, 1))
    (system / f"{FILES[3].name}.gz").write_bytes(b"damaged")
    assert find_or_fetch(system, cache, "http://unused.invalid/") == contents


def test_they_are_uncompressed_once(contents, tmp_path):
    system, cache = tmp_path / "system", tmp_path / "cache"
    system.mkdir()
    for file, content in zip(FILES, contents, strict=True):
        (system / f"{file.name}.gz").write_bytes(gzip.compress(content, 1))
    find_or_fetch(system, cache, "http://unused.invalid/")
    for file in FILES:
        (system / f"{file.name}.gz").unlink()
    assert find_or_fetch(system, cache, "http://unused.invalid/") == contents


def test_what_was_uncompressed_and_is_damaged_is_made_anew(contents, tmp_path):
    system, cache = tmp_path / "system", tmp_path / "cache"
    for folder in (system, cache / "uncompressed"):
        folder.mkdir(parents=True)
        for file, content in zip(FILES, contents, strict=True):
            (folder / file.name).write_bytes(content)
    damaged = cache / "uncompressed" / FILES[3].name
    damaged.write_bytes(b"damaged")
    assert find_or_fetch(system, cache, "http://unused.invalid/") == contents
    assert damaged.read_bytes() == contents[3]


def test_a_cache_that_cannot_be_written_is_no_obstacle(contents, tmp_path):
    for file, content in zip(FILES, contents, strict=True):
        (tmp_path / file.name).write_bytes(content)
    cache = tmp_path / "a file"
    cache.touch()
    assert find_or_fetch(tmp_path, cache, "http://unused.invalid/") == contents


def test_what_cannot_be_downloaded_comes_from_the_package(contents, tmp_path, monkeypatch, caplog):
    asked = []

    def unpack(package, files, into):
        asked.append(package)
        into.mkdir()
        for file, content in zip(files, contents, strict=True):
            (into / file.name).write_bytes(content)

    monkeypatch.setattr(fashion_mnist, "unpack_debian", unpack)
    with caplog.at_level(logging.WARNING):
        found = find_or_fetch(tmp_path / "none", tmp_path / "cache", f"file://{tmp_path}/nothing/")
    assert found == contents
    assert asked == ["dataset-fashion-mnist"]
    assert "fetching 4 files" in caplog.text


def test_when_every_place_fails_all_reasons_and_the_mend_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError) as caught:
        find_or_fetch(tmp_path / "none", tmp_path / "cache", f"file://{tmp_path}/nothing/")
    text = str(caught.value)
    assert "\n" not in text
    for part in ("nothing/train-images", "apt-get", "install the package dataset-fashion-mnist", "=FOLDER"):
        assert part in text
