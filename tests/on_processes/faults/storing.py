"""A run's checkpoints are damaged, or find no room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from conformance.jobs import perceptron, result_of, resumed
from on_processes.brake import Brake
from on_processes.faults.play import job_of, played
from on_processes.faults.seen import Seen
from on_processes.two_hosts import tool
from polyrhythm.api.faults import Outcome
from polyrhythm.events import CheckpointSaved, Event, Notice
from polyrhythm.launch.children import run_local
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.training.checkpoint import checkpoint_path, checkpoints, load_checkpoint

MEBIBYTE = 1 << 20
EPOCHS, STEPS_OF_EPOCH = 8, 20


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mounts a disk of 4 MiB, which only root may."""
    disk = folder / "disk"
    disk.mkdir()
    tool("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk))
    try:
        yield disk
    finally:
        tool("umount", str(disk))


def disk_full(spec: str, folder: Path) -> Seen:
    """Fills the disk behind the first checkpoint, until the run has ended; then resumes it."""
    with small_disk(folder) as disk:
        job = job_of(spec, disk, epochs=EPOCHS)
        brake = Brake(folder / "brake", STEPS_OF_EPOCH)
        job = replace(
            job,
            checkpointing=replace(job.checkpointing, checkpoints=1),
            make_model=lambda: brake.on(perceptron()),
        )
        filler = disk / "filler"
        events: list[Event] = []

        def hear(event: Event) -> None:
            events.append(event)
            if isinstance(event, CheckpointSaved) and not filler.exists():
                filler.write_bytes(bytes(7 * MEBIBYTE // 2))
                brake.release()

        run_local(job, hear, threads=1)
        saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
        notices = [
            event.text for event in events if isinstance(event, Notice) and "cannot write" in event.text
        ]
        assert notices
        assert all(
            text.startswith(f"cannot write checkpoint {disk}/{FOLDER}/step-")
            and text.endswith(
                ": No space left on device; older checkpoints are untouched, and training continues"
            )
            for text in notices
        ), notices
        assert len(notices) == 1, "one line until a write succeeds"
        assert result_of(events)["epochs"] == EPOCHS
        (path,) = (disk / FOLDER).iterdir()
        assert load_checkpoint(path)[1]["step"] == saved[-1] < job.calendar.total_steps
        filler.unlink()
        run_local(resumed(job), events.append, threads=1)
        whole = [checkpoint_path(disk / FOLDER, job.calendar.total_steps)]
        assert checkpoints(disk / FOLDER) == whole
    return Seen(Outcome.KEEPS, notices[0])


def damaged(spec: str, folder: Path) -> Seen:
    """Changes one bit of the newest checkpoint of a run, and resumes it."""
    job = job_of(spec, folder, epochs=3)
    played(job)
    _, newest = sorted((folder / FOLDER).glob("step-*.safetensors"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    events = played(resumed(job))
    (notice,) = [event.text for event in events if isinstance(event, Notice) and newest.name in event.text]
    assert "and the run continues from that: epoch 2, step" in notice, notice
    assert result_of(events)["epochs"] == 3
    return Seen(Outcome.OLDER, notice)
