"""Checkpoints: every bit comes back, any damage is noticed, and a failed write leaves the older file."""

import errno
import hashlib
import os
import resource

import pytest
import torch
from safetensors.torch import save_file

from polyrhythm.claim import UNCLAIMED
from polyrhythm.errors import RequestError, RunError
from polyrhythm.training import checkpoint
from polyrhythm.training.checkpoint import (
    checkpoint_path,
    checkpoints,
    load_checkpoint,
    prune,
    save_checkpoint,
)

FACTS = {
    "epoch": 3,
    "losses": [0.5, float("inf")],
    "lr": 0.1,
    "name": "größer",
    "none": None,
    "nested": {"a": True},
}


def every_dtype():
    bits = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.uint64, torch.uint32, torch.uint16, torch.uint8]
    return {str(dtype): bits.clone().view(dtype) for dtype in dtypes}


def shapes():
    numbers = torch.arange(24.0)
    return {
        "scalar": torch.tensor(7, dtype=torch.int64),
        "truth": torch.tensor([[True, False], [False, True]]),
        "one truth": torch.tensor(True),
        "empty": torch.zeros(0, 3, dtype=torch.float64),
        "transposed": numbers.view(4, 6).T,
        "view": numbers[3:7],
        "same view": numbers[3:7],
        "every other": numbers[::2],
        "trained": torch.ones(2, requires_grad=True),
        "odd.name/ü": torch.tensor([-0.0, float("nan"), 1e-45]),
    }


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("tensors", [every_dtype(), shapes(), {}], ids=["dtypes", "shapes", "none"])
def test_every_bit_comes_back(tmp_path, tensors):
    path = tmp_path / "one.safetensors"
    save_checkpoint(path, tensors, FACTS)
    loaded, facts = load_checkpoint(path)
    assert facts == FACTS
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor)
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.safetensors"]


def test_everyone_may_read_it_who_may_read_an_ordinary_file(tmp_path):
    save_checkpoint(tmp_path / "one.safetensors", {}, {})
    (tmp_path / "ordinary").touch()
    assert (tmp_path / "one.safetensors").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_loaded_tensors_may_be_changed_without_changing_the_file(tmp_path):
    path = tmp_path / "one.safetensors"
    save_checkpoint(path, {"w": torch.zeros(1000)}, {})
    loaded = load_checkpoint(path)[0]["w"]
    loaded += 1
    assert torch.equal(load_checkpoint(path)[0]["w"], torch.zeros(1000))


def test_the_checksum_is_as_documented(tmp_path):
    tensors = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor(3, dtype=torch.int16)}
    digest = save_checkpoint(tmp_path / "one.safetensors", tensors, {"step": 1})
    expected = hashlib.sha256(b'{"step": 1}')
    expected.update(b'["a", "torch.int16", []]' + b"\x03\x00")
    expected.update(b'["b", "torch.float32", [2]]' + b"\x00\x00\x80\x3f\x00\x00\x00\x40")
    assert digest == expected.hexdigest()
    assert (
        save_checkpoint(tmp_path / "two.safetensors", dict(reversed(tensors.items())), {"step": 1}) == digest
    )


@pytest.fixture
def two(tmp_path):
    """Two checkpoints; the second is the one to damage."""
    for step in (1, 2):
        save_checkpoint(
            checkpoint_path(tmp_path, step),
            {"w": torch.arange(5.0) + step, "n": torch.tensor(step)},
            {"step": step},
        )
    return checkpoint_path(tmp_path, 1), checkpoint_path(tmp_path, 2)


def assert_refused(damaged, whole):
    with pytest.raises(RequestError) as caught:
        load_checkpoint(damaged)
    text = str(caught.value)
    assert text.startswith(f"checkpoint {damaged} cannot be used: ")
    assert text.endswith(f"; the newest complete one next to it is {whole}")
    assert "\n" not in text


def test_notices_every_truncation(two):
    whole, damaged = two
    content = damaged.read_bytes()
    for length in range(len(content)):
        damaged.write_bytes(content[:length])
        assert_refused(damaged, whole)
    with pytest.raises(RequestError, match="cannot be used: it was cut short"):
        load_checkpoint(damaged)
    damaged.write_bytes(content + b"\0")
    assert_refused(damaged, whole)


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_notices_every_changed_byte(two, mask):
    whole, damaged = two
    content = damaged.read_bytes()
    for place in range(len(content)):
        damaged.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
        assert_refused(damaged, whole)


def test_notices_other_facts(two):
    whole, damaged = two
    text = damaged.read_bytes()
    damaged.write_bytes(text.replace(b'\\"step\\": 2', b'\\"step\\": 3'))
    assert damaged.read_bytes() != text
    assert_refused(damaged, whole)
    with pytest.raises(RequestError, match="it was changed after it was written"):
        load_checkpoint(damaged)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04" * 100])
def test_refuses_other_files(two, content):
    whole, other = two
    other.write_bytes(content)
    assert_refused(other, whole)


def test_refuses_plain_weights(two):
    whole, other = two
    save_file({"w": torch.zeros(2)}, other)
    assert_refused(other, whole)
    with pytest.raises(RequestError, match="it is not a checkpoint"):
        load_checkpoint(other)


def test_offers_nothing_where_nothing_is_whole(tmp_path):
    paths = [checkpoint_path(tmp_path, step) for step in (1, 2)]
    for path in paths:
        path.write_bytes(b"broken")
    with pytest.raises(RequestError) as caught:
        load_checkpoint(paths[1])
    assert "newest whole" not in str(caught.value)


def test_a_missing_file_is_named_with_what_there_is(two, tmp_path):
    with pytest.raises(
        RequestError, match=r"there is no checkpoint .*step-00000009.*; the newest .*step-00000002"
    ):
        load_checkpoint(checkpoint_path(tmp_path, 9))
    with pytest.raises(RequestError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "nowhere" / "x.safetensors")
    with pytest.raises(RequestError, match="there is no checkpoint"):
        load_checkpoint(tmp_path)


def disk_full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(file, _tensors, _metadata):
    file.write(b"half")
    disk_full()


@pytest.mark.parametrize(
    ("owner", "name", "failing"),
    [
        (checkpoint, "write_safetensors", half_written),
        (checkpoint.os, "fsync", disk_full),
        (checkpoint.os, "replace", disk_full),
    ],
)
def test_a_failed_write_leaves_the_older_file_and_nothing_else(
    two, tmp_path, monkeypatch, owner, name, failing
):
    _, path = two
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(RunError) as caught:
            save_checkpoint(path, {"w": torch.zeros(9)}, {})
    assert str(caught.value).startswith(f"cannot write checkpoint {path}: No space left on device")
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "step-00000001.safetensors",
        "step-00000002.safetensors",
    ]
    save_checkpoint(path, {"w": torch.zeros(9)}, {})
    assert load_checkpoint(path)[0]["w"].shape == (9,)


def test_an_interrupt_while_writing_leaves_nothing(two, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(checkpoint_path(tmp_path, 3), {}, {})
    assert len(list(tmp_path.iterdir())) == 2


def test_a_write_that_the_system_cuts_short_leaves_the_older_file(two, tmp_path):
    _, path = two
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RunError, match=r"cannot write checkpoint .*File too large"):
            save_checkpoint(path, {"w": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_is_none_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for folder in ("file", "nowhere"):
        with pytest.raises(RunError, match="cannot write checkpoint") as caught:
            save_checkpoint(tmp_path / folder / "x.safetensors", {"w": torch.zeros(9)}, {})
        assert "\n" not in str(caught.value)


def test_flushes_the_file_before_it_gets_its_name_and_the_folder_after(tmp_path, monkeypatch):
    order = []
    flush, replace = checkpoint.flush, os.replace
    monkeypatch.setattr(checkpoint, "flush", lambda path: (order.append(path.name), flush(path)))
    monkeypatch.setattr(checkpoint.os, "replace", lambda a, b: (order.append("rename"), replace(a, b)))
    save_checkpoint(checkpoint_path(tmp_path, 5), {}, {})
    draft = UNCLAIMED.draft(checkpoint_path(tmp_path, 5))
    assert order == [draft.name, "rename", tmp_path.name]


def test_the_latest_is_by_step_not_by_name_or_date(tmp_path):
    assert checkpoints(tmp_path) == []
    assert checkpoints(tmp_path / "nowhere") == []
    for step in (123456789, 3, 99999999):
        save_checkpoint(checkpoint_path(tmp_path, step), {}, {})
    (tmp_path / "step-latest.safetensors").touch()
    (tmp_path / ".step-99999999999.safetensors.partial").touch()
    assert checkpoints(tmp_path)[0] == tmp_path / "step-123456789.safetensors"


def test_prune_keeps_the_newest_and_what_is_not_ours(tmp_path):
    for step in (1, 2, 3, 10):
        save_checkpoint(checkpoint_path(tmp_path, step), {}, {})
    (tmp_path / "model.safetensors").touch()
    (tmp_path / ".step-00000011.safetensors.partial").touch()
    prune(tmp_path, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "model.safetensors",
        "step-00000003.safetensors",
        "step-00000010.safetensors",
    ]
    with pytest.raises(ValueError, match="cannot keep 0"):
        prune(tmp_path, keep=0)


def test_refuses_facts_and_tensors_that_do_not_fit(tmp_path):
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "one.safetensors", {}, {"loss": torch.tensor(1.0)})
    with pytest.raises(ValueError, match=r"w: safetensors has no torch\.complex128"):
        save_checkpoint(tmp_path / "one.safetensors", {"w": torch.zeros(1, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_vanishes_while_old_ones_are_removed_holds_none(tmp_path, monkeypatch):
    def vanished(*_):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("os.scandir", vanished)
    monkeypatch.setattr("os.listdir", vanished)  # of a folder that was there a moment ago
    prune(tmp_path, 1)
    assert checkpoints(tmp_path) == []
