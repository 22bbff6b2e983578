"""Data at locations of fsspec: the same images as those of the folder that was put there."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from polyrhythm.data.open import open_data
from polyrhythm.data.remote import local_copy
from polyrhythm.errors import RequestError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Images of two classes, in a folder whose copy is in the memory of this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            pixels = draw.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    memory = fsspec.filesystem("memory")
    for file in (tmp_path / "photos").rglob("*.png"):
        memory.pipe_file(f"/bucket/{file.relative_to(tmp_path)}", file.read_bytes())
    local_copy.cache_clear()
    yield tmp_path / "photos"
    memory.store.clear()
    local_copy.cache_clear()


def same(one: Any, other: Any) -> bool:
    return bool(
        (one.train.images(range_of(one)) == other.train.images(range_of(other))).all()
        and (one.train.labels == other.train.labels).all()
    )


def range_of(dataset: Any) -> Any:
    return dataset.train.labels.new_tensor(range(len(dataset.train)))


@pytest.mark.parametrize("scheme", ["memory:/", "file:/"])
def test_a_folder_elsewhere_has_the_images_of_the_folder(folder: Path, scheme: str) -> None:
    url = "memory://bucket/photos" if scheme == "memory:/" else f"file://{folder}"
    assert same(open_data(url, image_size=8), open_data(str(folder), image_size=8))


def test_a_file_that_changed_and_is_as_long_as_before_is_copied_again(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    for text in ("file,label\na,cat\n", "file,label\na,dog\n"):
        memory.pipe_file("/bucket/labels.csv", text.encode())
        local_copy.cache_clear()
        assert Path(local_copy("memory://bucket/labels.csv")).read_text() == text


def test_files_that_did_not_change_are_not_copied_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = local_copy("memory://bucket/photos")
    local_copy.cache_clear()
    monkeypatch.setattr("polyrhythm.data.remote._fetch", None)
    assert local_copy("memory://bucket/photos") == copied


def test_what_changed_there_is_copied_and_what_left_is_removed(folder: Path) -> None:
    before = len(open_data("memory://bucket/photos", image_size=8).train)
    memory = fsspec.filesystem("memory")
    memory.rm_file("/bucket/photos/train/a/0.png")
    (folder / "train" / "a" / "0.png").unlink()
    pixels = np.full((30, 30, 3), 7, np.uint8)
    Image.fromarray(pixels).save(folder / "train" / "b" / "1.png")
    memory.put_file(str(folder / "train" / "b" / "1.png"), "/bucket/photos/train/b/1.png")
    local_copy.cache_clear()  # as another process
    now = open_data("memory://bucket/photos", image_size=8)
    assert len(now.train) == before - 1
    assert same(now, open_data(str(folder), image_size=8))


def test_tar_files_of_a_pattern_are_copied_and_others_are_not(folder: Path) -> None:
    for part in range(2):
        archive = folder.parent / f"train-{part}.tar"
        with tarfile.open(archive, "w") as tar:
            for label, name in enumerate(("a", "b")):
                for number in range(part * 2, part * 2 + 2):
                    image = folder / "train" / name / f"{number}.png"
                    tar.add(image, f"{name}{number}.png")
                    text = folder.parent / "label.cls"
                    text.write_text(str(label))
                    tar.add(text, f"{name}{number}.cls")
        fsspec.filesystem("memory").put_file(str(archive), f"/bucket/{archive.name}")
    fsspec.filesystem("memory").pipe_file("/bucket/other-0.tar", b"no tar")
    found = open_data("memory://bucket/train-*.tar", image_size=8)
    assert len(found.train) + len(found.test) == 8
    assert not list((folder.parent / "cache").rglob("other-0.tar"))


def test_a_manifest_elsewhere_finds_its_images(folder: Path) -> None:
    lines = [f"train/{name}/{number}.png,{name}" for name in ("a", "b") for number in range(4)]
    table = "\n".join(["image,labels", *lines])
    fsspec.filesystem("memory").pipe_file("/bucket/photos/photos.csv", table.encode())
    found = open_data("memory://bucket/photos/photos.csv", image_size=8)
    assert len(found.train) + len(found.test) == 8


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/nothing", "memory://bucket/nothing holds no files"),
        ("nosuch://bucket/photos", "cannot use the data 'nosuch://bucket/photos'"),
        ("file:///no/such/*.tar", "holds no files"),
    ],
)
def test_a_location_without_data_is_refused_in_one_line(folder: Path, url: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        open_data(url)
    assert "\n" not in str(refused.value)
