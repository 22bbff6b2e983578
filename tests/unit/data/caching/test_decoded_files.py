import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyrhythm.data import decoded_files
from polyrhythm.data.decoded_files import keep_decoded
from polyrhythm.data.image_files import ImageFileSplit
from polyrhythm.errors import RequestError

SIDE, COUNT = 8, 5
ALL = torch.arange(COUNT)


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    random = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.png" for number in range(COUNT)]
    for path in paths:
        Image.fromarray(random.integers(256, size=(20, 24, 3), dtype=np.uint8)).save(path)
    return list(map(str, paths))


def split_of(pictures: list[str], side: int = SIDE) -> ImageFileSplit:
    return ImageFileSplit(pictures, torch.arange(len(pictures)), side)


def remove(pictures: list[str], keep: int = -1) -> None:
    """Empties all files but one, as they were in size and time: what is read afterwards does not come from them."""
    for number, path in enumerate(pictures):
        if number != keep:
            times = os.stat(path)
            Path(path).write_bytes(b"\0" * times.st_size)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def kept_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def test_images_are_those_of_the_files_which_are_not_read_again(pictures: list[str], tmp_path: Path) -> None:
    wanted = split_of(pictures).images(ALL)
    whole = split_of(pictures).whole(ALL[:1], 10)
    kept = keep_decoded(split_of(pictures), tmp_path / "kept")
    assert torch.equal(kept.whole(ALL[:1], 10)[0], whole[0])
    remove(pictures)
    for again in (kept, keep_decoded(split_of(pictures), tmp_path / "kept")):
        assert torch.equal(again.images(ALL), wanted)
        assert torch.equal(again.images(ALL[[3, 1]]), wanted[[3, 1]])
        assert again.images(ALL[:0]).shape == (0, 3, SIDE, SIDE)
        assert torch.equal(again.labels, ALL)
    assert len(kept_in(tmp_path / "kept")) == 1


def test_images_lie_in_several_files(
    pictures: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded_files, "_FILE_BYTES", 2 * 3 * SIDE * SIDE)
    wanted = split_of(pictures).images(ALL)
    kept = keep_decoded(split_of(pictures), tmp_path / "kept")
    remove(pictures)
    assert torch.equal(kept.images(ALL.flip(0)), wanted.flip(0))
    (folder,) = kept_in(tmp_path / "kept")
    sizes = [path.stat().st_size for path in sorted(folder.glob("*.pixels"))]
    assert sizes == [2 * 3 * SIDE * SIDE, 2 * 3 * SIDE * SIDE, 3 * SIDE * SIDE]


def test_another_size_or_a_changed_file_is_decoded_anew(pictures: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    keep_decoded(split_of(pictures), folder)
    keep_decoded(split_of(pictures, side=4), folder)
    assert len(kept_in(folder)) == 2
    Image.fromarray(np.zeros((20, 24, 3), dtype=np.uint8)).save(pictures[2])
    changed = keep_decoded(split_of(pictures), folder)
    assert len(kept_in(folder)) == 3
    assert torch.equal(changed.decoded(ALL)[2], torch.zeros(SIDE, SIDE, 3, dtype=torch.uint8))


def test_damaged_bytes_are_decoded_anew(pictures: list[str], tmp_path: Path) -> None:
    wanted = split_of(pictures).images(ALL)
    keep_decoded(split_of(pictures), tmp_path / "kept")
    (folder,) = kept_in(tmp_path / "kept")
    with open(folder / "00000.pixels", "r+b") as file:
        file.seek(3 * 3 * SIDE * SIDE + 5)
        file.write(b"\1\2\3\4")
    found = keep_decoded(split_of(pictures), tmp_path / "kept")
    remove(pictures, keep=3)  # only the damaged one is read
    assert torch.equal(found.images(ALL), wanted)


@pytest.mark.parametrize("damage", ["shorter", "missing"])
def test_a_folder_that_is_not_whole_is_made_anew(pictures: list[str], tmp_path: Path, damage: str) -> None:
    wanted = split_of(pictures).images(ALL)
    keep_decoded(split_of(pictures), tmp_path / "kept")
    (folder,) = kept_in(tmp_path / "kept")
    path = folder / "00000.pixels"
    if damage == "shorter":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    kept = keep_decoded(split_of(pictures), tmp_path / "kept")
    remove(pictures)
    assert torch.equal(kept.images(ALL), wanted)


def test_a_file_that_shrinks_under_a_reader_is_decoded_from_its_picture(
    pictures: list[str], tmp_path: Path
) -> None:
    wanted = split_of(pictures).images(ALL)
    kept = keep_decoded(split_of(pictures), tmp_path / "kept")
    (folder,) = kept_in(tmp_path / "kept")
    os.truncate(folder / "00000.pixels", 10)
    assert torch.equal(kept.images(ALL), wanted)


def test_an_unreadable_picture_leaves_nothing_behind(pictures: list[str], tmp_path: Path) -> None:
    Path(pictures[4]).write_bytes(b"no picture")
    with pytest.raises(RequestError, match="cannot be read"):
        keep_decoded(split_of(pictures), tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_made_is_one_line(pictures: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RequestError, match=r"cannot be kept in .*file.* choose another folder with --decoded"
    ):
        keep_decoded(split_of(pictures), tmp_path / "file")


def test_too_little_room_is_said_before_anything_is_decoded(
    pictures: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        decoded_files.shutil,
        "disk_usage",
        lambda path: type("Usage", (), {"free": COUNT * 3 * SIDE * SIDE - 1}),
    )
    with pytest.raises(RequestError, match=r"decoded images take 0\.0 GB, and .* has 0\.0 GB left"):
        keep_decoded(split_of(pictures), tmp_path / "kept")
