"""Commands in README and tutorials print what these pages show, apart from numbers."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("nbformat")
pytestmark = pytest.mark.timeout(600)  # a page's commands, one after the other
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "scripts" / "build_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["build_site"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_print_what_the_page_shows(
    site: ModuleType, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "LONGEST_LINES", 10_000)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    blocks = site.BLOCK.findall(page.read_text())
    assert blocks
    for line, shown in (each for block in blocks for each in site.shown_commands(block)):
        printed = site.run(line, tmp_path, page.name).printed
        missing = site.first_missing(shown, printed)
        assert missing is None, f"{line}\ndid not print: {missing}\n{printed}"
