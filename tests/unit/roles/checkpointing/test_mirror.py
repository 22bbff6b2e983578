"""Checkpoints are copied to another place, from which a run resumes where its own folder is gone."""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

import polyrhythm
from conformance.jobs import make_job, simulated
from polyrhythm.errors import RequestError
from polyrhythm.events import CheckpointSaved, Notice, RunStarted
from polyrhythm.roles.checkpoint_interval import Interval
from polyrhythm.roles.checkpointing.mirror import Mirror, fetch_run

SMALL = {"data": "digits", "model": "mlp(hidden=[8])", "threads": 1, "workers": 1, "batch_size": 64}


def mirrored(folder, url):
    job = make_job("synchronous", 2, folder=folder, epochs=3)
    every = Interval.parse("3steps")
    return replace(job, checkpointing=replace(job.checkpointing, every=every, mirror=url))


def test_the_newest_are_copied_byte_by_byte(tmp_path):
    simulated(mirrored(tmp_path / "run", f"file://{tmp_path}/copy"))
    own, copies = (sorted((tmp_path / name / "checkpoints").iterdir()) for name in ("run", "copy"))
    assert [path.name for path in copies] == [path.name for path in own]
    assert len(copies) == 2
    assert [path.read_bytes() for path in copies] == [path.read_bytes() for path in own]


def test_a_mirror_that_cannot_be_written_is_one_line_and_no_step(tmp_path):
    (tmp_path / "file").touch()
    trained = simulated(mirrored(tmp_path / "run", f"file://{tmp_path}/file/copy"))
    assert trained.events[-1].outcome == "done"
    assert len(trained.checkpoint_steps) > 3
    (text,) = [event.text for event in trained.events if isinstance(event, Notice)]
    assert text.startswith(
        f"cannot copy checkpoint step-00000003.safetensors to the mirror file://{tmp_path}/file"
    )
    assert text.endswith("and training continues")


@pytest.mark.parametrize("files", range(1, 10))
def test_a_copy_that_was_killed_at_any_file_leaves_the_one_before(files, tmp_path, monkeypatch):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for step in (3, 6):
        (tmp_path / f"run/checkpoints/step-0000000{step}.safetensors").write_text(f"checkpoint {step}")
    for name in ("config.yaml", "data.json", "events.jsonl"):
        (tmp_path / "run" / name).write_text(f"whole {name}")
    put, count = LocalFileSystem.put_file, 0

    def killed(system, source, target, **options):
        nonlocal count
        count += 1
        if count == files:
            Path(target).write_bytes(Path(source).read_bytes()[:5])
            raise KeyboardInterrupt
        put(system, source, target, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", killed)
    mirror, saved = Mirror(tmp_path / "run", f"file://{tmp_path}/copy", 2), 0
    with suppress(KeyboardInterrupt):
        for path in sorted((tmp_path / "run/checkpoints").glob("step-*")):
            mirror.save(CheckpointSaved(time_s=0, path=f"checkpoints/{path.name}", epoch=0, step=1))
            saved += 1
    assert fetch_run(f"file://{tmp_path}/copy", tmp_path / "elsewhere") or not saved
    for path in (tmp_path / "elsewhere").glob("*.*"):
        assert path.read_text() == f"whole {path.name}"


@pytest.mark.parametrize("url", ["nowhere://host/run", "s3nope://bucket"])
def test_a_location_that_is_not_known_is_refused_before_anything_is_trained(url, tmp_path):
    with pytest.raises(RequestError, match="write a location of fsspec"):
        polyrhythm.train(**SMALL, checkpoint_mirror=url, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_without_its_folder_resumes_from_its_copy(tmp_path):
    url = f"file://{tmp_path}/copy"
    asked = SMALL | {"checkpoint_mirror": url, "checkpoint_every": "10steps"}
    polyrhythm.train(
        **asked, updates=None, epochs=1, schedule="constant", out=tmp_path / "run", resume="auto"
    )
    shutil.rmtree(tmp_path / "run")
    events = []

    class Heard:
        def on_event(self, event):
            events.append(event)

        def close(self):
            pass

    polyrhythm.train(
        **asked,
        epochs=2,
        schedule="constant",
        out=tmp_path / "elsewhere",
        resume="auto",
        observers=[Heard()],
    )
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.start_epoch == 1
    assert (tmp_path / "elsewhere/config.yaml").is_file()
    assert not list(tmp_path.glob(".*"))


def test_without_a_copy_there_is_nothing_to_fetch(tmp_path):
    assert not fetch_run(f"file://{tmp_path}/copy", tmp_path / "run")
    assert not (tmp_path / "run").exists()
