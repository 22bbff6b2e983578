"""Every plot of a page as a picture: PNG, SVG or PDF, drawn by plotly as the page draws it.

    report.html ─ plot 0, plot 1, … ─▶ plots/training-loss.png, plots/test-accuracy-over-epochs.png, …

Kaleido opens the plots in a Chrome or Chromium of this machine; both packages are the extra `plots`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from polyrhythm.errors import RequestError, unknown
from polyrhythm.reporting.pages.plots import Plot

FORMATS = ("png", "svg", "pdf")
FOLDER = "plots"
_WIDTH, _HEIGHT, _SCALE = 900, 540, 2
"""In CSS pixels, of which a PNG has `_SCALE` squared each."""


def write_plots(drawn: Sequence[Plot], folder: Path, formats: Collection[str]) -> list[Path]:
    """Write every plot into a folder, and return the files.

    Args:
        drawn: the plots of a page.
        folder: is made if it is not there.
        formats: of `FORMATS`.

    Raises:
        RequestError: a format is none of these, the extra `plots` or a browser is missing, or the folder cannot be
            written.
    """
    for name in formats:
        if name not in FORMATS:
            raise unknown("format of plots", name, FORMATS)
    try:
        import plotly.io
        from kaleido.errors import KaleidoError
        from plotly.graph_objects import Figure
    except ImportError:
        raise RequestError(
            "pictures of plots need plotly and kaleido: pip install 'polyrhythm[plots]'"
        ) from None
    figures, files = [], []
    for plot in drawn:
        figure = Figure(plot.to_json())
        figure.update_layout(title={"text": plot.title}, template="plotly_white", colorway=None)
        for name in formats:
            figures.append(figure)
            files.append(folder / f"{_slug(plot.title)}.{name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if figures:
            plotly.io.write_images(fig=figures, file=files, width=_WIDTH, height=_HEIGHT, scale=_SCALE)
    except (KaleidoError, RuntimeError) as error:  # plotly tells of a missing browser by a RuntimeError
        raise RequestError(
            "pictures of plots are drawn by Chrome or Chromium, which is missing or does not start "
            f"({type(error).__name__}): install one, or save single plots as SVG from the report itself"
        ) from None
    except OSError as error:
        raise RequestError(f"cannot write into {folder}: {error.strerror or error}") from None
    return files


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")
