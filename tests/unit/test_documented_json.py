"""Every key that a verb prints stands on the page of all keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import polyrhythm

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()


def documented(verb: str) -> set[str]:
    """Gives the names that the page holds in a section, or in a row, that is about a verb."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    own = [section for section in sections if f"`{verb}`" in section.partition("\n")[0]]
    found = own or re.findall(rf"^\| `{verb}` \|.*$", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", "".join(found)))


def keys(value: Any) -> set[str]:
    """Gives the keys of a dict, or of the dicts of a list."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    return {key for entry in entries for key in entry}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("json") / "run"
    return polyrhythm.simulate(cluster="office", data="digits", model="mlp", workers=2, epochs=1, out=folder)


def test_of_a_run(run: Any) -> None:
    assert keys(run.figures) <= documented("simulate")
    for part in ("staleness", "held_back", "per_class"):
        assert keys(run.figures[part]) <= documented("simulate"), part


def test_of_a_dry_run(tmp_path: Path) -> None:
    dry = polyrhythm.simulate(
        cluster="office", gradients="none", strategy="parameter_server", workers=2, steps=2, model="mlp",
        out=tmp_path / "run",
    )  # fmt: skip
    assert keys(dry.figures) <= documented("simulate")


def test_of_a_test(run: Any) -> None:
    found = polyrhythm.evaluate(run.folder)
    assert keys(found) <= documented("evaluate")
    assert keys(found["confused"]) <= documented("evaluate")


def test_of_a_prediction(run: Any, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("L", (8, 8), 200).save(tmp_path / "grey.png")
    found = polyrhythm.predict(tmp_path / "grey.png", run.folder)
    assert keys(found) | keys(found["images"]) <= documented("predict")


def test_of_what_is_known_without_a_run() -> None:
    assert keys(polyrhythm.strategies()) <= documented("strategies")
    assert keys(polyrhythm.analyze(data="digits", model="mlp")) <= documented("analyze")


def test_of_the_reason_why_a_run_took_so_long(run: Any) -> None:
    found = polyrhythm.why(run.folder).to_json()
    assert keys(found) | keys(found["changes"]) <= documented("why")
