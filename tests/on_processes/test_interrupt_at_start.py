"""Signals while a verb is still being loaded, checks data, writes a checkpoint, and writes its last files."""

from __future__ import annotations

import importlib
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from conformance.clean_process import CONTEXT
from on_processes.commands import wait_for
from polyrhythm.cli import entry
from polyrhythm.roles.checkpointing import archive
from polyrhythm.training.checkpoint import checkpoints, load_checkpoint

OPTIONS = ["--data", "digits", "--model", "mlp", "--out", "run"]
HELD = """
import sys, time
from pathlib import Path

class Hold:
    def find_spec(self, name, path=None, target=None):
        deadline_s = time.monotonic() + 60
        while name.startswith("polyrhythm.") and {library!r} in Path("/proc/self/maps").read_text():
            if time.monotonic() > deadline_s:
                raise TimeoutError("nobody has interrupted")
            time.sleep(0.01)

sys.meta_path.insert(0, Hold())
from polyrhythm.cli.entry import main
main()
"""
"""The command line, which goes no further than to the first import of ours behind that of a library."""


def has_loaded(process: int, library: str) -> bool:
    files = Path(f"/proc/{process}")
    words = (files / "cmdline").read_text().split("\0")  # of this process, until it has become the verb
    return "train" in words and library in (files / "maps").read_text()


@pytest.mark.parametrize("library", ["_pydantic_core", "libtorch_cpu"])
def test_it_leaves_at_once_without_a_traceback(library: str, tmp_path: Path) -> None:
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background have it ignored
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", HELD.format(library=library), "train", *OPTIONS])
    wait_for(lambda: has_loaded(process, library), library)  # which happens in the middle of an import
    os.write(terminal, b"\x03")
    said = b""
    with suppress(OSError):  # the terminal is gone
        while more := os.read(terminal, 4096):
            said += more
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    assert said.decode().split() == ["^Cinterrupted"]
    assert not list(tmp_path.iterdir())
    os.close(terminal)


@pytest.mark.parametrize(
    ("number", "options", "word", "status"),
    [
        (signal.SIGTERM, [], "interrupted", 130),
        (signal.SIGTERM, ["--notice-s", "30"], "preempted", 75),
        (signal.SIGHUP, [], "interrupted", 130),
    ],
)
def test_a_machine_is_heard_as_well(
    number: signal.Signals, options: list[str], word: str, status: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HELD.format(library="_pydantic_core"), "train", *OPTIONS, *options]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: has_loaded(process.pid, "_pydantic_core"), "pydantic")
    process.send_signal(number)
    assert process.communicate(timeout=60)[1].split() == [word]
    assert process.returncode == status
    assert not list(tmp_path.iterdir())


MOMENTS = {
    "checking data": "polyrhythm.api.train.assemble",
    "writing the report": "polyrhythm.api.observed_run.write_report",
}


def held_at(moment: str, arguments: list[str], folder: str, number: int) -> None:
    """Runs a verb whose process gets a signal at this moment, twice if it is not a person's."""
    os.chdir(folder)
    module, _, name = MOMENTS[moment].rpartition(".")
    home = importlib.import_module(module)
    act = getattr(home, name)

    def signaled(*given: Any, **options: Any) -> Any:
        for _ in range(1 if number == signal.SIGINT else 2):
            signal.raise_signal(number)
        Path("went on").touch()
        return act(*given, **options)

    setattr(home, name, signaled)
    sys.argv = ["polyrhythm", *arguments]
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 2)
    entry.main()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_data_are_checked_the_program_just_ends(number: int, tmp_path: Path) -> None:
    process = CONTEXT.Process(
        target=held_at, args=("checking data", ["train", *OPTIONS], str(tmp_path), number)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 130
    assert (tmp_path / "said").read_text().split() == ["interrupted"]
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_report_is_written_whole_before_the_program_ends(number: int, tmp_path: Path) -> None:
    options = [*OPTIONS, "--epochs", "1", "--batch-size", "256", "--workers", "1", "--notice-s", "30"]
    process = CONTEXT.Process(
        target=held_at, args=("writing the report", ["train", *options], str(tmp_path), number)
    )
    process.start()
    process.join(60)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == (75 if number == signal.SIGTERM else 130), said
    assert said.split()[-1] == ("preempted" if number == signal.SIGTERM else "interrupted")
    assert (tmp_path / "went on").exists()
    assert (tmp_path / "run" / "report.html").read_text().rstrip().endswith("</html>")
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert not list((tmp_path / "run").glob(".start-*"))


def struck_at_a_checkpoint(arguments: list[str], folder: str, number: int, times: int) -> None:
    """Runs a verb; when its leader writes the first checkpoint all its processes get a signal, as from a terminal."""
    os.setsid()
    os.chdir(folder)
    write = archive.save_checkpoint

    def struck(*given: Any) -> None:
        if not Path("struck").exists():
            Path("struck").touch()
            for _ in range(times):
                os.killpg(0, number)
        write(*given)

    archive.save_checkpoint = struck  # type: ignore[assignment]  # ranks are forked, and have it too
    sys.argv = ["polyrhythm", *arguments]
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    entry.main()


@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGHUP, 2)],
)
def test_a_checkpoint_under_way_is_whole_or_not_there(number: int, times: int, tmp_path: Path) -> None:
    options = [*OPTIONS, "--epochs", "100000", "--batch-size", "64", "--workers", "2"]
    given = (["train", *options], str(tmp_path), number, times)
    process = CONTEXT.Process(target=struck_at_a_checkpoint, args=given)
    process.start()
    process.join(60)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 130, said
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("interrupted")
    assert (tmp_path / "struck").exists()
    found = checkpoints(tmp_path / "run" / "checkpoints")
    for path in found:
        load_checkpoint(path)
    if times == 1 or number != signal.SIGINT:  # else it has ended at once
        assert found
        assert said.splitlines()[-1] == "interrupted; continue with: polyrhythm train --resume run"
    assert not [
        path for path in (tmp_path / "run").rglob("*") if ".start-" in path.name or "partial" in path.name
    ]
