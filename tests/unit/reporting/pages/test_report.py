import base64
import gzip
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import version

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated, Notice, RunEnded
from polyrhythm.reporting.event_log import EventLog
from polyrhythm.reporting.held_back import gain_text, held_back
from polyrhythm.reporting.pages.report import read_figures, write_report

LOADING = {"src", "href", "srcset", "data", "poster", "action", "background"}


class Page(HTMLParser):
    """Collects what a browser would: texts outside scripts, plots, and whatever is loaded from elsewhere."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.loads, self.policy = [], [], [], ""
        self.texts, self.plots, self.plot_boxes, self._script_id = [], None, [], None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if tag not in {"meta", "link", "br", "img"}:
            self.open.append(tag)
        self.loads += [value for name, value in attributes.items() if name in LOADING]
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        if "plot" in (attributes.get("class") or "").split():
            self.plot_boxes.append(attributes["id"])
        self._script_id = attributes.get("id") if tag == "script" else None

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._script_id = None

    def handle_data(self, data):
        if self._script_id == "plots":
            self.plots = json.loads(data)
        elif not self.open or self.open[-1] not in {"script", "style"}:
            self.texts.append(data.strip())

    @property
    def text(self):
        return " ".join(filter(None, self.texts))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: lenet5\nnote: <script>alert(2)</script>\n")
    (folder / "environment.json").write_text(
        json.dumps({"torch": "2.13.0+cpu", "cores": 2, "gpus": ["<none>"]})
    )
    return folder


def reported(folder, events):
    log = EventLog(folder / "events.jsonl")
    for event in events:
        log.on_event(event)
    log.close()
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_a_file_name_that_is_no_utf_8_is_shown(folder, story, ended):
    notice = Notice(time_s=2.0, text="1 file is left out: caf\udce9.png")
    assert "caf\\udce9.png" in reported(folder, [*story, notice, ended]).text


def test_a_report_shows_the_figures_of_the_run(folder, story, ended):
    page = reported(folder, [*story, ended])
    assert page.open == []
    assert page.text.startswith("lenet5 on fashion-mnist – Polyrhythm")
    for shown in (
        "test top-1 90.4 %",
        "test top-5 98.4 %",
        "time 1:02:05",
        "images/s 5,812",
        "workers 2",
        "servers 2",
        "parameter_server(servers=2, consistency=asynchronous) · 2 epochs",
        "Staleness mean 1.03, largest 3",
        "Bytes sent per step 246,824",
        "SHA-256 of the parameters 9f86d081",
        "Parameters 61,706",
        "Coat 1,000 81.2 %",
        "5.0 s worker 1 is slow <b>today</b>",
        "PyTorch 2.13.0+cpu",
        "Cores 2",
        'GPUs ["<none>"]',
        "model: lenet5",
    ):
        assert shown in page.text
    assert f"polyrhythm train '{folder}/config.yaml'" in page.text
    assert "This run" not in page.text


def headings(page):
    return re.findall("<h2>(.*?)</h2>", page)


def test_a_report_answers_first_and_shows_pictures_and_details_below(folder, story, ended):
    """Result, bottleneck and remedy, curves; then classes and the confusion matrix; no figure by its raw key."""
    log = EventLog(folder / "events.jsonl")
    classes = [{"name": name, "images": 10, "recall": 0.9, "precision": 0.9} for name in ("cat", "dog")]
    result = {**ended.result, "per_class": classes, "confusion": [[9, 1], [1, 9]], "nothing_left_share": 0.25}
    for event in [*story, RunEnded(time_s=9.5, outcome="done", result=result)]:
        log.on_event(event)
    log.close()
    (folder / "environment.json").write_text(
        json.dumps({"started": "2026-11-28T21:30:21+0000", "polyrhythm": "0.1.0"})
    )
    html = write_report(folder).read_text(encoding="utf-8")
    shown = headings(html)
    assert shown[:2] == ["Bottleneck", "Curves"]
    assert shown.index("Accuracy by class") < shown.index("Confusion matrix") < shown.index("Environment")
    page = Page(html)
    assert "2 epochs · 2026-11-28 21:30 UTC · Polyrhythm 0.1.0" in page.text
    assert f"Polyrhythm {version('polyrhythm')}, written 20" in page.text
    assert "documentation" in page.text
    assert "nothing_left_share" not in page.text
    found = held_back(read_figures(folder))
    assert f"Time of the workers: {found.time}." in page.text
    assert f"up to {gain_text(found.gain)}." in page.text
    assert page.text.count(" waiting for slower workers") == 1, "one split of the time on a page"


@pytest.mark.parametrize(
    ("top1", "interval", "standing"),
    [(0.52, [0.4, 0.62], "main bad"), (0.6, [0.55, 0.65], "main"), (0.9, [0.85, 0.94], "main good")],
)
def test_accuracy_is_colored_by_what_is_learned_beyond_guessing(folder, story, top1, interval, standing):
    log = EventLog(folder / "events.jsonl")
    classes = [{"name": name, "images": 50, "recall": top1, "precision": top1} for name in ("cat", "dog")]
    result = {"test_top1": top1, "test_top1_interval": interval, "test_images": 100, "per_class": classes}
    for event in [*story, RunEnded(time_s=9.5, outcome="done", result=result)]:
        log.on_event(event)
    log.close()
    html = write_report(folder).read_text(encoding="utf-8")
    assert f'<div class="tile {standing}"><dt>test top-1</dt>' in html
    assert "always predicting the most frequent class: 50.0 %" in html


def test_every_plot_has_its_box_and_its_data(folder, story):
    page = reported(folder, story)
    assert page.plot_boxes == [f"plot-{index}" for index in range(len(page.plots))]
    assert len(page.plots) == 7
    assert page.plots[0]["data"][0]["y"] == [1.0, 0.5]


def test_a_report_loads_nothing_and_forbids_itself_to(folder, story, ended):
    page = reported(folder, [*story, ended])
    assert page.loads == []
    assert "link" not in page.tags
    assert "iframe" not in page.tags
    assert page.policy.startswith("default-src 'none';")
    assert "http" not in page.policy
    html = (folder / "report.html").read_text(encoding="utf-8")
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    packed = html.split('id="library">')[1].split("<")[0]
    assert b"plotly.js (basic" in gzip.decompress(base64.b64decode(packed))  # the library itself is inside


def test_texts_cannot_become_markup(folder, story, ended):
    page = reported(folder, [*story, ended])
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in html
    assert "<b>today" not in html
    assert "<script>alert(1)</script>" in page.text
    assert "<script>alert(2)</script>" in page.text
    assert page.tags.count("script") == 3


def test_sections_without_data_are_left_out(tmp_path, story):
    page = reported(tmp_path, [story[0], RunEnded(time_s=1.0, outcome="done", result={})])
    assert page.plots == []
    for heading in (
        "Curves",
        "Accuracy by class",
        "Notices",
        "How to repeat it",
        "Environment",
        "test top-1",
    ):
        assert heading not in page.text
    assert (tmp_path / "report.html").stat().st_size < 100_000  # no plots, no plotly


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (RunEnded(time_s=9.5, outcome="interrupted", result={}), "This run was interrupted after 9.5 s"),
        (
            RunEnded(time_s=9.5, outcome="failed", result={"error": "loss is not finite at step 7"}),
            "This run failed after 9.5 s: the figures below are incomplete. loss is not finite at step 7.",
        ),
        (None, "This run has not ended, or was killed after 9.0 s"),
    ],
)
def test_a_run_that_was_not_done_says_so_first(folder, story, end, says):
    page = reported(folder, [*story, end] if end else story)
    assert says in page.text
    assert page.text.index(says) < page.text.index("test top-1")
    assert "Its last checkpoint is checkpoints/epoch-1 ." in page.text
    assert "test top-1 90.6 %" in page.text  # from the last test, as there is no result


def test_many_classes_are_folded_away(folder, story):
    result = {"per_class": {f"class {index}": index / 100 for index in range(21)}}
    page = reported(folder, [*story, RunEnded(time_s=9.5, outcome="done", result=result)])
    assert "Accuracy by class 21 rows" in page.text
    assert "class 20 20.0 %" in page.text
    assert "details" in page.tags


def test_a_report_is_replaced_whole_or_not_at_all(folder, story, monkeypatch):
    reported(folder, story)
    before = (folder / "report.html").read_bytes()

    def full_disk(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_report(folder)
    monkeypatch.undo()
    assert (folder / "report.html").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "environment.json",
        "events.jsonl",
        "report.html",
        "summary.json",
    ]


def test_what_is_no_run_is_a_wrong_request(tmp_path, folder, story):
    with pytest.raises(RequestError, match="give the folder of a run"):
        write_report(tmp_path)
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(RequestError, match="holds no run that started"):
        write_report(tmp_path)
    (folder / "environment.json").write_text("{")
    with pytest.raises(RequestError, match=r"environment\.json is damaged"):
        reported(folder, story)


def test_a_figure_that_no_page_can_hold_is_refused_in_a_line(folder, story):
    events = list(story)
    place = next(i for i, event in enumerate(events) if isinstance(event, Evaluated))
    events[place] = replace(events[place], test_top1=float("inf"))
    with pytest.raises(RequestError, match=r"^[^\n]*is damaged: leave that run out$"):
        reported(folder, events)


def test_reporting_needs_neither_torch_nor_tensorboard_to_be_imported():
    code = (
        "import sys, polyrhythm; before = set(sys.modules)\n"
        "import polyrhythm.reporting.pages.report, polyrhythm.reporting.progress\n"
        "import polyrhythm.reporting.loggers\n"
        "heavy = {'torch', 'tensorboard', 'tensorflow', 'pandas', 'plotly.graph_objects'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "[]"


def test_an_interval_of_an_unknown_number_of_images_is_left_out(tmp_path, story):
    log = EventLog(tmp_path / "events.jsonl")
    result = {"test_top1": 0.3, "test_top1_interval": [0.108, 0.603]}
    for event in [*story, RunEnded(time_s=9.5, outcome="done", result=result)]:
        log.on_event(event)
    log.close()
    page = write_report(tmp_path).read_text()
    assert "30.0 %" in page
    assert "95 % confidence" not in page


def test_a_report_shows_the_confusion_its_intervals_and_pictures(tmp_path, story):
    """What is in the page are the figures of the result and the pictures of the folder; damaged ones are left out."""
    png = base64.b64encode(b"not looked into").decode()
    per_class = [
        {"name": "<cat>", "images": 8, "recall": 0.125, "precision": 0.5, "recall_interval": [0.022, 0.471]},
        {"name": "dog", "images": 2, "recall": 1.0, "precision": 0.25, "recall_interval": [0.342, 1.0]},
    ]
    result = {
        "test_top1": 0.3,
        "test_images": 10,
        "test_top1_interval": [0.108, 0.603],
        "per_class": per_class,
        "confusion": [[1, 7], [0, 2]],
    }
    log = EventLog(tmp_path / "events.jsonl")
    for event in [*story, RunEnded(time_s=9.5, outcome="done", result=result)]:
        log.on_event(event)
    log.close()
    mistake = {"image": 3, "class": "<cat>", "predicted": "dog", "probability": 0.97, "png": png}
    kept = {"mistakes": [mistake], "augmented": [{"image": 0, "class": "dog", "pngs": [png, png]}]}
    (tmp_path / "pictures.json").write_text(json.dumps(kept))
    page = write_report(tmp_path).read_text()
    assert "10.8 % to 60.3 % with 95 % confidence, of 10 images" in page
    assert "2 to 47 %" in page  # of 1 of 8
    assert '<td class="miss" style="--part: 88%">7</td>' in page
    assert "&lt;cat&gt;, taken for dog (97.0 %)" in page
    assert page.count(f"data:image/png;base64,{png}") == 3
    assert "<cat>" not in page
    for damaged in ("{", "[]", json.dumps({**kept, "mistakes": [{**mistake, "png": '"><script>'}]})):
        (tmp_path / "pictures.json").write_text(damaged)
        assert "Worst mistakes" not in write_report(tmp_path).read_text()
