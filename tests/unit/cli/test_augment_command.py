"""`polyrhythm augment`, from the command line to the picture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import polyrhythm
from polyrhythm.augmentation import chain
from polyrhythm.augmentation.draws import Draws
from polyrhythm.cli.main import _status
from polyrhythm.data.open import open_data
from polyrhythm.data.seeding import generator_for, sample_keys

WRONG = {
    "augmentation": (["rotate"], "unknown augmentation 'rotate': did you mean rotation"),
    "nothing": (["none"], "nothing to preview: name an augmentation"),
    "format": (
        ["flip", "--preview", "sheet.txt"],
        "sheet.txt has no suffix of an image format: name it sheet.png",
    ),
    "too many": (["flip", "--images", "100000"], "images must be from 1 to 100, as one sheet can show"),
    "folder": (["flip", "--preview", "nowhere/sheet.png"], "there is no folder nowhere: make it first"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_one_line(refused: Callable[..., str], arguments: list[str], message: str) -> None:
    assert message in refused("augment", "--data", "digits", *arguments)


def test_it_writes_a_contact_sheet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sheet.png"
    options = ["--data", "digits", "--pictures", "3", "--variants", "2", "--preview", str(path), "--json"]
    assert _status(["augment", "rotation; flip(probability=1)", *options]) == 0
    found = json.loads(capfd.readouterr().out)
    captions = found.pop("captions")
    assert found == {
        "file": str(path),
        "augment": "rotation; flip(probability=1.0)",
        "images": 3,
        "pictures": 3,
        "variants": 2,
        "corruptions": [],
    }
    # What was drawn is what the augmentations were given, and stands below each picture with its label.
    dataset = open_data("digits")
    chosen = torch.randperm(len(dataset.train), generator=generator_for("contact sheet", 0))[:3].sort().values
    assert [row[0] for row in captions] == [dataset.classes[label] for label in dataset.train.labels[chosen]]
    for epoch in range(2):
        draws = Draws(sample_keys("transform", 0, epoch, chosen))
        draws.chance(1.0)
        angles = draws.uniform(-15, 15).tolist()
        assert [row[1 + epoch] for row in captions] == [f"rotation {each:.2g}, flip yes" for each in angles]
    with Image.open(path) as sheet:
        assert sheet.width == 3 * (96 + 8)
        assert sheet.height > 3 * (96 + 8)
        below = np.asarray(sheet)[100:, :96]
        assert below[: 13 * 2].min() < 100  # something is written


def test_what_is_left_of_a_picture_stands_beside_the_picture_at_its_size(tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    options = ["--data", "digits", "--pictures", "2", "--variants", "1", "--preview", str(path)]
    assert _status(["augment", "window(size=6)", *options]) == 0
    with Image.open(path) as sheet:
        assert sheet.width == 2 * (96 + 8)


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32)).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "a" / "broken.png").write_bytes(b"\x89PNG")
    path = tmp_path / "sheet.png"
    assert _status(["augment", "flip", "--data", str(tmp_path / "photos"), "--preview", str(path)]) == 0
    assert path.exists()


def _run(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert _status(["augment", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_a_recipe_says_data_sizes_augmentations_and_seed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe, path = tmp_path / "own.yaml", str(tmp_path / "sheet.png")
    recipe.write_text("data: digits\nimage_size: 6\nscale: 12\nseed: 5\nepochs: 3\naugment: flip; rotation\n")
    found = _run(capfd, str(recipe), "--preview", path, "--images", "2", "--variants", "3")
    assert found["augment"] == "window(size=6); flip; rotation"
    again = _run(capfd, str(recipe), "--preview", path, "--pictures", "2", "--variants", "3", "--seed", "6")
    assert again["captions"] != found["captions"]
    assert all(caption.startswith("window ") for row in found["captions"] for caption in row[1:])


def test_mixed_pictures_have_the_labels_of_both(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--data", "digits", "--preview", str(tmp_path / "sheet.png"), "--images", "4")
    found = _run(capfd, "flip; mixup(alpha=4)", *options)
    assert found["augment"] == "flip; mixup(alpha=4.0)"
    for label, *variants in found["captions"]:
        for caption in variants:
            shares = re.findall(r"(\d\.\d\d) (\d)", caption)
            assert sum(float(share) for share, _ in shares) == pytest.approx(1, abs=0.011)
            assert label in {name for _, name in shares}


def test_corruptions_at_every_severity(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sheet.png"
    options = ("--data", "digits", "--preview", str(path), "--pictures", "2")
    found = _run(capfd, "--corruptions", "contrast,shot_noise", *options)
    assert found["corruptions"] == ["contrast", "shot_noise"]
    assert found["captions"][2][1:] == [f"shot_noise {each}" for each in range(1, 6)]
    with Image.open(path) as sheet:
        assert sheet.width == 6 * (96 + 8)


def test_either_augmentations_or_corruptions(refused: Callable[..., str]) -> None:
    assert "one of them" in refused("augment")
    assert "one of them" in refused("augment", "flip", "--corruptions", "all")
    assert "unknown corruption 'frog'" in refused("augment", "--corruptions", "frog")


def test_captions_of_large_pictures_are_those_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain goes through large pictures in parts; what is written below them must not depend on how."""
    folder = tmp_path / "photographs"
    for number in range(24):
        path = folder / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (10 * number, 0, 0)).save(path)
    options = {"data": str(folder), "pictures": 12, "variants": 2}
    parted = polyrhythm.augment("flip; rotation; color_jitter", tmp_path / "parted.png", **options)
    monkeypatch.setattr(chain, "_TOGETHER_PIXELS", 10**9)
    together = polyrhythm.augment("flip; rotation; color_jitter", tmp_path / "together.png", **options)
    assert parted["captions"] == together["captions"]
    assert len({text for row in parted["captions"] for text in row[1:]}) > 12
    assert (tmp_path / "parted.png").read_bytes() == (tmp_path / "together.png").read_bytes()


def test_variants_are_counted_as_in_table_1_of_deep_image(capfd: pytest.CaptureFixture[str]) -> None:
    """Of three the paper says how; in the others a step moves a corner by a pixel, or its light by a shade."""
    chain = "color_casting; vignetting; lens_distortion; rotation; flip; window(size=224); erasing"
    assert _status(["augment", chain, "--count", "512", "--json"]) == 0
    counts = {each["name"]: each["number"] for each in json.loads(capfd.readouterr().out)["combinations"]}
    assert (counts["color_casting"], counts["flip"], counts["window"]) == (68920, 2, 82944)
    corner = 511 / 2 * 2**0.5
    step = np.deg2rad(30 / (counts["rotation"] - 1))
    assert corner * step == pytest.approx(1, rel=0.01)
    assert corner * 0.4 / (counts["lens_distortion"] - 1) == pytest.approx(1, rel=0.01)
    assert counts["vignetting"] == (1 + int(0.8 * corner)) * (1 + int(0.6 * 255))
    assert counts["erasing"] is None


def test_a_window_leaves_fewer_angles(capfd: pytest.CaptureFixture[str]) -> None:
    assert _status(["augment", "window(size=224); rotation", "--count", "512"]) == 0
    assert re.search(r"rotation +83$", capfd.readouterr().out, re.MULTILINE)
