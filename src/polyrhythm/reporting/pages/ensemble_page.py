"""The page of an ensemble: what its members came to, alone and together, and the network that learned from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from polyrhythm.reporting.pages.report_page import page
from polyrhythm.reporting.quantities import counted, duration, percent


def render(figures: Mapping[str, Any], *, student: bool) -> str:
    """Return the HTML of an ensemble's report, which links to those of its runs.

    Args:
        figures: of the ensemble, as `train --json` prints them.
        student: whether they are those of a network that learned from the members.
    """
    members, folder = figures["members"], Path(figures["run"])
    title = f"Ensemble of {counted(len(members), 'network')}"
    rows = [_row(os.path.relpath(each["run"], folder), each) for each in members]
    if figures["ensemble"]:
        rows.append(_row("together", figures["ensemble"], "best"))
    if student:
        rows.append(_row("student", figures, linked=True))
    sections = [
        f"<header><h1>{escape(title)}</h1><p class=soft>{escape(str(figures['strategy']))} on "
        f"{escape(str(figures['data']))}, {counted(int(figures['workers']), 'worker')}</p></header>",
        '<section><h2>Networks</h2><div class="scroll"><table class="classes unbroken"><tr>'
        '<th scope="col">run</th><th scope="col">top-1</th><th scope="col">top-5</th><th scope="col">loss</th>'
        f'<th scope="col">time</th></tr>{"".join(rows)}</table></div>'
        "<p class=soft>Together: the mean of the members' probabilities."
        + (" The student learned from these, and is one network." if student else "")
        + "</p></section>",
        "<footer>Made by Polyrhythm; this page needs no network.</footer>",
    ]
    return page(f"{title} – Polyrhythm", "\n".join(sections), [])


def _row(name: str, tested: Mapping[str, Any], kind: str = "", *, linked: bool = False) -> str:
    link = linked or "run" in tested
    shown = f'<a href="{escape(name, quote=True)}/report.html">{escape(name)}</a>' if link else escape(name)
    found = {key: tested.get(key) for key in ("test_top1", "test_top5", "test_loss", "seconds")}
    cells = ["–" if (value := found[key]) is None else percent(value) for key in ("test_top1", "test_top5")]
    cells.append("–" if (loss := found["test_loss"]) is None else f"{loss:.4f}")
    cells.append("" if (seconds := found["seconds"]) is None else duration(seconds))
    others = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f"<tr{f' class={kind}' if kind else ''}><td>{shown}</td>{others}</tr>"
