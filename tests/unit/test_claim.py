"""Several starts of one run in one folder: the latest alone writes into it, whatever an earlier one is about to do."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch

from polyrhythm.api.observed_run import choose_folder
from polyrhythm.claim import UNCLAIMED, Superseded, claim, is_staging
from polyrhythm.events import Notice
from polyrhythm.reporting.event_log import EventLog, read_events
from polyrhythm.training import checkpoint
from polyrhythm.training.checkpoint import (
    best_checkpoint,
    checkpoint_path,
    forget_beyond,
    keep_best,
    load_checkpoint,
    prune,
    save_checkpoint,
)

OURS, THEIRS = {"w": torch.zeros(4)}, {"w": torch.ones(4)}


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder but those in staging folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not any(is_staging(part) for part in (path, *path.parents))
    }


def test_what_is_published_is_there_under_its_name_alone(tmp_path: Path) -> None:
    own = claim(tmp_path / "run", ["checkpoints"])
    path = tmp_path / "run" / "checkpoints" / "file"
    own.draft(path).write_text("new")
    own.publish(path)
    own.release()
    assert [str(found.relative_to(tmp_path)) for found in sorted(tmp_path.rglob("*"))] == [
        "run",
        "run/checkpoints",
        "run/checkpoints/file",
    ]
    assert path.read_text() == "new"


def test_nothing_stays_of_a_start_that_wrote_nothing(tmp_path: Path) -> None:
    claim(tmp_path / "run", ["checkpoints"]).release()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("moment", ["before", "written", "flushed"])
def test_a_checkpoint_of_a_former_start_does_not_come_in(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = claim(tmp_path, ["checkpoints"])
    path = checkpoint_path(tmp_path / "checkpoints", 7)
    before: dict[str, bytes] = {}

    def take_over(*_: object) -> None:
        monkeypatch.undo()
        later = claim(tmp_path, ["checkpoints"])
        save_checkpoint(path, THEIRS, {"of": "the later start"}, later)
        before.update(contents(tmp_path))

    if moment == "before":
        take_over()
    else:
        name = "write_safetensors" if moment == "written" else "flush"
        act = getattr(checkpoint, name)
        monkeypatch.setattr(checkpoint, name, lambda *given: (act(*given), take_over()))
    with pytest.raises(Superseded, match=r"belongs to a later start of this run by now, so this one ends$"):
        save_checkpoint(path, OURS, {"of": "the former start"}, former)
    assert contents(tmp_path) == before
    assert list(before) == [f"checkpoints/{path.name}"]
    assert load_checkpoint(path)[1] == {"of": "the later start"}


def test_a_former_start_removes_nothing_either(tmp_path: Path) -> None:
    former = claim(tmp_path, ["checkpoints"])
    folder = tmp_path / "checkpoints"
    later = claim(tmp_path, ["checkpoints"])
    for step in (1, 2, 3):
        save_checkpoint(checkpoint_path(folder, step), THEIRS, {}, later)
    keep_best(checkpoint_path(folder, 2), 0.5, later)
    before = contents(tmp_path)
    with pytest.raises(Superseded):
        prune(folder, 1, former)
    with pytest.raises(Superseded):
        forget_beyond(folder, 1, former)
    with pytest.raises(Superseded):
        keep_best(checkpoint_path(folder, 3), 0.9, former)
    former.release()
    assert contents(tmp_path) == before
    prune(folder, 1, later)
    best = best_checkpoint(folder)
    assert best is not None
    assert sorted(contents(tmp_path)) == [f"checkpoints/{best.name}", "checkpoints/step-00000003.safetensors"]


def test_a_former_log_goes_on_where_nobody_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventLog(path, claim(tmp_path))
    first.on_event(Notice(time_s=1, text="former"))
    second = EventLog(path, claim(tmp_path))
    second.on_event(Notice(time_s=2, text="later"))
    first.on_event(Notice(time_s=3, text="too late"))
    assert read_events(path) == [Notice(time_s=1, text="former"), Notice(time_s=2, text="later")]
    first.close()
    second.close()


def test_of_two_that_claim_it_at_once_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, others = Path.mkdir, []

    def between(self: Path, *given: object, **named: object) -> None:
        mkdir(self, *given, **named)  # type: ignore[arg-type]
        if is_staging(self):
            monkeypatch.setattr(Path, "mkdir", mkdir)
            # a second one comes here, that has numbered itself alike and drawn a higher name
            other = tmp_path / f"{self.name[:-8]}ffffffff"
            other.mkdir()
            others.append(other)

    monkeypatch.setattr(Path, "mkdir", between)
    with pytest.raises(Superseded, match="belongs to a later start of this run, so"):
        claim(tmp_path)
    assert list(tmp_path.iterdir()) == others


def test_the_staging_folder_of_a_killed_process_holds_nobody_up(tmp_path: Path) -> None:
    killed = claim(tmp_path / "run", ["checkpoints"])
    killed.draft(tmp_path / "run" / "config.yaml").write_text("half")
    assert (
        choose_folder(tmp_path / "run", "run") == tmp_path / "run"
    )  # though there are staging folders in it
    own = claim(tmp_path / "run", ["checkpoints"])
    assert own.name > killed.name
    assert own.holds()
    assert not killed.holds()
    own.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_on_another_disk_has_its_own_staging_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    own = claim(tmp_path / "run", ["checkpoints"])
    path = checkpoint_path(tmp_path / "run" / "checkpoints", 1)
    assert own.draft(path).parent.resolve() == tmp_path / "disk" / own.name
    save_checkpoint(path, OURS, {}, own)
    assert load_checkpoint(path)[1] == {}


def test_who_may_not_write_is_told_so_and_not_that_it_is_late(tmp_path: Path) -> None:
    own = claim(tmp_path)
    (tmp_path / "taken").mkdir()
    own.draft(tmp_path / "taken").write_text("file")
    with pytest.raises(OSError, match="Is a directory"):
        own.publish(tmp_path / "taken")
    own.remove(tmp_path / "nothing")  # as `unlink(missing_ok=True)`


def test_without_a_claim_files_are_made_beside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    UNCLAIMED.draft(path).write_text("text")
    (draft,) = tmp_path.iterdir()
    # Nobody can put a link there beforehand.
    assert re.fullmatch(r"\.file\.[0-9a-f]{16}-\d+\.partial", draft.name)
    UNCLAIMED.publish(path)
    assert UNCLAIMED.holds()
    assert stat.S_ISREG(os.stat(path).st_mode)
    UNCLAIMED.remove(path)
    UNCLAIMED.remove(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["deleted", "renamed", "emptied"])
def test_a_folder_that_vanishes_is_made_again(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own = claim(folder, ["checkpoints"])
    if how == "renamed":
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    if how == "emptied":  # as where a disk is unmounted
        (folder / "checkpoints").mkdir(parents=True)
    assert own.holds()
    save_checkpoint(checkpoint_path(folder / "checkpoints", 7), OURS, {}, own)
    assert torch.equal(load_checkpoint(checkpoint_path(folder / "checkpoints", 7))[0]["w"], OURS["w"])
    own.release()
    assert sorted(contents(folder)) == ["checkpoints/step-00000007.safetensors"]


def test_checkpoints_alone_are_made_again(tmp_path: Path) -> None:
    own = claim(tmp_path / "run", ["checkpoints"])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    save_checkpoint(checkpoint_path(tmp_path / "run" / "checkpoints", 7), OURS, {}, own)
    assert checkpoint_path(tmp_path / "run" / "checkpoints", 7).is_file()


@pytest.mark.parametrize("over", [False, True])
def test_who_comes_after_a_deletion_has_the_folder(over: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own = claim(folder, ["checkpoints"])
    shutil.rmtree(folder)
    later = claim(folder, ["checkpoints"])
    (folder / "config.yaml").touch()
    if over:
        later.release()
    assert not own.holds()
    with pytest.raises(Superseded):
        own.draft(checkpoint_path(folder / "checkpoints", 7))
    with pytest.raises(Superseded):
        save_checkpoint(checkpoint_path(folder / "checkpoints", 7), OURS, {}, own)
    assert sorted(contents(folder)) == ["config.yaml"]


def test_a_log_is_written_again_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own = claim(folder)
    log = EventLog(folder / "events.jsonl", own)
    log.on_event(Notice(time_s=1.0, text="first"))
    assert log.in_place
    folder.rename(tmp_path / "elsewhere")
    assert not log.in_place
    log.write_again()
    log.on_event(Notice(time_s=2.0, text="second"))
    log.close()
    assert [event.time_s for event in read_events(folder / "events.jsonl")] == [1.0, 2.0]
    assert [event.time_s for event in read_events(tmp_path / "elsewhere" / "events.jsonl")] == [1.0]


@pytest.mark.parametrize("claimed", [False, True])
def test_a_text_is_written_whole_or_not_at_all(tmp_path: Path, claimed: bool) -> None:
    own = claim(tmp_path) if claimed else UNCLAIMED
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        own.write(tmp_path / "taken", "text")
    own.write(tmp_path / "file", "one")
    own.write(tmp_path / "file", "two")
    if claimed:
        own.release()
    assert (tmp_path / "file").read_text() == "two"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", "taken"]


def test_a_late_start_writes_no_text_over_its_successors(tmp_path: Path) -> None:
    late = claim(tmp_path)
    own = claim(tmp_path)
    own.write(tmp_path / "file", "own")
    with pytest.raises(Superseded):
        late.write(tmp_path / "file", "late")
    assert (tmp_path / "file").read_text() == "own"
