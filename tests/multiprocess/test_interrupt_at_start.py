"""Ctrl-C in a terminal while a verb is still being loaded."""

from __future__ import annotations

import os
import pty
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from multiprocess.commands import wait_for

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
