"""Scripts as users start them: as a module of a package, from standard input, with several joins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch.script import run_script

LOOP = """
import sys
from pathlib import Path
import torch
import polyrhythm

def train():
    model = torch.nn.Linear(2, 2)
    with polyrhythm.join("synchronous") as group:
        model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    Path(sys.argv[1], f"{group.rank}").write_text(f"{__package__} {group.workers}")

for _ in range(int(sys.argv[2])):
    train()
"""
PIPED = """
import polyrhythm
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, pictures):
        return self.layer(pictures.flatten(1))

if __name__ == "__main__":
    try:
        run = polyrhythm.train(data="digits", model=MODEL, workers=2, epochs=1, out="run", threads=1)
        print(run.outcome)
    except polyrhythm.RequestError as error:
        print(error)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "loop.py").write_text(LOOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_a_module_of_a_package_is_run_by_its_name(package: Path) -> None:
    run_script("package.loop", [str(package), "1"], workers=2, module=True)
    assert [(package / name).read_text() for name in "01"] == ["package 2"] * 2


@pytest.mark.parametrize("name", ["package.no", "no.loop", "package", "", "package..loop", "package/loop.py"])
def test_what_is_no_module_is_refused_before_anything_starts(package: Path, name: str) -> None:
    with pytest.raises(RequestError, match=r"^there is no module .*: give its name, such as package\.train"):
        run_script(name, [], workers=2, module=True)


def test_a_second_join_says_how_to_train_several_models(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match="left with status 1"):
        run_script(package / "package" / "loop.py", [str(package), "2"], workers=2)
    assert "start the script once for each model" in capfd.readouterr().err


def piped(folder: Path, model: str) -> str:
    """Train from a script in standard input; return its last line."""
    done = subprocess.run(
        [sys.executable, "-"],
        input=PIPED.replace("MODEL", model),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip().splitlines()[-1]


def test_a_script_from_standard_input_trains(tmp_path: Path) -> None:
    assert piped(tmp_path, '"mlp(hidden=[4])"') == "done"


def test_a_class_that_workers_cannot_import_is_named_before_anything_is_written(tmp_path: Path) -> None:
    line = piped(tmp_path, "Net()")
    assert line.startswith("model: Net is defined in a notebook, or in a script from standard input")
    assert not (tmp_path / "run").exists()
