"""Every plot of a report as a picture, and what is said where that cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from browser import chromium
from polyrhythm.cli.main import _status
from polyrhythm.errors import RequestError
from polyrhythm.events import Event
from polyrhythm.reporting.event_log import EventLog
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.pages.plots import plots, write_plots


@pytest.mark.skipif(chromium() is None, reason="needs a browser: apt-get install chromium")
def test_every_plot_of_a_report_becomes_a_picture(tmp_path: Path, story: list[Event]) -> None:
    pytest.importorskip("kaleido")
    story = story[:3]  # of which there are plots enough: the browser draws each three times
    log = EventLog(tmp_path / "events.jsonl")
    for event in story:
        log.on_event(event)
    log.close()
    assert _status(["report", str(tmp_path), "--plots", "png, svg,pdf"]) == 0
    titles = [plot.title for plot in plots(RunFigures.of(story))]
    written = sorted(path.name for path in (tmp_path / "plots").iterdir())
    names = [title.lower().replace(" ", "-") for title in titles]
    assert written == sorted(f"{name}.{form}" for name in names for form in ("png", "svg", "pdf"))
    starts = {".png": b"\x89PNG", ".svg": b"<svg", ".pdf": b"%PDF"}
    assert all(path.read_bytes().startswith(starts[path.suffix]) for path in (tmp_path / "plots").iterdir())
    assert "images seen by all workers" in (tmp_path / "plots" / "training-loss.svg").read_text()


def test_what_cannot_be_drawn_is_said(
    tmp_path: Path, story: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = plots(RunFigures.of(story))
    with pytest.raises(RequestError, match="unknown format of plots 'gif'"):
        write_plots(drawn, tmp_path / "plots", ["gif"])
    monkeypatch.setitem(sys.modules, "kaleido.errors", None)
    with pytest.raises(RequestError, match=r"pip install 'polyrhythm\[plots\]'"):
        write_plots(drawn, tmp_path / "plots", ["png"])
    assert not (tmp_path / "plots").exists()
