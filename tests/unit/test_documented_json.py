"""Every key that a verb prints stands on the page of all keys."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import polyrhythm
from polyrhythm.api.compare import compare_runs
from polyrhythm.cli.main import command_line
from polyrhythm.launch.doctor import examine
from polyrhythm.reporting.search import Search, Tried

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

    Image.new("L", (8, 8), 200).save(tmp_path / "gray.png")
    found = polyrhythm.predict(tmp_path / "gray.png", run.folder)
    assert keys(found) | keys(found["images"]) <= documented("predict")


def test_of_what_is_known_without_a_run() -> None:
    assert keys(polyrhythm.strategies()) <= documented("strategies")
    assert keys(polyrhythm.analyze(data="digits", model="mlp")) <= documented("analyze")


def test_of_the_reason_why_a_run_took_so_long(run: Any) -> None:
    found = polyrhythm.why(run.folder).to_json()
    assert keys(found) | keys(found["changes"]) <= documented("why")


def test_of_a_search() -> None:
    trial = Tried(number=0, folder="trial-0000", parameters={}, options={}, value=0.9, state="done")
    search = Search(
        method="tpe", goal="top1", budget="1 trials", maximize=True, simulated=True, trials=[trial], importance={}
    )  # fmt: skip
    found = search.to_json()
    assert keys(found) | keys(found["trials"]) <= documented("tune")


def test_of_a_comparison(run: Any, tmp_path: Path) -> None:
    again = shutil.copytree(run.folder, tmp_path / "again")
    found = compare_runs([run.folder, again], "top1=0.1", tmp_path / "compared").comparison.to_json()
    assert keys(found) | keys(found["rows"]) <= documented("compare")


def test_of_what_a_network_costs_by_layer() -> None:
    found = polyrhythm.analyze(data="digits", model="mlp")
    for part in ("layers", "strategies", "memory", "model_parallelism"):
        assert keys(found[part]) <= documented("analyze"), part


def test_of_what_a_machine_allows(tmp_path: Path) -> None:
    (check, *_) = examine(tmp_path / "run", 2)
    assert keys(asdict(check)) <= documented("doctor")


def test_every_verb_that_prints_json_has_a_section() -> None:
    told = {
        name
        for name, verb in get_command(command_line()).commands.items()  # type: ignore[attr-defined]
        if any("--json" in option.opts for option in verb.params)
    }
    assert {name for name in told if not documented(name)} == set()
