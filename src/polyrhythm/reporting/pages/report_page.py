"""The page around a report: its style, its script, and the frame that forbids any request to elsewhere."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from importlib.metadata import metadata
from typing import TYPE_CHECKING

from polyrhythm.escaping import html as escape
from polyrhythm.escaping import json_text
from polyrhythm.reporting.quantities import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from polyrhythm.reporting.pages.plots import Plot

# No address is allowed at all: the page shows itself, offline, for ever.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)

STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --panel: #ffffff; --ink: #1d2026; --soft: #666d79;
  --rule: #e4e4df; --accent: #2f6fc4; --good: #23804f; --alarm: #a3400f; --alarm-paper: #fdf1e7; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171b; --panel: #1b1e24; --ink: #e4e6ea;
  --soft: #98a0ad; --rule: #2d313a; --accent: #7db0f5; --good: #62c793; --alarm: #f2a56b;
  --alarm-paper: #2e2219; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.6rem, 4vw, 2.3rem); line-height: 1.2; margin: 0 0 .35rem; letter-spacing: -.01em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 3rem 0 1rem; padding-top: 1.1rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 0; }
p { margin: .3rem 0; }
.soft { color: var(--soft); }
.small { font-size: .875rem; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .875em; }
.banner { border-left: 4px solid var(--alarm); background: var(--alarm-paper); padding: .7rem 1rem;
  margin: 0 0 1.8rem; border-radius: 0 6px 6px 0; overflow-wrap: anywhere; }
.banner strong { color: var(--alarm); }
.tiles { display: flex; flex-wrap: wrap; align-items: flex-end; gap: 1.1rem 2.4rem;
  margin: 1.8rem 0 0; padding: 0; }
.tile dt { color: var(--soft); font-size: .875rem; }
.tile dd { margin: 0; font-size: 1.45rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile.main { flex-basis: 100%; }
.tile.main dd { font-size: clamp(3rem, 9vw, 4.4rem); font-weight: 650; line-height: 1; letter-spacing: -.03em;
  color: var(--ink); }
.tile.good dd { color: var(--good); }
.tile.bad dd { color: var(--alarm); }
.answer { font-size: 1.1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.2rem; }
figure { margin: 0; min-width: 0; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
  padding: 1rem 1rem .4rem; }
figure.wide { grid-column: 1 / -1; }
.plots figcaption { padding-right: 3.8rem; }
.plot .modebar { top: -2.9rem !important; right: -.3rem !important; }
figcaption p { color: var(--soft); font-size: .875rem; margin: .1rem 0 .4rem; }
.plot { height: 300px; }
.wide .plot { height: 360px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th { text-align: left; font-weight: 500; color: var(--soft); }
th, td { padding: .38rem 1.2rem .38rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.facts th { width: 15rem; white-space: nowrap; }
.best td { font-weight: 650; }
.stack th, .stack td { padding-right: .8rem; vertical-align: bottom; }
.stack td:not(.number) { min-width: 3rem; overflow-wrap: normal; }
.stack .number { text-align: right; white-space: nowrap; }
.stack th.number { white-space: normal; }
.share { display: inline-block; width: 5rem; height: .5rem; margin-left: .7rem; border-radius: 3px;
  background: linear-gradient(to right, var(--accent) var(--part), var(--rule) var(--part)); }
.interval { display: block; font-size: .875rem; font-weight: 400; letter-spacing: 0; line-height: 1.5;
  color: var(--soft); margin-top: .5rem; }
.confusion { width: auto; font-size: .8125rem; }
.confusion td, .confusion th { padding: .2rem .45rem; text-align: right; min-width: 2.1rem; white-space: nowrap; }
.confusion th[scope=col] { vertical-align: bottom; }
.confusion th[scope=col] span { writing-mode: vertical-rl; transform: rotate(180deg); max-height: 9rem;
  overflow: hidden; white-space: nowrap; }
.hit { background: color-mix(in srgb, var(--good) var(--part), transparent); }
.miss { background: color-mix(in srgb, var(--alarm) var(--part), transparent); }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); gap: .8rem; }
.sample { padding: .5rem; font-size: .8125rem; text-align: center; overflow-wrap: anywhere; }
.sample img { max-width: 100%; min-width: 3rem; image-rendering: pixelated; margin: 0 .1rem; }
.copyable { position: relative; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: .9rem 1rem;
  margin: .6rem 0; overflow-x: auto; }
.copyable pre { padding-right: 5rem; white-space: pre-wrap; overflow-wrap: anywhere; }
button { position: absolute; top: .55rem; right: .55rem; font: inherit; font-size: .8125rem;
  padding: .2rem .65rem; color: var(--ink); background: var(--paper); border: 1px solid var(--rule);
  border-radius: 6px; cursor: pointer; }
button:hover { border-color: var(--accent); }
a { color: var(--accent); }
summary { cursor: pointer; color: var(--soft); }
ul { padding-left: 1.2rem; }
footer { margin-top: 3rem; color: var(--soft); font-size: .875rem; }
@media (max-width: 560px) {
  main { padding: 1.5rem .9rem 3rem; }
  figure { padding: .8rem .5rem .2rem; }
  .facts th, .facts td { display: block; width: auto; padding-right: 0; }
  .facts th { border-bottom: 0; padding-bottom: 0; }
  .facts td { padding-top: 0; }
  .share { display: none; }
  .confusion { font-size: .6875rem; }
  .confusion td, .confusion th { padding: .2rem .15rem; min-width: 1.5rem; }
  .stack thead { display: none; }
  .stack, .stack tbody, .stack tr, .stack td, .stack td.number { display: block; text-align: left;
    white-space: normal; }
  .stack tr { border-bottom: 1px solid var(--rule); padding: .5rem 0; }
  .stack td { border: 0; padding: .1rem 0; }
  .stack td:not(.number) { overflow-wrap: anywhere; }
  .stack td:not(:first-child) { display: flex; justify-content: space-between; gap: 1rem; text-align: right; }
  .stack td::before { content: attr(data-head); color: var(--soft); font-weight: 400; padding-right: .6rem;
    text-align: left; overflow-wrap: normal; }
}
@media print { * { print-color-adjust: exact; } .plots { display: block; }
  figure { break-inside: avoid; margin-bottom: 1rem; }
  button { display: none; } }
"""

_SCRIPT = """
async function library() {
  const packed = document.getElementById("library")?.textContent;
  if (!packed) return;
  const bytes = Uint8Array.from(atob(packed), letter => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}
const plots = JSON.parse(document.getElementById("plots").textContent);
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function draw() {
  const axis = {gridcolor: color("--rule"), linecolor: color("--rule"), automargin: true};
  plots.forEach((plot, index) => {
    const layout = {...plot.layout,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--soft")},
      hoverlabel: {bgcolor: color("--panel"), bordercolor: color("--rule"), font: {color: color("--ink")}},
      margin: {l: 8, r: 8, t: 8, b: 8},
      modebar: {bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: color("--accent")},
      xaxis: {...axis, ...plot.layout.xaxis}, yaxis: {...axis, ...plot.layout.yaxis}};
    const data = structuredClone(plot.data);  // plotly writes into what it is given
    const box = document.getElementById("plot-" + index);
    const named = data.filter(trace => trace.showlegend !== false && trace.name);
    const below = layout.showlegend && layout.legend?.yanchor === "top";
    const narrow = box.clientWidth < 560;
    if (below && narrow) for (const trace of named) trace.name = trace.name.replace(/^(.{12,34}), /, "$1,<br>");
    // On a phone a legend below has a line a name, for which the plot itself would shrink to nothing.
    const columns = narrow ? 1 : Math.floor(box.clientWidth / 300);
    const legend = below ? named.reduce((sum, trace) => sum + (trace.name.includes("<br>") ? 47 : 26), 0) / columns : 0;
    // A bar is as high as its label, which may have several lines.
    const bars = data.filter(trace => trace.orientation === "h").flatMap(trace => trace.y);
    const lines = Math.max(0, ...bars.map(name => String(name).split("<br>").length));
    const height = Math.max(below ? 330 + legend : 0, lines > 1 ? 70 + 16 * lines * bars.length : 0);
    box.style.height = height ? height + "px" : "";
    if (below) layout.legend = {...layout.legend, y: -0.2};
    Plotly.react(box, data, layout, {responsive: true, displaylogo: false,
      modeBarButtons: [["toImage", "resetScale2d"]], toImageButtonOptions: {format: "svg", filename: "plot"}});
  });
}
globalThis.drawn = library().then(() => {
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
});
for (const button of document.querySelectorAll("button")) {
  button.addEventListener("click", async () => {
    const block = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(block.textContent);
    } catch {  // not allowed here: leave it selected instead
      getSelection().selectAllChildren(block);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
"""


def section(heading: str, body: str) -> str:
    """Return a section of a page; nothing where it has no body."""
    return f"<section><h2>{escape(heading)}</h2>\n{body}</section>" if body else ""


def curves(
    drawn: Sequence[Plot], others: str, *, below: Sequence[str] = (), wide: Container[int] = (0,)
) -> str:
    """Return the section of a page's plots.

    Args:
        drawn: the plots.
        others: source of the same numbers without JavaScript, such as "the table above does".
        below: HTML under each plot; empty: none.
        wide: the plots that take the whole width.
    """
    boxes = [
        f"<figure{' class=wide' if index in wide else ''}><figcaption><h3>{escape(plot.title)}</h3>"
        f'<p>{escape(plot.caption)}</p></figcaption><div class="plot" id="plot-{index}"></div>'
        f"{below[index] if below else ''}</figure>"
        for index, plot in enumerate(drawn)
    ]
    hint = f"<noscript><p>The curves need JavaScript; {others} not.</p></noscript>"
    return section("Curves", f'{hint}<div class="plots">{"".join(boxes)}</div>' if boxes else "")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], best: Container[int] = ()) -> str:
    """Return a table with rows that are stacked on a small screen.

    Args:
        heads: headings of the columns.
        rows: cells, as HTML; columns of numbers are aligned on the right.
        best: numbers of the rows that stand out.
    """
    rows = list(rows)
    columns = [[re.sub("<[^>]*>", "", row[column]) for row in rows] for column in range(len(heads))]
    kinds = [
        ' class="number"' if place and all(map(_is_number, cells)) else ""
        for place, cells in enumerate(columns)
    ]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(heads, kinds, strict=True)
    )
    lines = []
    for index, cells in enumerate(rows):
        line = "".join(
            f'<td{kind} data-head="{escape(name)}">{cell}</td>'
            for name, kind, cell in zip(heads, kinds, cells, strict=True)
        )
        lines.append(f"<tr{' class=best' if index in best else ''}>{line}</tr>")
    return (
        f'<div class="scroll"><table class="stack"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _is_number(text: str) -> bool:
    return not text or text in (UNKNOWN, "not reached", "not known") or bool(re.match(r"[-+]?[0-9]", text))


def prose(text: str) -> str:
    """Return a text as HTML, in which what is in backticks is code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def written_at() -> str:
    """Return the date of now, for the head of a page."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def command_to_copy(command: str) -> str:
    """Return a command line with a button that copies it; nothing if there is none."""
    if not command:
        return ""
    button = '<button type="button">Copy</button>'
    return f'<div class="copyable"><pre><code>{escape(command)}</code></pre>{button}</div>'


@cache
def _package() -> tuple[str, str]:
    """Return the package's version, and a link to the documentation that it declares, else where it is."""
    installed = metadata("polyrhythm")
    for entry in installed.get_all("Project-URL") or ():
        label, _, address = entry.partition(", ")
        if label == "Documentation":
            return installed["Version"], f'<a href="{escape(address)}">documentation</a>'
    where = "documentation: <code>docs/</code> of the source, <code>polyrhythm --help</code>"
    return installed["Version"], where


def page(title: str, sections: Iterable[str], drawn: Sequence[Plot] = (), source: str = "") -> str:
    """Return a whole HTML document that needs nothing but itself.

    Args:
        title: title of the window.
        sections: HTML, in order; empty ones are omitted.
        drawn: plots; plot `i` is drawn into the element `plot-i`; without plots the library is omitted.
        source: source of the page's numbers, for its last line.
    """
    plots = [plot.to_json() for plot in drawn]
    # A "<" inside a script could end it.
    described = json_text(plots).replace("<", "\\u003c")
    library = f'<script type="text/plain" id="library">{_library()}</script>' if plots else ""
    version, documentation = _package()
    made = (
        f"<footer>Polyrhythm {escape(version)}, written {written_at()}"
        f"{f' from {source}' if source else ''}; {documentation}. This page needs no network.</footer>"
    )
    body = "\n".join(filter(None, [*sections, made]))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} – Polyrhythm</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
{library}
<script type="application/json" id="plots">{described}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _library() -> str:
    """Return plotly.js as base64 of gzip, a twelfth of what its whole distribution takes; browsers unpack it."""
    packed = resources.files(__package__).joinpath("plotly-basic.min.js.gz").read_bytes()
    return base64.b64encode(packed).decode("ascii")
