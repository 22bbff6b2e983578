"""Where the processes are that tests have started, for the failure of one that waits too long.

Every Python that the tests start imports `at_start/sitecustomize.py`, and its forks have what that has set up: on a
signal they append the stacks of their threads to one file.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from processes.family import descendants, state

_VARIABLE, _SIGNAL = "TEST_STACKS_FILE", signal.SIGUSR2
_PATIENCE_S, _QUIET_S = 2.0, 0.1


def watch() -> None:
    """From now on processes that this one starts can be asked for their stacks; once a test process."""
    made, path = tempfile.mkstemp(prefix="stacks-", suffix=".txt")
    os.close(made)
    atexit.register(_remove, path, os.getpid())
    first = str(Path(__file__).with_name("at_start"))
    known = [
        folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", first)
    ]
    os.environ |= {_VARIABLE: path, "PYTHONPATH": os.pathsep.join([first, *known])}
    faulthandler.register(_SIGNAL, file=os.open(path, os.O_WRONLY | os.O_APPEND))


def stacks_of_children() -> str:
    """Tells of all processes that descend from this one, or were started by such: command, state, stacks."""
    everyone = {*descendants(os.getpid()), *_orphans()} - {os.getpid()}
    return "\n".join(_told(pid) for pid in sorted(everyone))


def _orphans() -> list[int]:
    word = f"{_VARIABLE}={os.environ.get(_VARIABLE)}".encode()
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and word in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def _told(pid: int) -> str:
    found = state(pid)
    try:
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
        )
    except OSError:
        command = ""
    if not command:  # it has ended, and may be a zombie
        return f"process {pid}: state {found or 'ended'}"
    return f"process {pid}: state {found}: {command}\n{_asked(pid)}"


def _asked(pid: int) -> str:
    """Gives the stacks of a process, if it can say them."""
    path = Path(os.environ.get(_VARIABLE, ""))
    if not path.is_file() or not _answers(pid):
        return "  (says nothing of its stacks)"
    before = path.stat().st_size
    with suppress(ProcessLookupError):
        os.kill(pid, _SIGNAL)
    deadline_s, size = time.monotonic() + _PATIENCE_S, before
    while time.monotonic() < deadline_s:
        time.sleep(_QUIET_S)
        if size == (size := path.stat().st_size) > before:
            break
    with path.open(errors="replace") as file:
        file.seek(before)
        return file.read() or "  (does not answer: it may be stopped)"


def _answers(pid: int) -> bool:
    """Whether it has set up what to do at the signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    (caught,) = [line.split()[1] for line in lines if line.startswith("SigCgt:")] or ["0"]
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1)


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not a fork of the tests
        Path(path).unlink(missing_ok=True)
