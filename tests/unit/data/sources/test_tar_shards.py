"""Pictures in tar shards: read, resumed, and skipped where they are bad."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyrhythm.data import shards as tar_index
from polyrhythm.data.loader import Batch, Loader, Share
from polyrhythm.data.open import open_data
from polyrhythm.data.sources.tar_shards import TarShards
from polyrhythm.errors import RequestError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _png(tone: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), tone, np.uint8)).save(file, "PNG")
    return file.getvalue()


def _write(path: Path, entries: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def _shards(folder: Path, spoil: frozenset[int] = frozenset()) -> str:
    """Writes 4 shards of 6 pictures; the tone of picture n is 10 n, its class n mod 2."""
    for shard in range(4):
        entries: dict[str, bytes] = {}
        for number in range(6 * shard, 6 * shard + 6):
            entries[f"a/{number:03d}.png"] = b"no picture" if number in spoil else _png(10 * number)
            entries[f"a/{number:03d}.cls"] = str(number % 2).encode()
        _write(folder / f"train-{shard}.tar", entries)
    _write(
        folder / "test.tar",
        {"x.png": _png(5), "x.cls": b"0", "y.jpg": _png(15), "y.json": b'{"label": 1}'},
    )
    return f"tar_shards(files='{folder}/train-*.tar', test='{folder}/test.tar', image_size=8, buffer=3)"


def _tones(batch: Batch) -> list[int]:
    return [round(float(image[0, 0, 0]) * 0.229 * 255 + 0.485 * 255) for image in batch.images]


def test_pictures_come_with_their_labels(tmp_path: Path) -> None:
    dataset = open_data(_shards(tmp_path))
    assert dataset.classes == ("0", "1")
    assert (len(dataset.train), len(dataset.test)) == (24, 2)
    assert dataset.test.labels.tolist() == [0, 1]
    for worker in range(2):
        for batch in Loader(dataset.train, Share(worker, 2, 4, 0)).epoch(0):
            assert [tone // 10 % 2 for tone in _tones(batch)] == batch.labels.tolist()


def test_shards_are_named_by_numbers_in_braces_and_labels_stand_under_several_keys(tmp_path: Path) -> None:
    keys = ("label", "cls", "class")
    for shard in range(12):
        label = f'{{"caption": "a tone", "{keys[shard % 3]}": {shard % 2}}}'
        _write(tmp_path / f"train-{shard:04d}.tar", {"x.png": _png(10 * shard), "x.json": label.encode()})
    dataset = open_data(f"tar_shards(files='{tmp_path}/train-{{0001..0010}}.tar', image_size=8)")
    assert len(dataset.train) + len(dataset.test) == 10
    assert dataset.classes == ("0", "1")
    with pytest.raises(
        RequestError, match=r"name tar files, with \* for any text, or \{000..146\} for numbers"
    ):
        open_data(f"tar_shards(files='{tmp_path}/train-{{20..22}}.tar')")


def test_together_the_workers_read_every_picture_once_an_epoch(tmp_path: Path) -> None:
    train = open_data(_shards(tmp_path)).train
    for epoch in range(2):
        seen = [
            tone
            for worker in range(3)
            for batch in Loader(train, Share(worker, 3, 2, 0)).epoch(epoch)
            for tone in _tones(batch)
        ]
        assert sorted(seen) == [10 * number for number in range(24)]


def test_a_resumed_epoch_goes_on_where_it_was(tmp_path: Path) -> None:
    train = open_data(_shards(tmp_path)).train
    whole = [_tones(batch) for batch in Loader(train, Share(1, 2, 3, 7)).epoch(5)]
    again = open_data(_shards(tmp_path)).train
    assert [_tones(batch) for batch in Loader(again, Share(1, 2, 3, 7)).epoch(5, start=2)] == whole[2:]


def test_with_other_workers_in_an_epoch_every_picture_is_still_read_once(tmp_path: Path) -> None:
    """Three workers do a step each; after that the third's part is shared out, or four begin with what is left."""
    train = open_data(_shards(tmp_path)).train
    first = [next(Loader(train, Share(worker, 3, 2, 0)).epoch(1)) for worker in range(3)]
    shared = [
        batch
        for worker in range(2)
        for batch in Loader(train, Share(worker, 2, 2, 0, together=6)).epoch(1, 1)
    ]
    assert sorted(tone for batch in first + shared for tone in _tones(batch)) == [10 * n for n in range(24)]
    fewer = [
        batch
        for worker in range(4)
        for batch in Loader(train, Share(worker, 4, 2, 0, begun=((1, 1, 1),))).epoch(1)
    ]
    assert sorted(tone for batch in first + fewer for tone in _tones(batch)) == [10 * n for n in range(24)]


def test_bad_records_are_counted_and_skipped_within_a_limit(tmp_path: Path) -> None:
    spec = _shards(tmp_path, spoil=frozenset({3, 10, 17}))
    train = open_data(spec).train
    batches = list(Loader(train, Share(0, 1, 4, 0)).epoch(0))
    assert sorted(tone for batch in batches for tone in _tones(batch)) == [
        10 * number for number in range(24) if number not in (3, 10, 17)
    ]
    assert len(train.skipped) == 3
    assert set(train.skipped.values()) == {"not an image"}
    assert all(len(batch.labels) == len(batch.images) for batch in batches)
    list(Loader(train, Share(0, 1, 4, 0)).epoch(1))
    assert len(train.skipped) == 3  # the same ones again
    strict = open_data(spec.replace("buffer=3", "buffer=3, bad_records=2")).train
    with pytest.raises(
        RequestError, match=r"3 bad records, the last .*train-\d\.tar: a/0\d\d\.png \(not an image\)"
    ):
        list(Loader(strict, Share(0, 1, 4, 0)).epoch(0))
    lenient = open_data(spec.replace("buffer=3", "buffer=3, bad_records=2"), skip_unreadable=True).train
    assert len(list(Loader(lenient, Share(0, 1, 4, 0)).epoch(0))) == 6


def test_a_batch_of_bad_records_only_is_empty(tmp_path: Path) -> None:
    train = open_data(_shards(tmp_path, spoil=frozenset({0, 1}))).train
    kept, images = train.read(torch.tensor([0, 1]))
    assert (len(kept), tuple(images.shape)) == (0, (0, 3, 8, 8))
    with pytest.raises(RequestError, match="cannot be read"):
        train.images(torch.tensor([0, 2]))


def test_bad_test_pictures_are_left_out_before_the_run(tmp_path: Path) -> None:
    spec = _shards(tmp_path)
    _write(tmp_path / "test.tar", {"x.png": _png(5), "x.cls": b"0", "y.png": b"broken", "y.cls": b"1"})
    assert len(open_data(spec).test) == 1


def test_shards_that_are_cut_short_lose_their_end_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = _shards(tmp_path)
    last = tmp_path / "train-3.tar"
    with tarfile.open(last) as file:
        cut_at = file.getmember("a/022.png").offset_data + 10
    last.write_bytes(last.read_bytes()[:cut_at])
    train = open_data(spec).train
    assert len(train) == 22
    assert "is cut short" in caplog.text or "is damaged" in caplog.text


def test_pictures_without_a_label_are_faults(tmp_path: Path) -> None:
    _shards(tmp_path)
    _write(tmp_path / "train-9.tar", {"z.png": _png(1), "w.png": _png(2), "w.cls": b"1"})
    source = TarShards(files=f"{tmp_path}/train-*.tar", bad_records=0)
    with pytest.raises(
        RequestError, match=r"1 bad records, such as .*train-9\.tar: z\.png has no label next to it"
    ):
        source.load()
    assert len(TarShards(files=f"{tmp_path}/train-*.tar").load().train) == 20  # a fifth is held out


def test_the_index_is_remembered_until_a_shard_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _shards(tmp_path)
    first = open_data(spec).train
    read = []
    monkeypatch.setattr(tar_index, "_index", lambda number, shard, *rest: read.append(shard.name))
    again = open_data(spec).train
    assert read == []
    assert torch.equal(first.labels, again.labels)
    _write(tmp_path / "train-0.tar", {"q.png": _png(1), "q.cls": b"1"})
    with pytest.raises(RequestError):
        open_data(spec)
    assert read == ["train-0.tar", "train-1.tar", "train-2.tar", "train-3.tar"]


def test_files_that_are_no_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there are no shards"):
        open_data(f"{tmp_path}/nothing-*.tar")
    (tmp_path / "a.tar").write_bytes(b"something else" * 100)
    with pytest.raises(RequestError, match=r"a\.tar is not an uncompressed tar file"):
        open_data(f"{tmp_path}/a.tar")
    _write(tmp_path / "b.tar", {"x.png": _png(5), "x.cls": b"0"})
    with pytest.raises(RequestError, match="holds 1 class"):
        open_data(f"{tmp_path}/b.tar")
    _shards(tmp_path)
    _write(tmp_path / "test.tar", {"x.png": _png(5), "x.cls": b"zebra"})
    with pytest.raises(RequestError, match=r"has classes that .* lacks \(zebra\)"):
        open_data(f"tar_shards(files='{tmp_path}/train-*.tar', test='{tmp_path}/test.tar')")
