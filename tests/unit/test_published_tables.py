"""The published measurements: every table has its source, units and rows of both kinds, and none is changed unseen."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from pydantic import ValidationError

FOLDER = Path(__file__).parents[2] / "benchmarks" / "published"
NAMES = sorted(file.stem for file in (FOLDER / "tables").iterdir())


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("published")
    del sys.modules["published"]


@pytest.mark.parametrize("name", NAMES)
def test_a_table_has_its_source_and_rows_to_fit_and_to_predict(published: ModuleType, name: str) -> None:
    table = published.read(FOLDER / "tables" / f"{name}.yaml")
    assert table.source.link.startswith("https://")
    for series in table.series:
        assert len(series.rows) >= 3
        assert all(row.figure > 0 for row in series.rows)
        assert max(row.workers for row in series.fitted) <= 8
        assert len(series.fitted) + len(series.predicted) == len(series.rows)


def test_at_least_twelve_tables_on_one_to_a_thousand_workers(published: ModuleType) -> None:
    tables = published.tables()
    assert len(tables) >= 12
    workers = {row.workers for table in tables.values() for row in table.rows}
    assert {1, 1024} <= workers


def series_of(published: ModuleType, *workers: int) -> object:
    rows = [{"workers": number, "value": "1.0"} for number in workers]
    plain = dict.fromkeys(("weights", "batch_per_worker", "precision", "algorithm"))
    return published.Series.model_validate({"network": "n", **plain, "family": "all-reduce", "rows": rows})


@pytest.mark.parametrize(
    ("workers", "fitted"),
    [
        ((1, 8, 16, 32), [1, 8]),
        ((1, 8, 8, 9), [1, 8, 8]),
        ((1, 2, 4, 8), [1, 2, 4]),
        ((2, 3, 6, 8), [2, 3]),
        ((1, 20, 100), [1]),
        ((1, 2, 3), [1]),
    ],
)
def test_rows_to_fit_have_eight_workers_or_half_of_eight_and_fewer(
    published: ModuleType, workers: tuple[int, ...], fitted: list[int]
) -> None:
    series = series_of(published, *workers)
    assert [row.workers for row in series.fitted] == fitted  # type: ignore[attr-defined]
    assert [row.workers for row in series.predicted] == [n for n in workers if n not in fitted]  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [(1, 8), (16, 32, 64), (8, 8, 8), (1, 2, 2048)])
def test_a_series_without_rows_of_both_kinds_is_refused(
    published: ModuleType, workers: tuple[int, ...]
) -> None:
    with pytest.raises(ValidationError):
        series_of(published, *workers)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("source", "link"), "http://example.org"),
        (("source", "published"), 2014),
        (("unit",), "s"),
        (("series", 0, "rows", 0, "value"), "1,000"),
        (("series", 0, "rows", 0, "value"), 1000),
        (("series", 0, "rows", 0, "nodes"), 1),
    ],
)
def test_a_table_of_another_form_is_refused(
    published: ModuleType, tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    content = yaml.safe_load((FOLDER / "tables" / f"{NAMES[0]}.yaml").read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    file = tmp_path / "table.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValidationError):
        published.read(file)


def test_the_page_lists_every_table_with_its_digest(published: ModuleType) -> None:
    """A changed or removed figure changes the page, so that it is seen in review."""
    page = (FOLDER / "README.md").read_text()
    listed = [line for line in page.splitlines() if line.startswith("| ") and "](tables/" in line]
    assert listed == published.overview()[2:], "python benchmarks/published/published.py prints the list"
