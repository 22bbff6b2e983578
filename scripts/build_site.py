"""Build the site: the pages of `docs/`, tutorials with the output of their commands, a reference from the code.

    python scripts/build_site.py            into build/site; a link that leads nowhere is an error
    python scripts/build_site.py --dry      without running the tutorials

The pages keep their relative places (`docs/`, `benchmarks/`, `examples/`), so links stay valid. In a tutorial, the
commands of a block that begins with "console run" are run in one folder per page; output and duration are written below
them. A command that fails or hangs fails the build, as does a tutorial with a late first result. Each tutorial
is also a notebook with the same outputs.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import nbformat
import typer

import polyrhythm
from polyrhythm import events
from polyrhythm.cli.main import VERBS, command_line

sys.path.append(str(Path(__file__).parent))
from generate_docs import reference  # its folder is not on the path of a test

ROOT = Path(__file__).parent.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
TAKEN = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CITATION.cff",
    "LICENSE",
    "Dockerfile",
    "Makefile",
)
FOLDERS = ("docs", "recipes", "examples", "benchmarks", "scripts")
BLOCK = re.compile(r"```console run\n(.*?)```", re.DOTALL)
PATIENCE_S = 300.0
"""For one command of a tutorial."""
FIRST_RESULT_S = 300.0
"""From a reader's first word to what the first command has printed."""
WORDS_A_SECOND = 200 / 60
"""That people read."""
LONGEST_LINES = 60
WIDE = {
    "index.md": "navigation, toc",
    "docs/tutorials": "toc",
    "docs/reference/faults.md": "navigation, toc",
    "docs/reference/gallery.md": "toc",
    "docs/reference/loops.md": "navigation, toc",
    "docs/reference/papers.md": "navigation, toc",
}
"""Pages without sidebars: terminals and wide tables need the room."""
PREPARED = """\
# Once: %pip install polyrhythm
import shutil, sys
shutil.copytree(f"{sys.prefix}/share/polyrhythm/examples", "examples", dirs_exist_ok=True);"""


def assemble() -> None:
    """Copy what the site is made of."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    for name in TAKEN:
        shutil.copy(ROOT / name, SOURCE / ("index.md" if name == "README.md" else name))
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, SOURCE / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    home = SOURCE / "index.md"
    home.write_text(_as_written(home.read_text()))
    for page in SOURCE.rglob("*.md"):
        text = page.read_text()
        page.write_text(
            re.sub(r"\]\((\.\./)+README\.md", lambda found: found[0].replace("README", "index"), text)
        )


def widen() -> None:
    """Hide the sidebars of some pages."""
    for place, hidden in WIDE.items():
        for page in [SOURCE / place] if place.endswith(".md") else (SOURCE / place).glob("*.md"):
            page.write_text(f"---\nhide: [{hidden}]\n---\n\n{page.read_text()}")


@dataclass(frozen=True)
class Ran:
    """A command of a tutorial.

    Attributes:
        line: as it stands in the page.
        printed: what it printed; shortened in the middle.
        seconds: that it took; None: it was not run.
    """

    line: str
    printed: str = ""
    seconds: float | None = None


def write_tutorials(dry: bool) -> None:
    """Run the commands of all tutorials, unless `dry`; set what they print below them, and write notebooks of them."""
    for page in sorted((SOURCE / "docs" / "tutorials").glob("*.md")):
        texts, blocks = parted(page.read_text())
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / "examples", Path(folder) / "examples")
            done = [
                [Ran(line) if dry else run(line, Path(folder), page.name) for line in block]
                for block in blocks
            ]
        _write_notebook(texts, done, page.with_suffix(".ipynb"))
        if not dry:
            first_s, all_s = times(texts, done)
            print(
                f"{page.name}: a first result after {first_s:.0f} s, commands {all_s:.0f} s in all",
                flush=True,
            )
            if first_s > FIRST_RESULT_S:
                sys.exit(
                    f"{page.name}: a first result after {first_s:.0f} s is too late: at most {FIRST_RESULT_S:.0f}"
                )
            texts[0] = _told(texts[0], first_s, all_s)
        shown = [
            text + (_shown(block) if block else "") for text, block in zip(texts, [*done, []], strict=True)
        ]
        body = _as_written(page.read_text()) if dry else "".join(shown)
        page.write_text(f"{body}\nThis page [as a notebook]({page.stem}.ipynb).\n")


def _as_written(page: str) -> str:
    """Return a page with the outputs that it shows itself, in fences that the site knows."""
    return page.replace("```console run\n", "```console\n")


def parted(page: str) -> tuple[list[str], list[list[str]]]:
    """Return the texts of a tutorial, and the lines of commands between each two of them."""
    parts = BLOCK.split(page)
    blocks = [[line for line, _ in shown_commands(block)] for block in parts[1::2]]
    return parts[::2], blocks


def shown_commands(block: str) -> list[tuple[str, list[str]]]:
    """Return each `$ command` of a block with the lines that the page shows as its output."""
    found: list[tuple[str, list[str]]] = []
    for line in block.strip().splitlines():
        if line.startswith("$ "):
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found


def first_missing(shown: list[str], printed: str) -> str | None:
    """Return the first shown line that a command did not print there, or None.

    Numbers, units of time and spaces may differ. `…` stands for any number of lines.
    """
    text = "".join(f"{_pattern(line)}\n" for line in printed.splitlines())
    parts = [r"(?:.*\n)*?" if line == "…" else re.escape(_pattern(line)) + r"\n" for line in shown]
    for number, line in enumerate(shown, 1):
        if not re.match("".join(parts[:number]), text):
            return line
    return None if not shown or re.fullmatch("".join(parts), text) else "the end"


def _pattern(line: str) -> str:
    return " ".join(re.sub(r"\d[\d,.:]*( (ms|s)\b)?", "0", line).split())


def run(line: str, folder: Path, page: str) -> Ran:
    """Run a line of a tutorial in a folder, or exit with one line that names the reason."""
    command = line.removeprefix("$ ")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "110",
    }
    began_s = time.monotonic()
    process = subprocess.Popen(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # to end all of it
    )
    try:
        printed, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        sys.exit(
            f"{page}: `{command}` took more than {PATIENCE_S:.0f} s: make it smaller, or the machine quieter"
        )
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        sys.exit(f"{page}: `{command}` ended with status {process.returncode}:\n{printed}")
    lines = printed.rstrip().splitlines()
    if len(lines) > LONGEST_LINES:
        lines = [*lines[: LONGEST_LINES // 2], "…", *lines[-LONGEST_LINES // 2 :]]
    return Ran(line, "\n".join(lines), time.monotonic() - began_s)


def times(texts: list[str], done: list[list[Ran]]) -> tuple[float, float]:
    """Return after how many seconds a reader has a first result, and what all commands of a tutorial take."""
    seconds = [sum(each.seconds or 0.0 for each in block) for block in done]
    return len(texts[0].split()) / WORDS_A_SECOND + seconds[0], sum(seconds)


def _told(text: str, first_s: float, all_s: float) -> str:
    title, _, rest = text.partition("\n")
    cores = f"{os.cpu_count()} core{'s' if os.cpu_count() != 1 else ''}"
    told = (
        f"The commands took {_spoken(all_s)} when this page was built, on {cores} without a GPU; the first result is "
        f"there {_spoken(first_s)} after the first word."
    )
    return f"{title}\n\n*{told}*\n{rest}"


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} minutes"


def _shown(block: list[Ran]) -> str:
    lines = [part for each in block for part in (each.line, each.printed) if part]
    took_s = sum(each.seconds or 0.0 for each in block)
    took = f"\n*{_spoken(took_s)}*\n" if took_s >= 1 else ""
    return "```console\n" + "\n".join(lines) + f"\n```\n{took}"


def _write_notebook(texts: list[str], done: list[list[Ran]], path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(PREPARED)]
    for text, block in zip(texts, [*done, []], strict=True):
        if text.strip():
            cells.append(nbformat.v4.new_markdown_cell(text.strip()))
        if block:
            cell = nbformat.v4.new_code_cell("\n".join("!" + each.line.removeprefix("$ ") for each in block))
            printed = "".join(f"{each.printed}\n" for each in block if each.printed)
            cell["outputs"] = (
                [nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []
            )
            cells.append(cell)
    for number, cell in enumerate(cells):  # drawn by chance otherwise: the same pages give the same files
        cell["id"] = f"{path.stem}-{number}"
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def write_reference() -> None:
    """Write the pages that follow from the code: verbs and their options, events, the Python API."""
    there = SOURCE / "docs" / "reference"
    (there / "strategies").mkdir(parents=True)
    for name, text in reference().items():
        (there / name).write_text(text)
    (there / "verbs.md").write_text(verbs())
    (there / "events.md").write_text(all_events())
    (there / "api.md").write_text(api())
    (there / "gallery.md").write_text(gallery())


GALLERY = (
    ("Campos et al. 2017, Tables 1 and 2: throughput", "benchmarks/bsc-tables/by_verb.md"),
    ("Campos et al. 2017, Table 3: steps and time to a loss", "benchmarks/bsc-tables/convergence.md"),
    ("UT Austin 2017, Table 2: seconds of an epoch", "benchmarks/ut-austin/results.md"),
)
"""Titles of tables in papers, with the committed result of the command that repeats each."""


def gallery() -> str:
    """Return the page of the papers' tables with their results here."""
    lines = [
        "# Tables of papers",
        "",
        "Results of one command each, next to the figures of the paper.",
    ]
    for title, path in GALLERY:
        page = SOURCE / path
        lines += ["", f"## {title}", "", page.read_text().strip(), ""]
        lines += [f"Calibration and conditions: [{path}](../../{page.parent.relative_to(SOURCE)}/README.md)."]
    return "\n".join(lines) + "\n"


def verbs() -> str:
    """Return the page of all verbs."""
    known: Any = typer.main.get_command(command_line())
    lines = ["# Commands and options", "", "All commands with the options of `polyrhythm VERB --help`."]
    for panel, names in VERBS.items():
        lines += ["", f"## {panel}"]
        for name in names:
            verb = known.commands[name]
            lines += ["", f"### {name}", "", _plain(verb.help or ""), "", "| option | meaning |", "|---|---|"]
            for option in verb.params:
                if getattr(option, "hidden", False) or option.name == "help":
                    continue
                head = (
                    ", ".join(option.opts)
                    if option.param_type_name == "option"
                    else option.metavar or option.name
                )
                takes = ""
                if option.param_type_name == "option":
                    takes = option.metavar or ("" if option.is_flag else "TEXT")
                lines.append(
                    f"| `{head}{' ' + takes if takes else ''}` | {_plain(getattr(option, 'help', '') or '')} |"
                )
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def all_events() -> str:
    """Return the page of all events of a run."""
    lines = [
        "# Events",
        "",
        "Events of a run, one JSON object per line of `events.jsonl`; `event` is the name.",
    ]
    for name, kind in sorted(vars(events).items()):
        if inspect.isclass(kind) and is_dataclass(kind) and issubclass(kind, events.Event):
            text = inspect.getdoc(kind) or ""
            opening, _, attributes = text.partition("Attributes:")
            meanings = {"time_s": "seconds since training started"} | dict(
                re.findall(r"^\s+(\w+): (.+(?:\n\s{6,}.+)*)", attributes, re.MULTILINE)
            )
            lines += ["", f"## {name}", "", _plain(opening), "", "| key | meaning |", "|---|---|"]
            lines += [f"| `{each.name}` | {_plain(meanings.get(each.name, ''))} |" for each in fields(kind)]
    return "\n".join(lines) + "\n"


ADAPTERS = (
    "lightning.PolyrhythmStrategy",
    "accelerate.PolyrhythmAccelerator",
    "transformers.PolyrhythmTrainer",
    "ray_tune.trainable",
)


def api() -> str:
    """Return the page of the public names; mkdocstrings adds their docstrings."""
    lines = [
        "# Python API",
        "",
        "Every public name of `polyrhythm`. Options of a run are the same as on the command line.",
    ]
    for name in sorted(polyrhythm.__all__, key=lambda name: (name != "Group", name.lower())):
        lines += ["", f"::: {polyrhythm.HOMES[name]}.{name}"]
    lines += ["", "Adapters to other tools are imported from their modules."]
    for name in ADAPTERS:
        lines += ["", f"::: polyrhythm.adapters.{name}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Build the site, or exit with what is wrong."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--dry", action="store_true", help="do not run the tutorials")
    chosen = options.parse_args()
    assemble()
    write_reference()
    write_tutorials(chosen.dry)
    widen()
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build"]  # --strict counts no warning that --quiet hides
    done = subprocess.run(command, cwd=ROOT, env=quiet, check=False, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    wrong = [line for line in lines if "WARNING" in line]
    if done.returncode or wrong:
        sys.exit("\n".join(wrong or lines))
    there = SITE.relative_to(ROOT)
    print(f"the site is in {there}: python -m http.server --directory {there} shows it, with its search")


if __name__ == "__main__":
    main()
