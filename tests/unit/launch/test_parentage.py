"""Which process has started this one, and what ends with it."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
signal.pause()
"""
GRANDCHILD = """
import os, signal, sys
from polyrhythm.launch.process import first_parent, leave_with
if not (forked := os.fork()):
    print("of a copy", first_parent() == os.getppid(), flush=True)
    os._exit(0)
os.waitpid(forked, 0)
print("its own", first_parent() == int(sys.argv[1]), flush=True)
leave_with(first_parent())
signal.pause()
"""


def test_a_process_ends_with_the_one_that_has_started_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, GRANDCHILD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout as said:
        assert [said.readline(), said.readline()] == ["of a copy True\n", "its own True\n"]
        child.kill()
        child.wait()
        assert said.readline() == ""  # whoever could still write has ended
