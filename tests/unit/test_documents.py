"""What documents say can be followed: links, files, verbs and options are there, and counts are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from polyrhythm.api.strategies import strategies
from polyrhythm.cli.main import command_line

ROOT = Path(__file__).parents[2]
OF_THE_PRODUCT = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
PAGES = [*OF_THE_PRODUCT, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").rglob("*.md"))]
OF_THE_CODE = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]
SOURCES = [f"/{path.relative_to(ROOT)}" for path in (ROOT / "src" / "polyrhythm").rglob("*")]
VERBS = get_command(command_line()).commands  # type: ignore[attr-defined]
OF_TORCHRUN = {
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--no-python",
    "--max-restarts",
    "--master-addr",
    "--node-rank",
    "--rdzv-conf",
}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Gives the names under which a page's headings can be reached, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[list[str]]:
    """Gives the words of every `polyrhythm …` on a page, in blocks and in sentences."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`(polyrhythm [^`\n]+)`", text)
    shown = [line for line in lines if line.startswith("polyrhythm ")] + spans
    return [shlex.split(line.replace("'", '"'), comments=True) for line in shown]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`\s?(?!\])", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(there), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    """Scripts, recipes and benchmarks by their path; tests by their name; not the paths of addresses."""
    text = re.sub(r"https?://[^)\s]+", "", page.read_text())
    for path in re.findall(r"\b((?:benchmarks|recipes|scripts|examples|docs)/[\w./-]*\w)", text):
        assert (ROOT / path).exists() or (page.parent / path).exists(), f"{path} is not there"
    for name in re.findall(r"\btest_\w+\.py\b", text):
        assert list((ROOT / "tests").rglob(name)), f"there is no test {name}"


@pytest.mark.parametrize("page", OF_THE_CODE, ids=named)
def test_every_module_and_folder_of_the_code_is_there(page: Path) -> None:
    for name in re.findall(r"`(?!test_)([\w/]+(?:\.py|/))`", page.read_text()):
        assert any(path.endswith(f"/{name.rstrip('/')}") for path in SOURCES), f"there is no {name}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_verb_and_option_is_there(page: Path) -> None:
    check_options(commands(page))


def check_options(found: list[list[str]]) -> None:
    """Fail for a verb or an option that is not there in words of `polyrhythm …`."""
    found = [words[1:] for words in found]
    found += [words[words.index("--") + 1 :] for words in found if words[0] == "submit" and "--" in words]
    for verb, *words in found:
        if verb.startswith("-"):
            continue
        if verb == "submit" and "--" in words:  # what follows is a command of its own
            words = words[: words.index("--")]
        assert verb in VERBS or not verb.islower(), f"polyrhythm has no {verb}"
        if verb == "run" or verb not in VERBS:  # what follows `run` is the script's
            continue
        options = {
            option
            for parameter in VERBS[verb].params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options | {"--help"}, f"{verb} has no {', '.join(sorted(given - options))}"


def test_every_claim_of_the_papers_has_a_command_or_a_reason() -> None:
    papers = yaml.safe_load((ROOT / "benchmarks" / "papers.yaml").read_text())["papers"]
    for row in (row for paper in papers for row in paper["rows"]):
        if row["command"] is None:
            assert row["note"], row["claim"]
            continue
        words = shlex.split(row["command"].rpartition(" && ")[2])
        if words[0] == "python":
            assert (ROOT / words[1]).exists(), f"{words[1]} is not there"
        else:
            check_options([words])


@pytest.mark.parametrize("page", OF_THE_PRODUCT, ids=named)
def test_every_option_in_a_sentence_is_there(page: Path) -> None:
    known = {option for verb in VERBS.values() for parameter in verb.params for option in parameter.opts}
    named_here = set(re.findall(r"`(--[a-z][a-z-]+)", page.read_text()))
    assert named_here <= known | OF_TORCHRUN | {"--help"}, sorted(named_here - known)


@pytest.mark.parametrize("page", OF_THE_PRODUCT, ids=named)
def test_strategies_are_counted_rightly(page: Path) -> None:
    for count in re.findall(r"\b(\d+)\s+(?:distribution\s+)?strategies\b", page.read_text()):
        assert int(count) == len(strategies())


def test_the_overview_names_every_page() -> None:
    overview = (ROOT / "docs" / "README.md").read_text()
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"}
    assert {name for name in pages if f"({name})" not in overview} == set()


def test_measured_figures_of_the_readme_stand_on_the_linked_page() -> None:
    """Each item of the section "Measured" links a page that has each of its numbers."""
    text = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n## ")[0]
    lines = [" ".join(item.split()) for item in text.split("\n- ")[1:]]
    assert lines
    for line in lines:
        link = re.search(r"\]\(([^)]+)\)", line)
        assert link is not None, f"no page: {line}"
        assert link[1] != "docs/measured.md", f"not the page of the figures itself: {line}"
        stands_on(ROOT / link[1], line.partition("](")[0])


def test_measured_figures_of_the_documents_stand_on_the_linked_page() -> None:
    """Of every row of "What has been measured", the linked page has each number of the answer, and a command."""
    page = ROOT / "docs" / "measured.md"
    rows = [
        line.strip("| ").split(" | ")
        for line in page.read_text().splitlines()
        if line.startswith("|") and "](../benchmarks/" in line
    ]
    assert len(rows) > 10
    for _, answer, *figures in rows:
        link = re.search(r"\]\((\.\./benchmarks/[^)#]+)", figures[-1])
        assert link is not None
        measured = page.parent / link[1]
        stands_on(measured, answer)
        folder = measured.resolve().parent
        shown = "".join(other.read_text() for other in folder.glob("*.md"))
        assert re.search(rf"(?:python {folder.relative_to(ROOT)}/|polyrhythm )\S", shown), (
            f"no command: {link[1]}"
        )


MEASURED = re.compile(
    r"(?<![\w.=(])(\d[\d,.]*\d|\d)(?:\s?(?:%|×|s|ms|µs|min|h|GB|MB|kB|images/s|points)(?![\w/])| of \d+\b)"
)
"""A number with a unit of what benchmarks measure."""
TO_BENCHMARK = r"\]\(((?:\.\./)*benchmarks/[^)#\s]+\.md)"


@pytest.mark.parametrize("page", OF_THE_PRODUCT, ids=named)
def test_figures_beside_a_link_to_a_benchmark_stand_on_its_page(page: Path) -> None:
    """Of sentences that link one, and of the table that follows one."""
    check_figures(page, page.read_text())


def test_a_figure_that_differs_from_its_benchmark_is_found() -> None:
    page = ROOT / "docs" / "choose.md"
    text = page.read_text()
    figures = re.search(r"within (7\.8) %", text)
    assert figures is not None
    with pytest.raises(AssertionError, match=r"7\.9 is not on"):
        check_figures(page, text.replace("within 7.8 %", "within 7.9 %"))
    table = ROOT / "docs" / "mixed-speed.md"
    with pytest.raises(AssertionError, match=r"13\.7 is not on"):
        check_figures(table, table.read_text().replace("13.6 s", "13.7 s"))


def check_figures(page: Path, text: str) -> None:
    """Asserts that figures of a page's text are those of the benchmarks that it links beside them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    linked: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        is_table = block.lstrip().startswith("|")
        parts = (
            block.splitlines() if is_table else re.split(r"(?<=[.:;])\s+(?=[^a-z])", " ".join(block.split()))
        )
        before, linked = linked, re.findall(TO_BENCHMARK, block)
        for part in parts:
            links = re.findall(TO_BENCHMARK, part) or (before if is_table else [])
            folders = {(page.parent / link).resolve().parent for link in links}
            there = [other for folder in sorted(folders) for other in sorted(folder.glob("*.md"))]
            bare = re.sub(r"\]\([^)]*\)|`[^`]*`", "", part)
            numbers = MEASURED.findall(bare) + (re.findall(r"(?<![\w.])\d+\.\d+", bare) if is_table else [])
            for number in numbers if there else []:
                shown = rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)"
                assert any(re.search(shown, other.read_text()) for other in there), (
                    f"{number} is not on {', '.join(map(named, there))}: {part}"
                )


def stands_on(page: Path, sentence: str) -> None:
    """Asserts that a page has every number of a sentence."""
    text = page.read_text()
    for number in re.findall(r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d", sentence):
        assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", text), (
            f"{number} is not on {page}"
        )
