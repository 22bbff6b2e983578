"""Build the site: the pages of `docs/`, tutorials whose commands are run as it is built, a reference from the code.

    python scripts/build_site.py            into build/site; a link that leads nowhere is an error
    python scripts/build_site.py --dry      without running the tutorials

The pages keep their places beside each other (`docs/`, `benchmarks/`, `examples/`), so that the links in them lead to
the same places as in the repository. In a tutorial, the commands of a block that begins with "console run" are run, in
one folder for the whole page, and what they print is set below them; a command that fails fails the build. Every
tutorial is a notebook as well, beside its page.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import nbformat
import typer

import polyrhythm
from polyrhythm import events
from polyrhythm.cli.main import VERBS, command_line

ROOT = Path(__file__).parent.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
TAKEN = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "Dockerfile", "Makefile")
FOLDERS = ("docs", "recipes", "examples", "benchmarks", "scripts")
BLOCK = re.compile(r"```console run\n(.*?)```", re.DOTALL)
PATIENCE_S = 300
LONGEST_LINES = 60
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
    for page in SOURCE.rglob("*.md"):
        text = page.read_text()
        page.write_text(
            re.sub(r"\]\((\.\./)+README\.md", lambda found: found[0].replace("README", "index"), text)
        )


def write_notebooks() -> None:
    """Write every tutorial as a notebook too, without outputs, and link it from its page."""
    for page in sorted((SOURCE / "docs" / "tutorials").glob("*.md")):
        parts = BLOCK.split(page.read_text())
        cells = [nbformat.v4.new_code_cell(PREPARED)]
        for number, part in enumerate(parts):
            if number % 2:
                code = "\n".join("!" + line.removeprefix("$ ") for line in part.strip().splitlines())
                cells.append(nbformat.v4.new_code_cell(code))
            elif part.strip():
                cells.append(nbformat.v4.new_markdown_cell(part.strip()))
        for number, cell in enumerate(cells):
            cell["id"] = (
                f"{page.stem}-{number}"  # drawn by chance otherwise: the same pages give the same files
            )
        notebook = nbformat.v4.new_notebook(cells=cells)
        nbformat.validate(notebook)
        nbformat.write(notebook, page.with_suffix(".ipynb"))
        page.write_text(f"{''.join(_blocks(parts))}\nThis page [as a notebook]({page.stem}.ipynb).\n")


def _blocks(parts: list[str]) -> list[str]:
    return [f"```console run\n{part}```" if number % 2 else part for number, part in enumerate(parts)]


def show_tutorials() -> None:
    """Show the commands of all tutorials, without what they would print."""
    for page in (SOURCE / "docs" / "tutorials").glob("*.md"):
        page.write_text(page.read_text().replace("```console run\n", "```console\n"))


def run_tutorials() -> None:
    """Run the commands of all tutorials and set what they print below them."""
    for page in sorted((SOURCE / "docs" / "tutorials").glob("*.md")):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / "examples", Path(folder) / "examples")
            parts = BLOCK.split(page.read_text())  # text, commands, text, commands, text
            began_s = time.monotonic()
            parts[1::2] = [_run(commands, Path(folder), page.name) for commands in parts[1::2]]
            print(f"{page.name}: its commands took {time.monotonic() - began_s:.0f} s", flush=True)
            page.write_text("".join(parts))


def _run(commands: str, folder: Path, page: str) -> str:
    shown = []
    for line in commands.strip().splitlines():
        command = line.removeprefix("$ ")
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "110",
        }
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{page}: `{command}` ended with status {done.returncode}:\n{done.stdout}")
        printed = done.stdout.rstrip().splitlines()
        if len(printed) > LONGEST_LINES:
            printed = [*printed[: LONGEST_LINES // 2], "…", *printed[-LONGEST_LINES // 2 :]]
        shown += [line, *printed]
    return "```console\n" + "\n".join(shown) + "\n```"


def write_reference() -> None:
    """Write the pages that follow from the code: verbs and their options, events, the Python API."""
    there = SOURCE / "docs" / "reference"
    there.mkdir()
    (there / "verbs.md").write_text(verbs())
    (there / "events.md").write_text(all_events())
    (there / "api.md").write_text(api())
    (there / "gallery.md").write_text(gallery())


GALLERY = (
    ("Campos et al. 2017, Tables 1 and 2: throughput", "benchmarks/bsc-tables/by_verb.md"),
    ("Campos et al. 2017, Table 3: steps and time to a loss", "benchmarks/bsc-tables/convergence.md"),
    ("UT Austin 2017, Tables 1 and 2: strategies on MNIST", "benchmarks/ut-austin/results.md"),
    (
        "UT Austin 2017: servers on a node of their own, 3, 7 and 11 workers",
        "benchmarks/ut-austin/results_beside.md",
    ),
)
"""What a paper shows, and the committed result of the command that shows it here; its README has the rest."""


def gallery() -> str:
    """Return the page of the papers' tables as they come out here."""
    lines = [
        "# The papers' tables",
        "",
        "As committed, each by one command, beside the figures of the paper.",
    ]
    for title, path in GALLERY:
        page = SOURCE / path
        lines += ["", f"## {title}", "", page.read_text().strip(), ""]
        lines += [
            f"How it was calibrated and what it shows: [{path}](../../{page.parent.relative_to(SOURCE)}/README.md)."
        ]
    return "\n".join(lines) + "\n"


def verbs() -> str:
    """Return the page of all verbs."""
    known: Any = typer.main.get_command(command_line())
    lines = ["# Verbs and options", "", "What `polyrhythm VERB --help` says, on one page."]
    for panel, names in VERBS.items():
        lines += ["", f"## {panel}"]
        for name in names:
            verb = known.commands[name]
            lines += ["", f"### {name}", "", _plain(verb.help or ""), "", "| | |", "|---|---|"]
            for option in verb.params:
                if getattr(option, "hidden", False) or option.name == "help":
                    continue
                head = (
                    ", ".join(option.opts)
                    if option.param_type_name == "option"
                    else option.metavar or option.name
                )
                takes = option.metavar if option.param_type_name == "option" and option.metavar else ""
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
        "The facts of a run, one a line of `events.jsonl`; `kind` is the name of the event.",
    ]
    for name, kind in sorted(vars(events).items()):
        if inspect.isclass(kind) and is_dataclass(kind) and issubclass(kind, events.Event):
            told = inspect.getdoc(kind) or ""
            opening, _, attributes = told.partition("Attributes:")
            meanings = dict(re.findall(r"^\s+(\w+): (.+(?:\n\s{6,}.+)*)", attributes, re.MULTILINE))
            lines += ["", f"## {name}", "", _plain(opening), "", "| key | meaning |", "|---|---|"]
            lines += [f"| `{each.name}` | {_plain(meanings.get(each.name, ''))} |" for each in fields(kind)]
    return "\n".join(lines) + "\n"


def api() -> str:
    """Return the page of the public names, whose docstrings mkdocstrings fills in."""
    lines = [
        "# Python",
        "",
        "Every public name of `polyrhythm`. Options of a run are the same as on the command line.",
    ]
    for name in sorted(polyrhythm.__all__, key=str.lower):
        lines += ["", f"::: {polyrhythm.HOMES[name]}.{name}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Build the site, or exit with what is wrong."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--dry", action="store_true", help="do not run the tutorials")
    chosen = options.parse_args()
    assemble()
    write_reference()
    write_notebooks()
    if chosen.dry:
        show_tutorials()
    else:
        run_tutorials()
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, env=quiet, check=False)
    if done.returncode == 0:
        print(f"the site is in {SITE.relative_to(ROOT)}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
