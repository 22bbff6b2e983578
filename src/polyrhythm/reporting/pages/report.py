"""The report of a run: one HTML file which opens offline."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.errors import RequestError
from polyrhythm.escaping import html as escape
from polyrhythm.escaping import shell
from polyrhythm.reporting.event_log import LOG_FILE, read_events
from polyrhythm.reporting.figures import cache_line, noise_scale
from polyrhythm.reporting.held_back import gain_text, held_back
from polyrhythm.reporting.pages.plots import Plot, plots, timeline
from polyrhythm.reporting.pages.report_page import command_to_copy, curves, page, prose, section, table
from polyrhythm.reporting.quantities import counted, duration, percent, whole
from polyrhythm.reporting.summary import Summary, state_of, summarized, write_summary
from polyrhythm.reporting.tables import (
    class_rows,
    columns,
    environment_rows,
    fact_rows,
    facts,
    is_virtual,
    text,
)
from polyrhythm.reporting.timings import HEADING, remark, timing_table
from polyrhythm.run_files import exists_in_run, parse_json, read_in_run, read_json_in_run
from polyrhythm.user_files import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from polyrhythm.reporting.figures import RunFigures, ServerLoad

_MANY_CLASSES = 20
PREDICTION_FILE = "prediction.json"
"""In a run folder: the dry run of it."""


def write_report(folder: Path, claim: Unclaimed = UNCLAIMED) -> Path:
    """Write `report.html` and the run's summary into its folder, each whole or not at all; return the page's path.

    Raises:
        RequestError: the folder holds no readable run.
        OSError: the report cannot be written.
        Superseded: the folder is another's.
    """
    try:
        log = state_of(folder / LOG_FILE)  # taken before reading: later additions are then detected
    except OSError as error:
        raise RequestError(
            f"cannot read {folder / LOG_FILE}: {error.strerror}; give the folder of a run"
        ) from None
    figures, summary = _read(folder)
    write_summary(folder, log, summary, claim)
    html = render(figures, folder, _config(folder), _environment(folder))
    path = folder / "report.html"
    claim.write(path, html)
    return path


def read_figures(folder: Path) -> RunFigures:
    """Return the figures from the events of a run folder.

    Raises:
        RequestError: the folder holds no readable run.
    """
    return _read(folder)[0]


def _read(folder: Path) -> tuple[RunFigures, Summary]:
    figures, summary = summarized(read_events(folder / LOG_FILE))
    if summary is None:
        raise RequestError(f"{folder / LOG_FILE} holds no run that started; give the folder of another run")
    return figures, summary


def plots_of(figures: RunFigures, folder: Path) -> list[Plot]:
    """Return every plot of a run's report."""
    step = timeline(folder / "trace.json")
    return [*plots(figures), *([step] if step is not None else [])]


def _config(folder: Path) -> str:
    path = folder / "config.yaml"
    return read_in_run(path).decode(errors="replace") if exists_in_run(path) else ""


def _environment(folder: Path) -> dict[str, Any]:
    path = folder / "environment.json"
    if not exists_in_run(path):
        return {}
    found = parse_json(read_in_run(path), str(path))
    return found if isinstance(found, dict) else {"environment": found}


def render(figures: RunFigures, folder: Path, config: str, environment: Mapping[str, Any]) -> str:
    """Return the HTML of a report of a run that has started; sections without content are omitted."""
    known, drawn = facts(figures), plots_of(figures, folder)
    title = f"{known['model']} on {known['data']}"
    # The first plot takes the whole width; the last one too if it would stand alone in its row.
    lonely = len(drawn) - 1 if len(drawn) % 2 == 0 else 0
    sections = [
        _banner(figures),
        _headline(title, known, environment),
        section("Bottleneck", _bottleneck(figures)),
        curves(drawn, "the figures below do", wide=(0, lonely)),
        section("Prediction and run", _predicted(folder, figures, known)),
        section(HEADING, _timings(figures)),
        section("Source of the training images", _cache(figures)),
        section("Notices", _notices(figures)),
        _classes(with_intervals(class_rows(known.get("per_class", [])))),
        _confusion(known),
        _pictures(folder),
        section("Figures of the run", _fact_table(fact_rows(known))),
        section("How to repeat it", _repeat(folder, config, known) if config else ""),
        section("Environment", _fact_table(environment_rows(environment)) if environment else ""),
    ]
    return page(title, sections, drawn, source="the events of the run")


def _banner(figures: RunFigures) -> str:
    outcome = figures.ended.outcome if figures.ended else "unfinished"
    if outcome == "done":
        return ""
    what = {
        "interrupted": "This run was interrupted",
        "failed": "This run failed",
        "unfinished": "This run has not ended, or was killed",
    }.get(outcome, f"This run ended as {outcome}")
    error = figures.ended.result.get("error", "") if figures.ended else ""
    reason = f" {escape(str(error))}." if error else ""
    kept = (
        f" Its last checkpoint is <code>{escape(figures.checkpoint.path)}</code>."
        if figures.checkpoint
        else ""
    )
    return (
        f'<div class="banner" role="status"><strong>{escape(what)}</strong> '
        f"after {duration(figures.time_s)}: the figures below are incomplete.{reason}{kept}</div>"
    )


def _headline(title: str, known: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    written = {
        "test_top1": ("test top-1", percent),
        "test_top5": ("test top-5", percent),
        "seconds": ("virtual time" if is_virtual(known) else "time", duration),
        "images_per_s": ("images/s", whole),
        "workers": ("workers", whole),
        "servers": ("servers", whole),
    }
    more = [counted(known["epochs"], "epoch")]
    more += [f"simulated on {known['cluster']}"] if is_virtual(known) else []
    started = str(environment.get("started", ""))
    more += [f"{started[:10]} {started[11:16]} UTC"] if started.endswith("+0000") else []
    more += [f"Polyrhythm {environment['polyrhythm']}"] if "polyrhythm" in environment else []
    tiles = [
        f'<div class="tile{_standing(known) if name == "test_top1" else ""}">'
        f"<dt>{label}</dt><dd>{write(known[name])}{_interval(known) if name == 'test_top1' else ''}</dd></div>"
        for name, (label, write) in written.items()
        if name in known and (known[name] or name != "servers")
    ]
    return (
        f"<header><h1>{escape(title)}</h1>\n"
        f'<p class="soft"><code>{escape(str(known["strategy"]))}</code> · {escape(" · ".join(more))}</p>\n'
        f'<dl class="tiles">{"".join(tiles)}</dl></header>'
    )


def _guess(known: Mapping[str, Any]) -> float | None:
    """Return the accuracy of always predicting the most frequent class; None if class sizes are not known."""
    rows = class_rows(known.get("per_class", []))
    sizes: list[int] = [row["images"] for row in rows if isinstance(row.get("images"), int)]
    return max(sizes) / sum(sizes) if sum(sizes) else None


def _standing(known: Mapping[str, Any]) -> str:
    """Return the classes of the tile of the accuracy: `bad` if it may be that of guessing, `good` if far above it."""
    guess, interval = _guess(known), known.get("test_top1_interval")
    if guess is None:
        return " main"
    low = interval[0] if interval else known["test_top1"]
    if low <= guess:
        return " main bad"
    # Halfway and more of what guessing leaves to be learned.
    return " main good" if low >= (1 + guess) / 2 else " main"


def _interval(known: Mapping[str, Any]) -> str:
    found, guess, texts = known.get("test_top1_interval"), _guess(known), []
    if found and "test_images" in known:
        low, high = found
        texts.append(
            f"{percent(low)} to {percent(high)} with 95 % confidence, of {whole(known['test_images'])} images"
        )
    if guess is not None:
        texts.append(f"always predicting the most frequent class: {percent(guess)}")
    return f'<span class="interval">{escape("; ".join(texts))}</span>' if texts else ""


def with_intervals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of classes, with the 95 % confidence interval of recall, if there is one, as a text."""
    found = []
    for row in rows:
        columns = {name: value for name, value in row.items() if name != "recall_interval"}
        if "recall_interval" in row:
            low, high = row["recall_interval"]
            before = list(columns)[: list(columns).index("recall") + 1]
            columns = {
                **{name: columns[name] for name in before},
                "95 % interval of recall": f"{100 * low:.0f} to {100 * high:.0f} %",
                **{name: value for name, value in columns.items() if name not in before},
            }
        found.append(columns)
    return found


def _confusion(known: Mapping[str, Any]) -> str:
    """Return the confusion matrix as a table: true classes in rows, predicted classes in columns."""
    matrix, classes = (
        known.get("confusion"),
        [row.get("name", "") for row in class_rows(known.get("per_class", []))],
    )
    if not matrix or len(matrix) != len(classes):
        return ""
    head = "".join(f'<th scope="col"><span>{escape(str(name))}</span></th>' for name in classes)
    lines = []
    for index, (name, row) in enumerate(zip(classes, matrix, strict=True)):
        total = max(1, sum(row))
        cells = "".join(
            f'<td class="{"hit" if column == index else "miss"}" style="--part: {100 * count / total:.0f}%">'
            f"{count or ''}</td>"
            for column, count in enumerate(row)
        )
        lines.append(f'<tr><th scope="row">{escape(str(name))}</th>{cells}</tr>')
    table = f'<table class="confusion"><tr><td></td>{head}</tr>{"".join(lines)}</table>'
    note = "Rows are true classes, columns are predicted classes; deeper colors are larger shares of a row."
    return section("Confusion matrix", f'<p class="soft small">{note}</p><div class="scroll">{table}</div>')


def _pictures(folder: Path) -> str:
    """Return the most confident mistakes and augmented samples, if the run has kept some."""
    try:
        kept = read_json_in_run(folder / "pictures.json")
        mistakes, augmented = kept["mistakes"], kept["augmented"]
        wrong = [
            f'<figure class="sample">{_picture(each["png"], each["class"])}<figcaption>{escape(each["class"])}, taken '
            f"for {escape(each['predicted'])} ({percent(each['probability'])})</figcaption></figure>"
            for each in mistakes
        ]
        changed = [
            f'<figure class="sample">{"".join(_picture(png, each["class"]) for png in each["pngs"])}<figcaption>'
            f"{escape(each['class'])}</figcaption></figure>"
            for each in augmented
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    caption = "The most confident mistakes; predictions.csv has all test images."
    shown = section(
        "Worst mistakes", f'<p class="soft small">{caption}</p>{_gallery(wrong)}' if wrong else ""
    )
    caption = "The first training images as they are, and as the network sees them in the first epoch."
    return shown + section(
        "Augmented samples", f'<p class="soft small">{caption}</p>{_gallery(changed)}' if changed else ""
    )


def _gallery(figures: Sequence[str]) -> str:
    return f'<div class="gallery">{"".join(figures)}</div>'


def _picture(png: str, label: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9+/=]*", png):
        raise ValueError("not an image in base64")
    return f'<img alt="{escape(label)}" src="data:image/png;base64,{png}">'


def _fact_table(rows: Sequence[tuple[str, str]]) -> str:
    lines = [
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(value)}</td></tr>' for label, value in rows
    ]
    return f'<table class="facts">{"".join(lines)}</table>'


def _classes(rows: Sequence[Mapping[str, Any]]) -> str:
    names = columns(rows)
    shown = table(
        ["class" if name == "name" else name.replace("_", " ") for name in names],
        [[_class_cell(row.get(name, "")) for name in names] for row in rows],
    )
    if len(rows) > _MANY_CLASSES:
        shown = f"<details><summary>{counted(len(rows), 'row')}</summary>{shown}</details>"
    return section("Accuracy by class", shown if rows else "")


def _class_cell(value: Any) -> str:
    if isinstance(value, float) and 0 <= value <= 1:
        return f'{percent(value)}<span class="share" style="--part: {100 * value:.1f}%"></span>'
    return escape(text(value))


def _notices(figures: RunFigures) -> str:
    items = [
        f'<li><span class="soft">{duration(notice.time_s)}</span> {escape(notice.text)}</li>'
        for notice in figures.notices
    ]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _bottleneck(figures: RunFigures) -> str:
    found = held_back(figures)
    if found is None:
        return ""
    texts = [f'<p class="answer">{prose(found.problem[:1].upper() + found.problem[1:])}.</p>']
    if found.remedy:
        gain = f": up to {gain_text(found.remedy_gain)}" if found.remedy_gain else ""
        texts.append(f"<p>Remedy: {prose(found.remedy)}{gain}.</p>")
    texts.append(f'<p class="soft">Time of the workers: {escape(found.time)}.</p>')
    if found.lock_step:
        texts.append(f'<p class="soft">Asynchrony: {escape(found.lock_step.text)}.</p>')
    loads = [f"<li>{_load(server, load)}</li>" for server, load in sorted(figures.server_loads.items())]
    texts += [f"<ul>{''.join(loads)}</ul>"] if loads else []
    noise = noise_scale(figures.noise)
    texts += [f'<p class="soft">Batch size: {escape(noise["text"])}.</p>'] if noise else []
    return "".join(texts)


def _cache(figures: RunFigures) -> str:
    return f"<p>{cache_line(figures.cache.to_json())}</p>" if figures.cache else ""


def _timings(figures: RunFigures) -> str:
    if not figures.timings:
        return ""
    found = figures.timings.to_json()
    head, *rows = timing_table(found)
    note = f'<p class="soft small">{escape(remark(found))}</p>'
    return table(head, [list(map(escape, row)) for row in rows]) + note


def _load(server: int, load: ServerLoad) -> str:
    dropped = f", {counted(load.dropped, 'late gradient')} dropped" if load.dropped else ""
    return (
        f"server {server}: busy {percent(load.busy_share)} of the time, a queue of {load.queue:.1f}{dropped}"
    )


def _predicted(folder: Path, figures: RunFigures, known: Mapping[str, Any]) -> str:
    """Return the dry run of a run next to the run itself, if one was made of it (`PREDICTION_FILE`)."""
    try:
        prediction = read_json_in_run(folder / PREDICTION_FILE)
        where, rate = str(prediction["cluster"]), float(prediction["images_per_s"])
        waiting, bound = float(prediction["waiting_share"]), str(prediction["held_back"])
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError):
        return ""
    happened = float(known.get("images_per_s", 0.0))
    rows: list[tuple[str, ...]] = [("images/s", whole(rate), whole(happened), _off(rate, happened))]
    if rate > 0 and happened > 0 and figures.images_seen:
        times = figures.images_seen / rate, figures.images_seen / happened
        rows.append(("time of these images", *map(duration, times), _off(*times)))
    rows.append(("waiting, of the step time", percent(waiting), percent(figures.waiting_share), ""))
    found = held_back(figures)
    rows.append(("bottleneck", bound, found.bottleneck if found else "", ""))
    heads = ("", "dry run", "run", "dry run is off by")
    note = f"A dry run in virtual time on {where}, without tests and checkpoints."
    return (
        table(heads, [list(map(escape, row)) for row in rows]) + f'<p class="soft small">{escape(note)}</p>'
    )


def _off(predicted: float, happened: float) -> str:
    return f"{100 * (predicted / happened - 1):+.1f} %" if happened > 0 else ""


def _options(known: Mapping[str, Any], config: str) -> str:
    if known.get("gradients") != "none":
        return ""
    recipe = parse_yaml(config, "config.yaml")
    by_epochs = isinstance(recipe, dict) and recipe.get("epochs") is not None
    return " --gradients none" + ("" if by_epochs else f" --steps {known.get('steps', 1)}")


def _repeat(folder: Path, config: str, known: Mapping[str, Any]) -> str:
    recipe = shell(folder / "config.yaml")
    command = f"polyrhythm train {recipe}"
    cluster = folder / "cluster.yaml"
    if exists_in_run(cluster):
        command = f"polyrhythm simulate {recipe} --cluster {shell(cluster)}{_options(known, config)}"
    return (
        f"{command_to_copy(command)}\n"
        f"<details><summary>config.yaml</summary><pre><code>{escape(config)}</code></pre></details>"
    )
