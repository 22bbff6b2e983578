"""Reports as a browser shows them: every plot is drawn, nothing is asked of a network, and all fits a phone."""

import pytest

from browser import Browser, chromium
from polyrhythm.events import RunEnded
from polyrhythm.reporting.comparison import Comparison, read_run
from polyrhythm.reporting.event_log import EventLog
from polyrhythm.reporting.pages.report import write_report
from polyrhythm.reporting.pages.several_runs import PlanTable, render_comparison, render_plan

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs a browser: apt-get install chromium")

WIDTH_OF_PAGE = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
DRAWN = "document.querySelectorAll('.plot .main-svg').length > 0 && [...document.querySelectorAll('.plot')]"
DRAWN += ".every(each => each.querySelector('.main-svg') && each.clientHeight > 100)"


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture
def report(tmp_path, story):
    log = EventLog(tmp_path / "events.jsonl")
    for event in [*story, RunEnded(time_s=9.5, outcome="done", result={"test_top1": 0.9})]:
        log.on_event(event)
    log.close()
    return write_report(tmp_path)


@pytest.mark.parametrize("width", [1280, 375])
def test_every_plot_is_drawn_without_an_error_and_nothing_is_wider_than_the_window(browser, report, width):
    browser.errors.clear()
    browser.requests.clear()
    browser.open(report, width=width)
    browser.evaluate("drawn")
    assert browser.evaluate(DRAWN)
    assert browser.errors == []
    assert [each for each in browser.requests if not each.startswith(("file:", "data:", "blob:"))] == []
    assert browser.evaluate(WIDTH_OF_PAGE) <= width


def test_a_report_prints_and_stays_below_a_megabyte(browser, report):
    assert report.stat().st_size < 1_000_000
    browser.open(report)
    browser.evaluate("drawn")
    assert browser.pdf().startswith(b"%PDF")


def test_the_browser_finds_errors(browser, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<script>throw new Error('no')</script><p style='width: 3000px'>wide")
    browser.errors.clear()
    browser.open(page)
    assert browser.errors
    assert browser.evaluate(WIDTH_OF_PAGE) > 1280


CUT = (
    "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth + 1).length"
)
HEADS = "[...document.querySelectorAll('.stack thead')].filter(each => each.offsetHeight > 0).length"
EDGES = "[...document.querySelectorAll('.stack tr.best td')].map(each => Math.round(each.getBoundingClientRect().left))"


@pytest.mark.parametrize("width", [1280, 375])
def test_no_table_of_a_plan_is_cut_and_a_small_screen_stacks_the_cells_of_a_row(
    browser, tmp_path, story, width
):
    folders = []
    for number in range(6):
        folder = tmp_path / f"trial-{number}"
        folder.mkdir()
        spec = (
            f"parameter_server(servers={1 + number}, consistency=bounded_staleness(s=3), placement=dedicated)"
        )
        (folder / "config.yaml").write_text(f"strategy: {spec}\nworkers: {2 + number % 2}\nseed: 0\n")
        log = EventLog(folder / "events.jsonl")
        for event in [
            *story,
            RunEnded(time_s=9.5, outcome="done", result={"price": 1.0, "cluster": "office"}),
        ]:
            log.on_event(event)
        log.close()
        folders.append(folder)
    comparison = Comparison.of([read_run(each) for each in folders])
    plan = PlanTable(
        heading="to top-1 85.0 % on office, best for time first",
        reason="synchronous, 4 workers: 2.6 s (2.3 s to 2.9 s), the fastest.",
        command="polyrhythm train --strategy synchronous --workers 4",
        heads=["rank", "candidate", "virtual time", "price EUR"],
        rows=[
            ["1", row.name, "2.6 s (2.3 s to 2.9 s)", "0.0123 (0.0101 to 0.0145)"] for row in comparison.rows
        ],
        notes=[],
        left_out=[],
    )
    page = tmp_path / "report.html"
    page.write_text(render_plan(plan, comparison, tmp_path, "polyrhythm plan"), encoding="utf-8")
    browser.open(page, width=width)
    browser.evaluate("drawn")
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.evaluate(WIDTH_OF_PAGE) <= width
    assert browser.evaluate(CUT) == 0
    assert (browser.evaluate(HEADS) == 0) == (width == 375)
    assert (len(set(browser.evaluate(EDGES))) == 1) == (width == 375)
    page.write_text(render_comparison(comparison, tmp_path, "polyrhythm compare"), encoding="utf-8")
    browser.open(page, width=width)
    browser.evaluate("drawn")
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.evaluate(CUT) == 0


@pytest.mark.parametrize("width", [1280, 375])
def test_a_comparison_is_drawn_likewise(browser, tmp_path, story, width):
    for seed in (0, 1):
        folder = tmp_path / f"run {seed}"
        folder.mkdir()
        (folder / "config.yaml").write_text(f"strategy: synchronous\nworkers: 2\nseed: {seed}\n")
        log = EventLog(folder / "events.jsonl")
        for event in [
            *story,
            RunEnded(time_s=9.5, outcome="done", result={"price": 1.0, "cluster": "office"}),
        ]:
            log.on_event(event)
        log.close()
    comparison = Comparison.of([read_run(tmp_path / "run 0"), read_run(tmp_path / "run 1")])
    page = tmp_path / "report.html"
    page.write_text(render_comparison(comparison, tmp_path, "polyrhythm compare"), encoding="utf-8")
    browser.errors.clear()
    browser.open(page, width=width)
    browser.evaluate("drawn")
    assert browser.evaluate(DRAWN)
    assert browser.errors == []
    assert browser.evaluate(WIDTH_OF_PAGE) <= width
    assert browser.evaluate("[...document.links].map(link => decodeURI(link.getAttribute('href')))") == [
        "run 0/report.html",
        "run 1/report.html",
    ]


def test_on_a_phone_the_names_of_ten_ways_cover_nothing(browser, tmp_path, story):
    """The first plot's legend is whole, below the title of its axis, and the plot above it is large enough to read."""
    folders = []
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(f"strategy: a_strategy_{number}\nworkers: 2\nseed: 0\n")
        log = EventLog(folder / "events.jsonl")
        for event in [*story, RunEnded(time_s=9.5, outcome="done", result={"cluster": "office"})]:
            log.on_event(event)
        log.close()
        folders.append(folder)
    page = tmp_path / "report.html"
    page.write_text(
        render_comparison(Comparison.of([read_run(each) for each in folders]), tmp_path, ""), encoding="utf-8"
    )
    browser.open(page, width=375)
    browser.evaluate("drawn")
    edge = "document.querySelector('#plot-0 {}').getBoundingClientRect().{}"
    legend_top = browser.evaluate(edge.format(".legend", "top"))
    assert legend_top >= browser.evaluate(edge.format(".xtitle", "bottom"))
    assert browser.evaluate(edge.format(".legend", "height")) > 10 * 15
    assert browser.evaluate(edge.format(".nsewdrag", "height")) > 150
    assert "Speed-up is told" not in page.read_text(encoding="utf-8")
