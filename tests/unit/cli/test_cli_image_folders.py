"""Folders of images that nothing can be learned from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Refusal = Callable[..., str]


def save_image(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of two images, for training and for testing."""
    for part in ("train", "test"):
        for number, name in enumerate(("cat", "dog")):
            for image in range(2):
                save_image(tmp_path / part / name / f"{image}.jpg", seed=2 * number + image)
    return tmp_path


def refusal(refused: Refusal, folder: Path) -> str:
    return refused("train", "--data", folder, "--image-size", "32", "--model", "lenet5", "--epochs", "1")


def test_no_images(tmp_path: Path, refused: Refusal) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "dog").mkdir()
    assert f"no images in {tmp_path}/train/<class>/" in refusal(refused, tmp_path)


def test_no_train_folder(tmp_path: Path, refused: Refusal) -> None:
    assert f"there is no folder {tmp_path}/train" in refusal(refused, tmp_path)


def test_one_class(tmp_path: Path, refused: Refusal) -> None:
    save_image(tmp_path / "train" / "cat" / "0.jpg")
    assert f"{tmp_path}/train holds one class only (cat)" in refusal(refused, tmp_path)


def test_an_unreadable_image_is_named(folder: Path, refused: Refusal) -> None:
    (folder / "train" / "cat" / "1.jpg").write_text("no image")
    complaint = refusal(refused, folder)
    assert complaint.startswith(f"{folder}/train/cat/1.jpg cannot be read (not an image)")
    assert "--skip-unreadable" in complaint


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_truncated_image_is_named(part: str, folder: Path, refused: Refusal) -> None:
    whole = folder / part / "dog" / "0.jpg"
    whole.write_bytes(whole.read_bytes()[:-400])
    assert refusal(refused, folder).startswith(f"{whole} cannot be read (image file is truncated")
