"""Run folders on network file systems, as far as their manners can be imitated on a local one.

Imitated are: a rename whose answer was lost, and that is asked for again; handles that are stale; open files that stay
under another name when they are removed; folders that cannot be flushed; no locks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polyrhythm.claim import UNCLAIMED, Superseded, claim
from polyrhythm.data import decoded_files
from polyrhythm.events import Notice
from polyrhythm.reporting.event_log import EventLog, read_events
from polyrhythm.training.checkpoint import checkpoint_path, checkpoints, load_checkpoint, save_checkpoint

STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.fixture
def renamed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renames whose answer is lost: the client asks again, and is told that there is no such file."""
    replace = Path.replace

    def twice(self: Path, target: Path) -> Path:
        replace(self, target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", twice)


@pytest.mark.usefixtures("renamed_twice")
def test_a_rename_that_was_done_counts_as_done(tmp_path: Path) -> None:
    own = claim(tmp_path, ["checkpoints"])
    path = checkpoint_path(tmp_path / "checkpoints", 3)
    save_checkpoint(path, {"w": torch.ones(3)}, {"step": 3}, own)
    assert load_checkpoint(path)[1] == {"step": 3}
    for access, name in ((own, "file"), (UNCLAIMED, "other")):
        access.draft(tmp_path / name).write_text(name)
        access.publish(tmp_path / name)
        assert (tmp_path / name).read_text() == name


@pytest.mark.usefixtures("renamed_twice")
def test_a_file_of_another_under_the_new_name_is_not_taken_for_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, path = UNCLAIMED.draft(tmp_path / "file"), tmp_path / "file"
    draft.write_text("own")
    path.write_text("another's")

    def lost(self: Path, target: Path) -> Path:
        self.unlink()
        raise FileNotFoundError(errno.ENOENT, "No such file")

    monkeypatch.setattr(Path, "replace", lost)
    with pytest.raises(FileNotFoundError):
        UNCLAIMED.publish(path)


def stale(monkeypatch: pytest.MonkeyPatch, concerns: Callable[[Path], bool], times: int) -> None:
    """Lets looks at some paths fail so often."""
    look, left = Path.stat, [times]

    def stat(self: Path, **how: bool) -> os.stat_result:
        if concerns(self) and left[0]:
            left[0] -= 1
            raise STALE
        return look(self, **how)

    monkeypatch.setattr(Path, "stat", stat)


def test_a_stale_handle_is_looked_up_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = claim(tmp_path)
    stale(monkeypatch, lambda path: path.name == own.name, 2)
    own.check()
    assert own.draft(tmp_path / "file").parent.is_dir()


def test_an_earlier_start_whose_folder_is_stale_ends_as_superseded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = claim(tmp_path)
    claim(tmp_path)
    stale(monkeypatch, lambda path: path.name == former.name, 100)
    with pytest.raises(Superseded):
        former.check()
    with pytest.raises(Superseded):
        former.draft(tmp_path / "file")


def test_an_earlier_start_that_still_sees_its_folder_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its host knows of the folder is a while old; the server, which renames, knows better."""
    former = claim(tmp_path)
    former.draft(tmp_path / "file").write_text("the former's")
    seen = Path(tmp_path / former.name).stat()
    later = claim(tmp_path)
    later.draft(tmp_path / "file").write_text("the later's")
    later.publish(tmp_path / "file")
    look = Path.stat

    def old(self: Path, **how: bool) -> os.stat_result:
        return seen if self.name == former.name else look(self, **how)

    monkeypatch.setattr(Path, "stat", old)
    with pytest.raises(OSError, match="No such file"):
        former.publish(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "the later's"


def test_what_stays_since_it_was_open_goes_with_a_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, unlink = claim(tmp_path), os.unlink
    former.draft(tmp_path / "file").write_text("still open")
    opened = [True]

    def silly(path: str, *given: object, **how: object) -> None:
        name = os.path.basename(os.fspath(path))
        if opened[0] and name == "file":
            raise OSError(errno.EBUSY, "Device or resource busy")  # as of .nfs…, which the client keeps
        unlink(path, *given, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", silly)
    later = claim(tmp_path)
    later.check()
    with pytest.raises(Superseded):
        former.check()
    later.release()
    opened[0] = False
    claim(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_flushed_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save_checkpoint(checkpoint_path(tmp_path, 1), {"w": torch.ones(1)}, {})
    assert len(checkpoints(tmp_path)) == 1


def test_a_log_whose_handle_is_stale_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stale:
        def seek(self, *_: int) -> int:
            raise STALE

        truncate = write = seek

    log = EventLog(tmp_path / "events.jsonl")
    log.on_event(Notice(time_s=0.0, text="first"))
    inner = log._file
    log._file = Stale()  # type: ignore[assignment]
    log.on_event(Notice(time_s=1.0, text="second"))
    log._file = inner
    log.on_event(Notice(time_s=2.0, text="third"))
    log.close()
    texts = [event.text for event in read_events(tmp_path / "events.jsonl") if isinstance(event, Notice)]
    assert (texts[0], texts[-1], len(texts)) == ("first", "third", 3)
    assert "1 events are missing here" in texts[1]
    assert "Stale file handle" in capsys.readouterr().err


def test_without_locks_images_are_decoded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(decoded_files.fcntl, "flock", none)
    with decoded_files._alone(tmp_path):
        pass
    assert "has no locks (No locks available): decoding without" in caplog.text
