"""Checkpoints and what may happen to them: a full disk, and kill -9 at every moment of writing."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from on_processes.faults.storing import MEBIBYTE, small_disk
from polyrhythm.errors import RunError
from polyrhythm.events import Notice
from polyrhythm.reporting.event_log import EventLog, read_events
from polyrhythm.training import checkpoint
from polyrhythm.training.checkpoint import (
    checkpoint_path,
    checkpoints,
    load_checkpoint,
    prune,
    save_checkpoint,
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    with small_disk(tmp_path) as found:
        yield found


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")


@needs_root
def test_a_nearly_full_disk_keeps_room_for_the_log(disk: Path) -> None:
    first, second = (checkpoint_path(disk, step) for step in (1, 2))
    save_checkpoint(first, {"w": torch.zeros(MEBIBYTE // 4)}, {})
    with pytest.raises(RunError, match="No space left on device; older checkpoints are untouched"):
        save_checkpoint(
            second, {"w": torch.zeros(9 * MEBIBYTE // 16)}, {}
        )  # would fit, and leave less than 1 MiB
    assert [path.name for path in disk.iterdir()] == [first.name]
    (disk / "log").write_bytes(bytes(MEBIBYTE))
    save_checkpoint(first, {"w": torch.zeros(9)}, {})
    assert load_checkpoint(first)[0]["w"].shape == (9,)


def _saves(folder: Path, moment: str, ready: multiprocessing.connection.Connection) -> None:
    """Writes the second checkpoint, and stays for ever where it is to be killed."""

    def stay(*_: object) -> None:
        ready.send(moment)
        signal.pause()

    def half(file: object, *_: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        file.flush()  # type: ignore[attr-defined]
        stay()

    flush = checkpoint.flush
    if moment == "written":
        checkpoint.write_safetensors = half
    elif moment == "file flushed":
        checkpoint.flush = lambda path: (flush(path), stay())  # type: ignore[assignment,return-value]
    elif moment == "renamed":
        checkpoint.flush = lambda path: stay() if path.is_dir() else flush(path)
    else:
        checkpoint.os.replace = stay  # type: ignore[assignment]
    save_checkpoint(checkpoint_path(folder, 2), {"w": torch.full((1000,), 2.0)}, {"step": 2})


@pytest.mark.parametrize(
    ("moment", "newest"), [("written", 1), ("file flushed", 1), ("to be renamed", 1), ("renamed", 2)]
)
def test_killed_at_any_moment_the_newest_checkpoint_is_whole(
    tmp_path: Path, moment: str, newest: int
) -> None:
    save_checkpoint(checkpoint_path(tmp_path, 1), {"w": torch.full((1000,), 1.0)}, {"step": 1})
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    writer = context.Process(target=_saves, args=(tmp_path, moment, theirs))
    writer.start()
    assert ours.poll(60)
    assert ours.recv() == moment
    writer.kill()
    writer.join()
    tensors, facts = load_checkpoint(checkpoints(tmp_path)[0])
    assert facts == {"step": newest}
    assert torch.equal(tensors["w"], torch.full((1000,), float(newest)))
    prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{newest:08d}.safetensors"]


@needs_root
def test_a_full_disk_costs_events_and_no_run(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, filler = disk / "events.jsonl", disk / "filler"
    events = [Notice(time_s=number, text="x" * 1000) for number in range(12)]
    log = EventLog(path)
    log.on_event(events[0])
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    for event in events[1:10]:
        log.on_event(event)
    filler.unlink()
    for event in events[10:]:
        log.on_event(event)
    log.close()
    kept = read_events(path)
    missing = 12 - sum(event in events for event in kept)
    assert 0 < missing < 10  # the page that the first was written to had room for some more
    assert kept[-2:] == events[10:]
    (said,) = [event for event in kept if event not in events]
    assert said == Notice(
        time_s=10, text=f"{missing} events are missing here, for which there was no room on the disk"
    )
    told = capsys.readouterr().err
    assert told == (
        f"polyrhythm: cannot write {path}: No space left on device; events are dropped until it can be written\n"
    )
