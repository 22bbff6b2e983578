"""A function's result, computed by a fork of this process while this process continues.

    caller   call ─── step ─── step ─── poll ─▶ result, or the error that the function raised
    fork       └─ function ─ result into a pipe ┘

The fork has a copy of all memory of its own of the caller, as it was at the call, so nothing is sent to it; a function
may refer to anything. Memory that processes share is shared with it, too, and must not be written. Its inherited
sockets and pipes are closed, so that others detect the end of the caller, and the kernel ends it with the caller.

The threads of the caller do not exist in the fork, and a lock that one of them held at that moment stays locked. A fork
that waits without using the processor for `_STUCK_S` seconds is killed, and counts as lost.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from polyrhythm.data.cached_split import free_bytes
from polyrhythm.errors import PolyrhythmError, RequestError, RunError

Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_PIECE_BYTES = 1 << 20
_STUCK_S = 60.0
_LOOK_EVERY_S = 1.0


class ForkLost(RunError):
    """The process died, or was stuck, before it had a result."""


_COPIES = 6


def why_no_memory(nbytes: int) -> str:
    """Return why there is no memory for tests of a model of this size while steps continue; empty: there is.

    It is for two snapshots, and for what steps change of the memory that a fork shares: parameters, gradients and two
    vectors of an optimizer.
    """
    needed, free = _COPIES * nbytes, free_bytes()
    if not 0 < free < needed:
        return ""
    return (
        f"two copies of the model and of what steps change take up to {needed:,} bytes, and {free:,} are free"
    )


def can_fork() -> bool:
    """Return whether this system has what `ForkedCall` needs."""
    return sys.platform == "linux" and hasattr(os, "fork")


class ForkedCall(Generic[Result]):
    """Call of a function in a fork of this process; `end` it in any case.

    Args:
        function: function that needs no thread of this process and returns a JSON-able value.

    Attributes:
        pid: process ID of the fork.

    Raises:
        OSError: there is no memory for another process.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        self._pipe, far = os.pipe()
        self._content = bytearray()
        self._status: int | None = None
        self._used_s, self._since_s, self._looked_s = 0.0, time.monotonic(), time.monotonic()
        self._stuck = False
        caller = os.getpid()
        gc.freeze()  # the fork must not destroy what belongs to this process's threads, neither in a hook of the fork
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a process with threads
                self.pid = os.fork()
        except OSError:
            os.close(self._pipe)
            os.close(far)
            gc.unfreeze()
            raise
        if self.pid == 0:
            _run(function, far, caller)
        gc.unfreeze()
        os.close(far)

    def poll(self, seconds: float = 0.0) -> bool:
        """Wait up to `seconds` for the end of the call; return whether it has ended."""
        until_s = time.monotonic() + seconds
        while self._status is None:
            left_s = max(0.0, until_s - time.monotonic())
            if select.select([self._pipe], [], [], min(left_s, _LOOK_EVERY_S))[0]:
                piece = os.read(self._pipe, _PIECE_BYTES)
                self._content += piece
                if not piece:
                    self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                continue
            self._kill_if_stuck()
            if left_s == 0:
                break
        return self._status is not None

    def result(self) -> Result:
        """Return the result, once `poll` has returned true.

        Raises:
            PolyrhythmError: the function has raised it.
            RunError: the function has raised another error, or `SystemExit`; the message has its type, text and line.
            ForkLost: the process died before it had a result.
        """
        assert self._status is not None, "the call has not ended"
        try:
            kind, value = json.loads(self._content)
        except ValueError:
            cause = f"signal {-self._status}" if self._status < 0 else f"status {self._status}"
            why = "it waited without computing" if self._stuck else cause
            raise ForkLost(f"its process has died ({why})") from None
        if kind != "result":
            raise RequestError(value) if kind == "refusal" else RunError(value)
        return value  # type: ignore[no-any-return]

    def end(self) -> None:
        """Kill the process if it is running, and free what it holds."""
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _kill_if_stuck(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        with suppress(OSError, ValueError, IndexError):
            state, used_s = _activity_of(self.pid)
            if (
                used_s != self._used_s or state != "S"
            ):  # a starved process is runnable, and a disk may be slow
                self._used_s, self._since_s = used_s, now_s
            elif now_s - self._since_s > _STUCK_S:
                self._stuck = True
                os.kill(self.pid, signal.SIGKILL)


def _activity_of(pid: int) -> tuple[str, float]:
    """Return the state letter of a process and its threads' processor time, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], float(fields[11]) + float(fields[12])


def described(error: BaseException) -> str:
    """Return an error's type, text and the line that raised it, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _run(function: Callable[[], Any], pipe: int, caller: int) -> None:
    """Run the function in the fork, and leave the process."""
    status = 1
    try:
        _detach(pipe, caller)
        try:
            content = json.dumps(("result", function()))
        except PolyrhythmError as error:
            content = json.dumps(("refusal" if isinstance(error, RequestError) else "error", str(error)))
        except (Exception, SystemExit) as error:
            content = json.dumps(("error", described(error)))
        left = memoryview(content.encode())
        while left:
            left = left[os.write(pipe, left) :]
        status = 0
    finally:
        os._exit(status)  # no destructor or handler of the caller may run here


def _detach(pipe: int, caller: int) -> None:
    """Give up what the fork has inherited of the caller's connections, signals and garbage."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for asking in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all; the caller decides
        signal.signal(asking, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != pipe:
            with suppress(OSError):
                mode = os.fstat(number).st_mode
                if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                    os.close(number)
