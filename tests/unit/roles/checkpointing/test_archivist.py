"""Checkpoints are written beside training, one at a time; what goes wrong is said."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from conformance.jobs import make_job
from polyrhythm.communication.activity import Activity
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import CheckpointSaved, Notice
from polyrhythm.roles.checkpointing import archive as archive_module
from polyrhythm.roles.checkpointing.archive import FOLDER, Archive, Archivist, Snapshot
from polyrhythm.training.checkpoint import best_checkpoint, checkpoint_path, load_checkpoint

PATIENCE_S = 30


def snapshot(step):
    return Snapshot(epoch=step, step=step, seconds=0.0, parameters=torch.full((4,), float(step)), workers={})


class Held:
    """Writing that waits until it is let go."""

    def __init__(self, monkeypatch):
        self.begun, self.release = threading.Event(), threading.Event()
        self.log = []
        self._write = archive_module.save_checkpoint
        monkeypatch.setattr(archive_module, "save_checkpoint", self._save)

    def _save(self, path, tensors, facts, claim):
        self.log.append(f"begin {facts['step']}")
        self.begun.set()
        assert self.release.wait(PATIENCE_S)
        self._write(path, tensors, facts, claim)
        self.log.append(f"end {facts['step']}")


class Watched(Activity):
    """Lets writing go once somebody waits for it."""

    def __init__(self, held):
        super().__init__()
        self._held = held
        self.waits = []

    @contextmanager
    def doing(self, what, *, takes_long=False):
        self.waits.append((what, takes_long))
        self._held.release.set()
        yield


@pytest.fixture
def job(tmp_path):
    made = make_job("synchronous", 1, folder=tmp_path)
    return replace(made, checkpointing=replace(made.checkpointing, best=True))


@pytest.fixture
def held(monkeypatch):
    return Held(monkeypatch)


def saved(step):
    return CheckpointSaved(time_s=0, path=f"{FOLDER}/step-{step:08d}.safetensors", epoch=step, step=step)


def test_it_is_said_once_it_is_whole_and_not_before(job, held, tmp_path):
    said = []
    archivist = Archivist(Archive(job), Watched(held), said.append, beside=True)
    archivist.begin(snapshot(1))
    assert held.begun.wait(PATIENCE_S)
    archivist.look()
    assert said == []
    assert not list((tmp_path / FOLDER).iterdir())
    archivist.wait()
    archivist.look()
    archivist.wait()
    assert said == [saved(1)]
    tensors, facts = load_checkpoint(checkpoint_path(tmp_path / FOLDER, 1))
    assert tensors["parameters"].tolist() == [1.0] * 4
    assert (facts["epoch"], facts["step"]) == (1, 1)


def test_the_newest_waits_for_the_disk_and_no_step_does(job, held):
    said = []
    activity = Watched(held)
    archivist = Archivist(Archive(job), activity, said.append, beside=True)
    for step in (1, 2, 3, 4):
        archivist.begin(snapshot(step))
    assert activity.waits == []
    assert [event.text for event in said] == [
        "the disk is slower than the interval between checkpoints: that of step 2 is skipped there; a longer "
        "interval writes all"
    ]
    archivist.wait()
    assert held.log == ["begin 1", "end 1", "begin 4", "end 4"]
    assert said[1:] == [saved(1), saved(4)]
    assert set(activity.waits) == {("writing a checkpoint", True)}


def test_one_that_may_be_the_best_waits_for_the_disk_before_newer_ones(job, held, tmp_path):
    archivist = Archivist(Archive(job), Watched(held), lambda event: None, beside=True)
    for step, top1 in ((1, None), (2, 0.5), (3, None), (4, 0.25)):
        archivist.begin(snapshot(step), top1)
    archivist.wait()
    assert held.log == ["begin 1", "end 1", "begin 2", "end 2"]
    assert load_checkpoint(best_checkpoint(tmp_path / FOLDER))[1]["step"] == 2


def test_in_virtual_time_it_is_there_at_once(job, tmp_path):
    said = []
    Archivist(Archive(job), Activity(), said.append, beside=False).begin(snapshot(1), 0.25)
    assert said == [saved(1)]
    assert load_checkpoint(best_checkpoint(tmp_path / FOLDER))[1]["step"] == 1


def test_what_cannot_be_written_is_one_line_and_the_next_one_is_tried(job, tmp_path, monkeypatch):
    said = []
    archivist = Archivist(Archive(job), Activity(), said.append, beside=True)
    archivist.begin(snapshot(1), 0.5)
    archivist.wait()
    with monkeypatch.context() as patch:
        patch.setattr(archive_module, "save_checkpoint", failing)
        for _ in range(3):
            archivist.begin(snapshot(2), 0.9)
            archivist.wait()
        archivist.tested(0.95)  # of what is not there
    archivist.begin(snapshot(3), 0.25)
    archivist.tested(0.75)
    assert said == [saved(1), Notice(time_s=0, text="no room here, and training continues"), saved(3)]
    names = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert names == [
        "best-top1-0.750000-step-00000003.safetensors",
        "step-00000001.safetensors",
        "step-00000003.safetensors",
    ]


def failing(*_):
    raise RunError("no room here")


def test_a_bug_in_the_thread_surfaces_as_one(job, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(archive_module, "save_checkpoint", broken)
    archivist = Archivist(Archive(job), Activity(), lambda event: None, beside=True)
    archivist.begin(snapshot(1))
    with pytest.raises(ZeroDivisionError):
        archivist.wait()


def test_a_run_folder_that_cannot_hold_any_is_one_line(job, tmp_path):
    (tmp_path / FOLDER).touch()
    said = []
    Archivist(Archive(job), Activity(), said.append, beside=False).begin(snapshot(1))
    assert [event.text for event in said] == [
        f"cannot write checkpoint {tmp_path}/{FOLDER}/step-00000001.safetensors: File exists, and training continues"
    ]


def test_damaged_ones_are_passed_over_and_named(job, tmp_path):
    job = replace(job, checkpointing=replace(job.checkpointing, checkpoints=3))
    archive = Archive(job)
    paths = [checkpoint_path(tmp_path / FOLDER, step) for step in (1, 2, 3)]
    for step in (1, 2, 3):
        archive.save(snapshot(step))
    assert archive.load().step == 3
    assert archive.remarks == []
    for path in paths[1:]:
        path.write_bytes(path.read_bytes()[:-1])
    assert archive.load().step == 1
    assert archive.remarks == [
        f"checkpoint {paths[2]} cannot be used: it was cut short, or it is not a checkpoint; the newest complete one "
        f"next to it is {paths[0]}, and the run continues from that: epoch 1, step 1"
    ]
    archive.save(snapshot(2))  # as the run does that goes on
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [paths[0].name, paths[1].name]
    for path in paths[:2]:
        path.write_bytes(b"")
    with pytest.raises(RequestError, match=r"step-00000002.safetensors cannot be used: it was cut short"):
        archive.load()
