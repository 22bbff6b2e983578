"""Data sets in the files of their authors, written here record by record."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError

NUMBERS = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def pixels(*shape: int) -> np.ndarray:
    return NUMBERS.integers(0, 256, shape, dtype=np.uint8)


def seen(name: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """Return a data set's training pictures as bytes again, its labels and its classes."""
    data = open_data(f"{name}={folder}" if "(" not in name else name)
    images = data.train.images(torch.arange(len(data.train)))
    black, white = data.black[0], data.white[0]
    assert abs(float(images.mean())) < 1e-4
    assert float(images.std(correction=0)) == pytest.approx(1, abs=1e-4)
    return ((images - black) / (white - black) * 255).round().to(torch.uint8), data.train.labels, data.classes


@pytest.mark.parametrize("name", ["mnist", "kmnist"])
def test_the_mnist_family(name: str, tmp_path: Path) -> None:
    images, labels = pixels(20, 28, 28), np.arange(20, dtype=np.uint8) % 10
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    for kind, array in (("images-idx3", images[:10]), ("labels-idx1", labels[:10])):
        (folder / f"t10k-{kind}-ubyte").write_bytes(idx(array))
    found, classes, names = seen(name, tmp_path)
    assert torch.equal(found[:, 0], torch.from_numpy(images))
    assert classes.tolist() == labels.tolist()
    assert len(names) == 10


def test_letters_of_emnist_are_turned_and_counted_from_one(tmp_path: Path) -> None:
    images, labels = pixels(26, 28, 28), np.arange(1, 27, dtype=np.uint8)
    for part in ("train", "test"):
        (tmp_path / f"emnist-letters-{part}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"emnist-letters-{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    found, classes, names = seen(f"emnist(folder='{tmp_path}', split=letters)", tmp_path)
    assert torch.equal(found[:, 0], torch.from_numpy(images.transpose(0, 2, 1).copy()))
    assert "".join(names[label] for label in classes.tolist()) == "abcdefghijklmnopqrstuvwxyz"


def test_cifar(tmp_path: Path) -> None:
    images = pixels(50, 3, 32, 32)
    labels = np.arange(50, dtype=np.uint8) % 10
    for number in range(1, 6):
        part = slice(10 * (number - 1), 10 * number)
        rows = np.concatenate([labels[part, None], images[part].reshape(10, -1)], 1)
        (tmp_path / f"data_batch_{number}.bin").write_bytes(rows.tobytes())
    (tmp_path / "test_batch.bin").write_bytes(rows.tobytes())
    found, classes, names = seen("cifar10", tmp_path)
    assert torch.equal(found, torch.from_numpy(images))
    assert classes.tolist() == labels.tolist()
    assert names[3] == "cat"
    (tmp_path / "test_batch.bin").write_bytes(rows.tobytes()[:-1])
    with pytest.raises(RequestError, match="records of 3073 bytes"):
        open_data(f"cifar10={tmp_path}")


def test_cifar_of_a_hundred_classes(tmp_path: Path) -> None:
    images, fine = pixels(100, 3, 32, 32), np.arange(100, dtype=np.uint8)
    rows = np.concatenate([fine[:, None] // 5, fine[:, None], images.reshape(100, -1)], 1)
    for part in ("train", "test"):
        (tmp_path / f"{part}.bin").write_bytes(rows.tobytes())
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"c{number}" for number in range(100)) + "\n")
    found, classes, names = seen("cifar100", tmp_path)
    assert torch.equal(found, torch.from_numpy(images))
    assert classes.tolist() == list(range(100))
    assert names[99] == "c99"


def test_svhn_calls_zero_ten(tmp_path: Path) -> None:
    images = pixels(32, 32, 3, 12)
    labels = np.array([[10], *([number] for number in range(1, 10)), [10], [3]])
    for part in ("train", "test"):
        savemat(tmp_path / f"{part}_32x32.mat", {"X": images, "y": labels})
    found, classes, _ = seen("svhn", tmp_path)
    assert torch.equal(found, torch.from_numpy(images.transpose(3, 2, 0, 1).copy()))
    assert classes.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 3]


def test_stl10_lies_column_by_column(tmp_path: Path) -> None:
    images, labels = pixels(10, 3, 96, 96), np.arange(1, 11, dtype=np.uint8)
    for part in ("train", "test"):
        (tmp_path / f"{part}_X.bin").write_bytes(images.transpose(0, 1, 3, 2).tobytes())
        (tmp_path / f"{part}_y.bin").write_bytes(labels.tobytes())
    found, classes, _ = seen("stl10", tmp_path)
    assert torch.equal(found, torch.from_numpy(images))
    assert classes.tolist() == list(range(10))


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar10", "cifar100", "svhn", "stl10"])
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"{name}=FOLDER"):
        open_data(name)
    with pytest.raises(RequestError, match="which is not in"):
        open_data(f"{name}={tmp_path}")


def test_a_wrong_label_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(pixels(2, 28, 28)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.array([3, 11], dtype=np.uint8)))
    with pytest.raises(RequestError, match="beyond its 10 classes"):
        open_data(f"mnist={tmp_path}")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\3damaged")
    with pytest.raises(RequestError, match="is damaged"):
        open_data(f"mnist={tmp_path}")
