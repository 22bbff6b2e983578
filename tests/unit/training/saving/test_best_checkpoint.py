"""The best checkpoint stays, whatever becomes of the newest ones."""

import errno
import os

import pytest
import torch

from polyrhythm.errors import RunError
from polyrhythm.training import checkpoint as best
from polyrhythm.training.checkpoint import (
    best_checkpoint,
    checkpoint_path,
    checkpoints,
    keep_best,
    load_checkpoint,
    prune,
    save_checkpoint,
)


def saved(folder, step):
    path = checkpoint_path(folder, step)
    save_checkpoint(path, {"w": torch.full((3,), float(step))}, {"step": step})
    return path


def refused(*_):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_highest_accuracy_stays_and_of_equals_the_earlier(tmp_path):
    assert best_checkpoint(tmp_path) is None
    assert best_checkpoint(tmp_path / "nowhere") is None
    kept = []
    for step, top1 in [(1, 0.5), (2, 0.75), (3, 0.7), (4, 0.75), (10, 0.7500001), (11, 1.0)]:
        keep_best(saved(tmp_path, step), top1)
        prune(tmp_path, keep=1)
        kept.append(load_checkpoint(best_checkpoint(tmp_path))[1]["step"])
    assert kept == [1, 2, 2, 2, 2, 11]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "best-top1-1.000000-step-00000011.safetensors",
        "step-00000011.safetensors",
    ]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000011.safetensors"]


def test_it_is_the_same_file_or_a_copy_where_there_are_no_links(tmp_path, monkeypatch):
    keep_best(saved(tmp_path, 1), 0.5)
    assert best_checkpoint(tmp_path).samefile(checkpoint_path(tmp_path, 1))
    monkeypatch.setattr(best.os, "link", refused)
    second = saved(tmp_path, 2)
    keep_best(second, 0.6)
    copy = best_checkpoint(tmp_path)
    assert not copy.samefile(second)
    assert copy.read_bytes() == second.read_bytes()
    assert len(list(tmp_path.iterdir())) == 3


def test_what_cannot_be_kept_leaves_the_best_before(tmp_path, monkeypatch):
    keep_best(saved(tmp_path, 1), 0.5)
    second = saved(tmp_path, 2)
    monkeypatch.setattr(best.os, "link", refused)
    monkeypatch.setattr(best.shutil, "copyfileobj", full)
    with pytest.raises(RunError) as caught:
        keep_best(second, 0.6)
    assert str(caught.value) == (
        f"cannot keep {second} as the best checkpoint: No space left on device; the best one before it stays"
    )
    assert load_checkpoint(best_checkpoint(tmp_path))[1]["step"] == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_after_a_crash_that_left_two_the_better_one_counts(tmp_path):
    keep_best(saved(tmp_path, 1), 0.5)
    second = saved(tmp_path, 2)
    os.link(second, tmp_path / "best-top1-0.600000-step-00000002.safetensors")
    os.link(second, tmp_path / ".best-top1-0.600000-step-00000002.safetensors.partial")
    assert load_checkpoint(best_checkpoint(tmp_path))[1]["step"] == 2
    keep_best(saved(tmp_path, 3), 0.55)
    assert load_checkpoint(best_checkpoint(tmp_path))[1]["step"] == 2
    keep_best(saved(tmp_path, 4), 0.9)
    prune(tmp_path, keep=1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "best-top1-0.900000-step-00000004.safetensors",
        "step-00000004.safetensors",
    ]
