import os

import numpy as np
import pytest
from PIL import Image

from polyrhythm.data import image_files as image_checks
from polyrhythm.data.image_files import find_unreadable


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for path in paths:
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)).save(path)
    return [str(path) for path in paths]


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)


def test_readable_images_are_no_news(files):
    assert find_unreadable(files) == {}


def test_every_unreadable_image_is_found_in_order(files):
    cut(files[4])
    with open(files[1], "wb") as file:
        file.write(b"text")
    found = find_unreadable([*files, "/no/such.png"])
    assert list(found) == [files[1], files[4], "/no/such.png"]
    assert found[files[1]] == "not an image"
    assert "truncated" in found[files[4]]


def test_of_very_many_only_headers_are_read(files, monkeypatch):
    cut(files[4])
    # PNG's header check sees that the end is missing; a JPEG's sees only the header.
    Image.open(files[0]).save(files[0].replace("png", "jpg"))
    jpeg = files[0].replace("png", "jpg")
    cut(jpeg)
    assert list(find_unreadable([jpeg])) == [jpeg]
    monkeypatch.setattr(image_checks, "DECODE_UP_TO", 0)
    assert find_unreadable([jpeg]) == {}


def test_a_long_check_is_remembered_until_a_file_changes(files, tmp_path, monkeypatch):
    cut(files[2])
    first = find_unreadable(files, remember_after_s=0)
    checks = []
    real = image_checks.check
    monkeypatch.setattr(
        image_checks, "check", lambda path, whole: checks.append(path) or real(path, whole=whole)
    )

    assert find_unreadable(files, remember_after_s=0) == first
    assert checks == []
    cut(files[3])
    assert list(find_unreadable(files, remember_after_s=0)) == [files[2], files[3]]
    assert sorted(checks) == files


def test_a_short_check_leaves_nothing_behind(files, tmp_path):
    find_unreadable(files, remember_after_s=60)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_or_read_costs_only_time(files, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert find_unreadable(files, remember_after_s=0) == {}
    (tmp_path / "cache").unlink()
    find_unreadable(files, remember_after_s=0)
    (memory,) = (tmp_path / "cache/polyrhythm/checked").iterdir()
    memory.write_text("[1, 2")
    assert find_unreadable(files) == {}
