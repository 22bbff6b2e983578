"""What a wheel of this project holds, what it needs, and what somebody finds who has installed it."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import polyrhythm
from polyrhythm.config import recipe
from polyrhythm.data.sources import digits
from polyrhythm.errors import RequestError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Builds one from a copy of what it is made of, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("src", "recipes", "examples"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    code = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.split()[-1])


def test_a_wheel_holds_the_package_with_its_files(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    source = ROOT / "src"
    modules = {str(path.relative_to(source)) for path in source.rglob("polyrhythm/**/*.py")}
    files = {
        str(path.relative_to(source))
        for pattern in ("clusters/*.yaml", "price_lists/*.yaml", "plotly*", "py.typed")
        for path in source.rglob(pattern)
    }
    assert len(files) > 5
    assert modules | files <= held
    for folder, kinds in (("recipes", "*.yaml"), ("examples", "*.py"), ("examples", "*.sh")):
        for path in (ROOT / folder).rglob(kinds):
            shared = f"data/share/polyrhythm/{path.relative_to(ROOT)}"
            assert any(name.endswith(shared) for name in held), path


def test_a_wheel_needs_few_packages_and_names_its_extras(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    metadata = wheel.read(name).decode()
    needs = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    always = {need.partition(">")[0] for need in needs if "extra ==" not in need}
    assert always == {
        *("torch", "torchvision", "timm", "numpy", "pillow"),
        *("safetensors", "pydantic", "pyyaml", "typer", "rich", "greenlet", "fsspec"),
    }
    extras = {line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    assert {"data", "tensorboard", "ray", "lightning", "accelerate", "search", "onnx", "parquet"} <= extras


def test_the_version_is_that_of_the_project() -> None:
    assert (
        polyrhythm.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    )


def test_recipes_are_found_where_they_were_installed(monkeypatch, tmp_path: Path) -> None:
    there = tmp_path / "share" / "polyrhythm" / "recipes"
    there.mkdir(parents=True)
    (there / "demo.yaml").write_text("epochs: 7\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert recipe.read_recipe(Path("recipes/demo.yaml")) == {"epochs": 7}
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "demo.yaml").write_text("epochs: 8\n")
    assert recipe.read_recipe(Path("recipes/demo.yaml")) == {"epochs": 8}  # one's own goes first
    with pytest.raises(RequestError, match=r"other\.yaml"):
        recipe.read_recipe(Path("recipes/other.yaml"))


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'polyrhythm\[data\]'"):
        digits.Digits().load()


def test_a_shell_completes_verbs(tmp_path: Path) -> None:
    asked = {
        "_POLYRHYTHM_COMPLETE": "complete_bash",
        "COMP_WORDS": "polyrhythm si",
        "COMP_CWORD": "1",
        "PATH": "",
    }
    code = "import sys; sys.argv = ['polyrhythm']; from polyrhythm.cli.entry import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=asked, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["simulate"], done.stderr


def test_training_imports_neither_what_simulates_nor_other_verbs() -> None:
    code = (
        "import sys, polyrhythm.api.train; from polyrhythm.cli.main import command_line; command_line('train'); "
        "print(*(each for each in sys.modules if 'simul' in each or each == 'polyrhythm.cli.plan'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
