from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer

from polyrhythm.cli.help import EXAMPLES, PANELS
from polyrhythm.cli.main import VERBS, _status, command_line, main
from polyrhythm.config.run_config import REAL_ONLY, RunConfig

WITHOUT_TORCH = """
import sys
from polyrhythm.cli.main import _status
status = _status({arguments!r})
heavy = [name for name in ("torch", "numpy", "sklearn", "plotly", "tensorboard") if name in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else status)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_comes_in_less_than_a_second_and_without_torch(arguments: list[str]) -> None:
    assert any(_processor_s(arguments) < 1.0 for _ in range(3))  # others that use this machine slow it down


def _processor_s(arguments: list[str]) -> float:
    """Gives the processor's time that a command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = WITHOUT_TORCH.format(arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_wrong_verb_is_found_without_torch() -> None:
    code = WITHOUT_TORCH.format(arguments=["trian"])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: No such command 'trian'. Did you mean 'train'? (see polyrhythm --help)\n",
    )


def test_every_field_of_a_recipe_is_an_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert _status(["train", "--help", "all"]) == 0
    text = capsys.readouterr().out
    for name in RunConfig.model_fields:
        assert f"--{name.replace('_', '-')} " in text


def test_every_option_has_one_panel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert _status(["train", "--help", "all"]) == 0
    panel, found = "", []
    for line in capsys.readouterr().out.splitlines():
        if title := re.match(r"╭─ (.+?) ─", line):
            panel = title[1]
        if panel != "Options" and (option := re.match(r"│ [* ]*--([a-z-]+)", line)):
            found.append(option[1].replace("-", "_"))
    assert sorted(found) == sorted(RunConfig.model_fields)


ALL_VERBS = [verb for verbs in VERBS.values() for verb in verbs]


def test_polyrhythm_alone_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 0
    shown = capsys.readouterr()
    assert "Usage:" in shown.out
    assert shown.err == ""
    assert all(f" {verb} " in shown.out for verb in ALL_VERBS)


@pytest.mark.parametrize("verb", ["", *ALL_VERBS])
def test_help_has_two_examples_that_the_verb_accepts_and_no_line_over_100_columns(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert _status([verb, "--help"] if verb else ["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert [line.split()[0] for line in text.partition(" Examples:")[2].split("\n") if line] == [
        "polyrhythm"
    ] * 2
    for example in EXAMPLES[verb]:
        assert f"   polyrhythm {example}\n" in text
        name, *arguments = shlex.split(example)
        command: Any = typer.main.get_command(command_line(name))
        command.commands[name].make_context(name, arguments)  # raises a usage error


@pytest.mark.parametrize("verb", ["train", "simulate", "plan", "compare", "tune"])
def test_help_describes_a_verbs_own_options_and_names_those_of_every_run(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status([verb, "--help"]) == 0
    described, _, named = capsys.readouterr().out.partition("Options of every run")
    assert not [panel for panel in PANELS[1:] if f"─ {panel} ─" in described]
    assert ("─ Job ─" in described) == (verb == "train")
    assert described.index("--out ") < described.find("--data ") % len(described)
    assert {"--label-smoothing", "--optimizer"} <= set(named.split())
    assert _status([verb, "--help", "all"]) == 0
    everything = capsys.readouterr().out
    words = " ".join(everything.replace("│", " ").split())  # in lines of the terminal's width
    assert "Share of every target that is spread over all" in words
    assert "Options of every run" not in everything


def test_help_lists_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(["train", "--help", "all"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "auto|dynamic|static" in text
    assert "Choices: adagrad, " in text or "Choices: adadelta, " in text or "Choices: adam, " in text
    assert " terngrad, threshold, top_k." in text


@pytest.mark.parametrize("verb", ["train", "simulate"])
def test_an_option_is_also_taken_by_its_former_name_which_help_does_not_show(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status([verb, "--help", "all"]) == 0
    assert "--deal" not in capsys.readouterr().out
    cluster = ["--cluster", "office"] if verb == "simulate" else []
    assert _status([verb, *cluster, "--data", "digits", "--deal", "drawn"]) == 2
    assert "leave batches out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("verb", [[], *([verb] for verbs in VERBS.values() for verb in verbs)])
def test_nothing_is_shown_with_types_of_python(
    verb: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert _status([*verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [line for line in lines if re.match(r"│ [* ]*--", line)]
    assert not [line for line in options if ". (default" in line]
    assert not [line for line in lines if re.search(r"<(str|int|float|bool|list)\b", line)]
    assert ["│", "--help", "Show"] in [line.split()[:3] for line in options]  # a flag takes no value


def test_what_a_simulation_refuses_is_not_offered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert _status(["simulate", "--help", "all"]) == 0
    text = capsys.readouterr().out
    assert [name for name in REAL_ONLY if f"--{name.replace('_', '-')} " in text] == []


def test_nothing_of_a_help_text_is_taken_for_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert _status(["run", "--help"]) == 0
    assert "its share of the cores" in capsys.readouterr().out


def test_strategies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(["strategies", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {"synchronous", "parameter_server", "mixed"} <= found.keys()
    for entry in found.values():
        assert isinstance(entry["year"], int)
        assert str(entry["year"]) in entry["paper"]
    assert (found["mixed"]["family"], found["mixed"]["year"]) == ("parameter_server", 2017)


def test_strategies_for_people_are_readable_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert _status(["strategies"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["name", "bytes", "a", "step", "staleness", "paper"]
    assert "allreduce" in lines
    assert [line.split() for line in lines if line.startswith("  synchronous ")] == [
        ["synchronous", "2M(N-1)/N", "0", "Chen", "et", "al.", "2016"]
    ]


def test_one_strategy_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(["strategies", "mixed"]) == 0
    text = capsys.readouterr().out
    assert "Campos" in text
    assert "key replicas" in text
    assert "default 2" in text
