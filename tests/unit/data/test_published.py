"""Data sets in the files of their authors, written here record by record."""

from __future__ import annotations

import gzip
import struct
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import md5
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from urllib.error import URLError
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from scipy.io import savemat

from polyrhythm.data.open import open_data
from polyrhythm.data.published import Origin, folder_of
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


NAMES = ["mnist", "kmnist", "emnist", "cifar10", "cifar100", "svhn", "stl10"]


@pytest.mark.parametrize("name", NAMES)
def test_missing_files_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unplugged(address: str, timeout: float) -> None:
        asked.append(address)
        raise URLError("no network")

    monkeypatch.setattr("polyrhythm.fetched_file.urlopen", unplugged)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RequestError, match=rf"cannot be fetched \(no network\).* {name}=FOLDER"):
        open_data(name)
    assert len(asked) == 1
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
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


class Quiet(SimpleHTTPRequestHandler):
    """A server that keeps no log."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, bytes], tuple[str, str]]]:
    """Put a file into the web, and return its address and its MD5; the user's cache is empty."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "web"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def put(name: str, content: bytes) -> tuple[str, str]:
        (folder / name).write_bytes(content)
        return f"http://127.0.0.1:{server.server_port}/{name}", md5(content).hexdigest()

    yield put
    server.shutdown()
    server.server_close()
    thread.join()


def _tar(contents: dict[str, bytes]) -> bytes:
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as shelf:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            shelf.addfile(entry, BytesIO(content))
    return packed.getvalue()


def _zip(contents: dict[str, bytes]) -> bytes:
    packed = BytesIO()
    with ZipFile(packed, "w") as shelf:
        for name, content in contents.items():
            shelf.writestr(name, content)
    return packed.getvalue()


@pytest.mark.parametrize(("name", "pack"), [("a.tar.gz", _tar), ("a.zip", _zip)])
def test_archives_are_fetched_once_and_only_what_is_needed_is_taken_out(
    name: str,
    pack: Callable[[dict[str, bytes]], bytes],
    web: Callable[[str, bytes], tuple[str, str]],
    tmp_path: Path,
) -> None:
    archive = pack({"deep/inside/a.bin": b"first", "../../b.bin": b"second", "c.bin": b"not needed"})
    origin = Origin((web(name, archive),), ("a.bin", "b.bin"))
    folder = folder_of(None, "cifar10", origin)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "a.bin": b"first",
        "b.bin": b"second",
    }
    (tmp_path / "web" / name).unlink()
    assert folder_of(None, "cifar10", origin) == folder
    assert folder_of(str(tmp_path), "cifar10", origin) == tmp_path


def test_files_are_fetched_as_they_are_and_others_than_those_that_are_known_refused(
    web: Callable[[str, bytes], tuple[str, str]], tmp_path: Path
) -> None:
    first, second = web("a.gz", b"first"), web("b.gz", b"second")
    folder = folder_of(None, "mnist", Origin((first, second)))
    assert sorted(path.name for path in folder.iterdir()) == ["a.gz", "b.gz"]
    address, _ = web("c.gz", b"third")
    with pytest.raises(RequestError, match=r"not the known file \(its md5 begins with .*mnist=FOLDER"):
        folder_of(None, "mnist", Origin(((address, second[1]),)))
    assert not (folder / "c.gz").exists()
    broken = web("d.tar.gz", b"no archive")
    with pytest.raises(RequestError, match="cannot be unpacked"):
        folder_of(None, "stl10", Origin((broken,), ("a.bin",)))
