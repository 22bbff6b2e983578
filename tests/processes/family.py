"""Processes that descend from others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PATIENCE_S, _LOOK_EVERY_S = 60.0, 0.001


def children(pid: int) -> list[int]:
    """Gives the children of a process's first thread, in the order of their numbers; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    """Gives the children of all its threads, theirs, and so on."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []
    found = []
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    return [each for child in found for each in (child, *descendants(child))]


def members(session: int) -> list[int]:
    """Gives the processes of a session, wherever their parents are."""
    everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in everyone if len(found := facts(pid)) > 3 and int(found[3]) == session]


def state(pid: int) -> str:
    """Gives the letter of its state, such as `S`; empty if there is no such process."""
    found = facts(pid)
    return found[0] if found else ""


def facts(pid: int) -> list[str]:
    """Gives what `/proc/PID/stat` says behind the name: state, parent, process group, session, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a signal waits for a process, which is stopped."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def stop(pid: int) -> None:
    """Stops a process, and returns when all its threads have.

    One that waits for a core first takes all signals of lower numbers, SIGTERM among them, that come meanwhile.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + _PATIENCE_S
    while not all(each in ("T", "t", "Z", "") for each in _thread_states(pid)):
        assert time.monotonic() < deadline_s, f"process {pid} does not stop"
        time.sleep(_LOOK_EVERY_S)


def _thread_states(pid: int) -> list[str]:
    try:
        return [state(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Stops processes, and continues them afterwards."""
    held = list(pids)
    for pid in held:
        stop(pid)
    try:
        yield
    finally:
        for pid in held:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def are_gone(pids: Iterable[int]) -> bool:
    """Whether all these processes have ended; children of others stay as zombies until they are waited for."""
    return all(state(pid) in ("", "Z") for pid in pids)


def kill(pids: Iterable[int]) -> None:
    """Kills those that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
