"""Processes that start from this one: as forks of it, or as forks of a clean process that has its imports done.

    fork     this process ──▶ a copy with its data; only while it has computed on no threads
    spawn    this process ──▶ server: imports PyTorch and Polyrhythm, once ──▶ a fork of that, which is sent its task

Python's own `spawn` starts an interpreter for each process. It is used on other systems than Linux, where a fork of a
process with libraries is not safe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NEEDED = ["polyrhythm.evaluation.spawn_server", "polyrhythm.api.train"]
"""Modules that the server imports; the first one blocks these signals."""


class _SpawnedProcess(ForkServerProcess):
    """A fork of the server, with the environment and the blocked signals of the process that makes it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._variables, self._blocked = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        super().run()


class _SpawnContext(ForkServerContext):
    Process = _SpawnedProcess


def context_of(start_method: str) -> BaseContext:
    """Return the context of a start method, `fork` or `spawn`; the first `spawn` starts the server."""
    if start_method != "spawn" or sys.platform != "linux":
        return multiprocessing.get_context(start_method)
    context = _SpawnContext()
    context.set_forkserver_preload(_NEEDED)
    resource_tracker.ensure_running()  # it lets signals through again
    # A signal to all processes of a terminal or a job must not end the server before its children.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
