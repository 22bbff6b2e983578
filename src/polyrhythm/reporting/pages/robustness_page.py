"""What pictures may suffer before networks err: a table and a plot a kind of change, as one page that opens offline."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from polyrhythm.errors import RequestError
from polyrhythm.reporting.pages.plots import Plot
from polyrhythm.reporting.pages.report_page import page

_COLOURS = ("#3b7dd8", "#e0752d", "#35a06a", "#c2477f", "#8a6fd1", "#b8901f", "#2a9aa8", "#d1504a")


def write_robustness(
    path: Path, data: str, models: Sequence[Mapping[str, Any]], pictures: Mapping[str, bytes]
) -> None:
    """Write the page.

    Args:
        path: of the file.
        data: name of the data set.
        models: as `polyrhythm.robustness` returns them.
        pictures: for every kind of change, a JPEG file: a picture as it is, and at every strength.

    Raises:
        RequestError: it cannot be written.
    """
    plots = robustness_plots(models)
    boxes = [
        f"<figure><figcaption><h3>{escape(plot.title)}</h3><p>{escape(plot.caption)}</p></figcaption>"
        f'<div class="plot" id="plot-{number}"></div>{_strip(decline["name"], pictures)}</figure>'
        for number, (plot, decline) in enumerate(zip(plots, models[0]["declines"], strict=True))
    ]
    body = (
        f"<header><h1>Robustness on {escape(data)}</h1></header>"
        f'<section><h2>Curves</h2><div class="plots">{"".join(boxes)}</div></section>'
        f"<section><h2>Figures</h2>{''.join(map(_table, models))}</section>"
    )
    try:
        path.write_text(page("Robustness – Polyrhythm", body, [plot.to_json() for plot in plots]), "utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path} ({error.strerror}): name another with --plot") from None


def robustness_plots(models: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Make a plot for every kind of change, with a line a model; step 0 is the picture as it is."""
    return [
        Plot(
            title=decline["name"].replace("_", " "),
            caption=f"Test top-1 under this {decline['kind']}, ever stronger.",
            traces=[
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": Path(model["weights"]).parent.name or model["weights"],
                    "x": [0, *decline["strengths"]],
                    "y": [model["clean_top1"], *model["declines"][number]["top1"]],
                    "line": {"color": _COLOURS[which % len(_COLOURS)]},
                }
                for which, model in enumerate(models)
            ],
            x="strength" if decline["kind"] == "augmentation" else "severity",
            y="test top-1",
            axes={"yaxis": {"range": [0, 1]}},
        )
        for number, decline in enumerate(models[0]["declines"])
    ]


def _strip(name: str, pictures: Mapping[str, bytes]) -> str:
    address = base64.b64encode(pictures[name]).decode("ascii")
    what = f"a test picture as it is, and under {name.replace('_', ' ')}, ever stronger"
    return f'<img style="width:100%" alt="{escape(what)}" src="data:image/jpeg;base64,{address}">'


def _summary(model: Mapping[str, Any]) -> str:
    mean = model.get("corrupted_top1")
    return "" if mean is None else f", {100 * mean:.1f} % on average over corruptions"


def _table(model: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(each["name"])}</th>'
        + "".join(
            f"<td>{100 * top1:.1f} % at {strength:g}</td>"
            for strength, top1 in zip(each["strengths"], each["top1"], strict=True)
        )
        + "</tr>"
        for each in model["declines"]
    )
    heading = (
        f"<h3>{escape(model['weights'])}: {100 * model['clean_top1']:.1f} % on the pictures as they are"
        f"{_summary(model)}</h3>"
    )
    return f'{heading}<div class="scroll"><table>{rows}</table></div>'
