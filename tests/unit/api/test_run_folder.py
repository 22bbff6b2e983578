from __future__ import annotations

import errno
import io
import json
import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

from polyrhythm.api import observed_run
from polyrhythm.api.evaluate import evaluate
from polyrhythm.api.observed_run import choose_folder, create_folder, discard_folder
from polyrhythm.api.train import train
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import RUN_FORMAT, check_format, configure
from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated, Event, InputWaited, RunEnded
from polyrhythm.reporting.event_log import read_events
from polyrhythm.reporting.loggers import TensorBoardWriter
from polyrhythm.roles.job import CheckpointConfig


def test_a_new_folder_is_named_by_time_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = choose_folder(None, "mixed-mlp")
    assert re.fullmatch(r"runs/\d{8}-\d{6}-mixed-mlp", str(chosen))
    assert not Path("runs").exists()


def test_runs_of_one_second_get_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(observed_run.time, "strftime", lambda _: "now")
    for name in ("now-a", "now-a-2", "now-a-3"):
        chosen = choose_folder(None, "a")
        assert chosen == Path("runs", name)
        chosen.mkdir(parents=True)


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    assert choose_folder(tmp_path, "a") == tmp_path


def test_what_is_left_to_us_is_written_down(tmp_path: Path) -> None:
    config = configure({"data": "digits", "model": "mlp", "strategy": "parameter_server", "workers": 4})
    folder = tmp_path / "a" / "run"
    create_folder(folder, config, assemble(config, CheckpointConfig(folder=folder)))
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["epochs"] == 30
    assert written["optimizer"] == "sgd(lr=0.075, momentum=0.0)"
    environment = json.loads((folder / "environment.json").read_text())
    assert {"polyrhythm", "python", "torch", "cpu", "cores", "command"} <= environment.keys()


def test_discard_leaves_other_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        Path("runs", name).mkdir(parents=True)
    discard_folder(Path("runs/mine"))
    assert [path.name for path in Path("runs").iterdir()] == ["other"]
    discard_folder(Path("runs/other"))
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = configure({"data": "digits", "model": "mlp"})
    job = assemble(config, CheckpointConfig())
    with pytest.raises(RequestError, match=r"cannot write into .*file/run: Not a directory; name another"):
        create_folder(tmp_path / "file" / "run", config, job)


class FullDisk:
    """An observer that can write nothing, not even at the end."""

    def on_event(self, event: Event) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_observer_that_cannot_write_ends_no_run_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Event] = []

    class Kept(FullDisk):
        def on_event(self, event: Event) -> None:
            seen.append(event)

    run = train(
        data="digits", model="mlp(hidden=[4])", epochs=1, workers=1, batch_size=512, out=tmp_path / "run",
        observers=[FullDisk(), Kept()],
    )  # fmt: skip
    assert run is not None
    assert run.outcome == "done"
    *_, notice, end = read_events(tmp_path / "run" / "events.jsonl")
    assert isinstance(end, RunEnded)
    assert (
        notice.to_json()["text"]
        == f"FullDisk could not write {len(seen) - 1} times (No space left on device)"
    )
    said = capsys.readouterr().err
    assert (
        f"FullDisk could not write {len(seen) + 1} times (No space left on device); the run continued" in said
    )
    assert "Kept could not write 1 time (No space left on device); the run continued" in said


def test_half_a_record_of_tensorboard_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TensorBoardWriter(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    writer.close()
    monkeypatch.setattr(writer, "_file", ShortOfRoom(path, room=10))
    with pytest.raises(OSError, match="No space left"):
        writer.on_event(Evaluated(time_s=1.0, epoch=1, test_loss=1.0, test_top1=0.5, test_top5=0.9))
    assert path.read_bytes() == whole
    writer.close()


class ShortOfRoom(io.FileIO):
    def __init__(self, path: Path, room: int) -> None:
        super().__init__(path, "ab")
        self._room = room

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return super().write(data[: self._room])


def test_a_run_of_a_later_format_is_refused_by_every_reader(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = configure({"data": "digits", "model": "mlp"})
    create_folder(folder, config, assemble(config, CheckpointConfig(folder=folder)))
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["format"] == RUN_FORMAT
    check_format(folder)
    later = environment | {"format": RUN_FORMAT + 1, "polyrhythm": "9.1"}
    (folder / "environment.json").write_text(json.dumps(later))
    words = rf"run has format {RUN_FORMAT + 1}, .* use the one that wrote it, Polyrhythm 9\.1$"
    with pytest.raises(RequestError, match=words):
        train(resume=folder)
    with pytest.raises(RequestError, match=words):
        evaluate(folder)
    for text in (
        "",
        "{",
        "[]",
        '{"format": "2"}',
        '{"polyrhythm": "0.1"}',
    ):  # of a version before, or damaged
        (folder / "environment.json").write_text(text)
        check_format(folder)


def test_a_run_records_how_long_its_tests_waited_for_images(tmp_path: Path) -> None:
    """Images in memory are not waited for; those of the last test are followed by no step that could report them."""
    for part, pictures in (("train", 6), ("test", 2)):
        for name in ("cat", "dog"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for number in range(pictures):
                Image.new("RGB", (12, 12), (40 * number, 80, 160)).save(
                    tmp_path / "data" / part / name / f"{number}.png"
                )
    waits = {}
    for data in ("digits", str(tmp_path / "data")):
        folder = tmp_path / f"run of {Path(data).name}"
        train(
            data=data, image_size=8, model="mlp(hidden=[4])", epochs=2, workers=1, batch_size=512, out=folder
        )
        events = read_events(folder / "events.jsonl")
        waits[data] = [event.testing_s for event in events if isinstance(event, InputWaited)]
    assert not any(waits["digits"])
    assert sum(seconds > 0 for seconds in waits[str(tmp_path / "data")]) == 1
