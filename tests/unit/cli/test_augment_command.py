"""`polyrhythm augment`, from the command line to the picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from polyrhythm.cli.main import _status

WRONG = {
    "augmentation": (["rotate"], "unknown augmentation 'rotate': did you mean rotation"),
    "nothing": (["none"], "nothing to preview: name an augmentation"),
    "format": (
        ["flip", "--preview", "sheet.txt"],
        "sheet.txt has no ending of a picture format: name it sheet.png",
    ),
    "too many": (["flip", "--pictures", "100000"], "pictures must be from 1 to 100, as one sheet can show"),
    "folder": (["flip", "--preview", "nowhere/sheet.png"], "there is no folder nowhere: make it first"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_one_line(refused: Callable[..., str], arguments: list[str], message: str) -> None:
    assert message in refused("augment", "--data", "digits", *arguments)


def test_it_writes_a_contact_sheet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sheet.png"
    options = ["--data", "digits", "--pictures", "3", "--variants", "2", "--preview", str(path), "--json"]
    assert _status(["augment", "rotation; flip(probability=1)", *options]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "file": str(path),
        "augment": "rotation; flip(probability=1.0)",
        "pictures": 3,
        "variants": 2,
    }
    with Image.open(path) as sheet:
        assert sheet.size == (3 * (96 + 8), 3 * (96 + 8))


def test_what_is_left_of_a_picture_stands_beside_the_picture_at_its_size(tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    options = ["--data", "digits", "--pictures", "2", "--variants", "1", "--preview", str(path)]
    assert _status(["augment", "window(size=6)", *options]) == 0
    with Image.open(path) as sheet:
        assert sheet.size == (2 * (96 + 8), 2 * (96 + 8))


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32)).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "a" / "broken.png").write_bytes(b"\x89PNG")
    path = tmp_path / "sheet.png"
    assert _status(["augment", "flip", "--data", str(tmp_path / "photos"), "--preview", str(path)]) == 0
    assert path.exists()
