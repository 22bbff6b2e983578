"""Calls of a function in a fork of this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from polyrhythm.errors import RequestError, RunError
from polyrhythm.evaluation import forked_call
from polyrhythm.evaluation.forked_call import ForkedCall, ForkLost, why_no_memory


def outcome(function: Callable[[], Any]) -> Any:
    call = ForkedCall(function)
    try:
        assert call.poll(30)
        return call.result()
    finally:
        call.end()


def test_a_large_result_of_the_memory_at_the_call() -> None:
    values = torch.arange(1_000_000)
    call = ForkedCall(lambda: (os.getpid(), (values * 2).tolist()))
    values.zero_()  # after the call
    assert call.poll(30)
    pid, found = call.result()
    call.end()
    assert pid == call.pid != os.getpid()
    assert found == list(range(0, 2_000_000, 2))


def test_errors_are_raised_here() -> None:
    def refused() -> None:
        raise RequestError("no images")

    def broken() -> None:
        raise ValueError("two\nlines")

    def leaving() -> None:
        sys.exit(3)

    with pytest.raises(RequestError, match="no images"):
        outcome(refused)
    with pytest.raises(RunError, match=r"^SystemExit: 3 \(.*test_forked_call.py:\d+\)$"):
        outcome(leaving)
    with pytest.raises(RunError, match=r"^ValueError: two lines \(.*test_forked_call.py:\d+\)$"):
        outcome(broken)


def test_a_dead_process_is_lost() -> None:
    with pytest.raises(ForkLost, match="signal 9"):
        outcome(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_process_that_waits_for_ever_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_call, "_STUCK_S", 0.1)
    monkeypatch.setattr(forked_call, "_LOOK_EVERY_S", 0.05)
    with pytest.raises(ForkLost, match="it waited without computing"):
        outcome(lambda: time.sleep(100))


def test_peers_notice_the_end_of_the_caller_while_a_fork_runs() -> None:
    ours, theirs = socket.socketpair()
    call = ForkedCall(lambda: time.sleep(100))
    try:
        theirs.settimeout(30)
        ours.close()
        assert theirs.recv(1) == b""
    finally:
        call.end()
        theirs.close()
    assert not runs(call.pid)


def _leave_behind(pipe: Connection) -> None:
    pipe.send(ForkedCall(lambda: time.sleep(100)).pid)
    os._exit(0)


def test_a_fork_ends_with_its_caller() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    caller = context.Process(target=_leave_behind, args=(theirs,))
    caller.start()
    pid = ours.recv()
    caller.join()
    until_s = time.monotonic() + 30
    while runs(pid):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_memory_is_checked_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_call, "free_bytes", lambda: 1000)
    assert why_no_memory(100) == ""
    assert "take up to 6,000 bytes, and 1,000 are free" in why_no_memory(1000)
