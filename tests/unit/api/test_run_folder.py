from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from polyrhythm.api import observed_run
from polyrhythm.api.observed_run import choose_folder, create_folder, discard_folder
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
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
    assert re.fullmatch(r"sgd\(lr=[\d.]+\)", written["optimizer"])
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
