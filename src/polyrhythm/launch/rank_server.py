"""A process that has its imports done, and from which ranks are forked: those of a user's script, and those over ssh.

Python and PyTorch take seconds to start, which every rank and every replacement would need again:

    launcher                 rank server                           rank
      starts, or forks it ─▶ imports PyTorch and Polyrhythm
      environment, command ▶ forks ───────────────────────────────▶ becomes `__main__` of the script
      ◀──────────────── its process
      ◀──────────────── the status of its exit ◀──────────────────── exits, or is killed

The server is a clean process with one thread, in which nothing was computed. Ranks end with it, and it ends with the
launcher, however that ends (Linux). `polyrhythm run`, which needs PyTorch itself, forks it, so that PyTorch is imported
once; elsewhere the launcher has threads and has computed, and starts it as a module.

Imports nothing that is slow before it serves.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from polyrhythm.errors import PolyrhythmError
from polyrhythm.launch.tethered import end_with_parent

_STDERR = 2
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def threads_of_ranks(workers: int, threads: int | None) -> str:
    """Return OMP_NUM_THREADS of a script's workers.

    Args:
        workers: number of workers.
        threads: compute threads of each; None: as the environment has it, or their share of the cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // max(1, workers))))
    return shared if threads is None else str(threads)


class ForkedRank:
    """A rank that was forked by a server; used like `Popen`.

    Attributes:
        pid: ID of its process.
        returncode: status of its exit; negative: number of the signal that killed it; None while it runs.
    """

    def __init__(self, server: RankServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Return the status of its exit, or None while it runs."""
        self._server.read(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has exited; return its status.

        Raises:
            TimeoutExpired: it still runs after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            self._server.read(left)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has exited."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class RankServer:
    """The launcher's side of a rank server, which starts at once; for several threads, except `wait` of its ranks.

    Args:
        threads: OMP_NUM_THREADS of the ranks; None: as the environment has it.
        modules: names of modules that ranks need.
        forks: whether it is forked from this process, a command line with one thread.
    """

    def __init__(self, threads: str | None, *modules: str, forks: bool = False) -> None:
        self._turn = threading.RLock()
        self._ranks: dict[int, ForkedRank] = {}
        self._rest = b""
        self._socket, theirs = socket.socketpair()
        with theirs:
            if forks and threading.active_count() == 1:
                self._process: subprocess.Popen[bytes] | _ForkedServer = self._fork(theirs, modules)
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), *modules],
                env=os.environ | ({} if threads is None else {"OMP_NUM_THREADS": threads}),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # the terminal's SIGINT reaches the launcher alone
            )

    def _fork(self, theirs: socket.socket, modules: Sequence[str]) -> _ForkedServer:
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return _ForkedServer(pid)
        try:
            os.setpgid(0, 0)  # the terminal's SIGINT reaches the launcher alone
            self._socket.close()
            descriptor = theirs.detach()
            for each in map(int, os.listdir("/proc/self/fd")):
                if each > _STDERR and each != descriptor:
                    with suppress(OSError):  # the list's own
                        os.close(each)
            _forget_command_line()
            main(launcher, descriptor, modules)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def start(
        self,
        command: Sequence[str],
        variables: dict[str, str],
        folder: str | None = None,
        outputs: Sequence[int] = (),
    ) -> ForkedRank | None:
        """Start a rank; return None if the server has ended.

        Args:
            command: a Python file, or `-m` and a module, with arguments.
            variables: environment of the process.
            folder: working directory of the process; None: that of this one.
            outputs: descriptors of its standard output and standard error; empty: those of this process.
        """
        message = {"command": list(command), "folder": folder or os.getcwd(), "variables": variables}
        with self._turn:
            try:
                socket.send_fds(self._socket, [b"\n"], outputs)
                self._socket.sendall(json.dumps(message).encode() + b"\n")
                pid = self.read(None, lambda answer: "status" not in answer)
            except OSError:
                return None
            if pid is None:
                return None
            rank = self._ranks[pid] = ForkedRank(self, pid)
            return rank

    def read(
        self, patience_s: float | None, awaited: Callable[[dict[str, int]], bool] = lambda answer: True
    ) -> int | None:
        """Handle answers until an awaited one has arrived, or for some seconds; return the process in that.

        Args:
            patience_s: longest wait in seconds; None: unlimited.
            awaited: function that returns whether an answer is awaited.
        """
        with self._turn:
            return self._read(patience_s, awaited)

    def _read(self, patience_s: float | None, awaited: Callable[[dict[str, int]], bool]) -> int | None:
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                answer: dict[str, int] = json.loads(line)
                if "status" in answer:
                    self._ranks.pop(answer["pid"]).returncode = answer["status"]
                if awaited(answer):
                    return answer["pid"]
            if not select.select([self._socket], [], [], patience_s)[0]:
                return None
            received = self._socket.recv(1 << 16)
            if not received:  # its ranks have been killed with it
                for rank in self._ranks.values():
                    rank.returncode = -signal.SIGKILL
                self._ranks.clear()
                return None
            self._rest += received

    def close(self) -> None:
        """End the server, once its ranks have ended."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class _ForkedServer:
    """A server that was forked; used like `Popen`."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def _forget_command_line() -> None:
    """Give this process, a fork of a command line, the signals, streams and hooks with which Python starts."""
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, usual)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout, sys.stderr, sys.excepthook = sys.__stdout__, sys.__stderr__, sys.__excepthook__
    with suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write("rank server")


def serve(launcher: socket.socket) -> None:
    """Fork ranks as the launcher asks for them, until it closes the connection; in ranks it does not return."""
    children: dict[int, int] = {}  # processes by their descriptors
    rest, outputs = b"", []
    while True:
        for ready in select.select([launcher.fileno(), *children], [], [])[0]:
            if ready == launcher.fileno():
                received, given, _, _ = socket.recv_fds(launcher, 1 << 16, 2)
                if not received:
                    return
                outputs += given  # of the next rank
                *lines, rest = (rest + received).split(b"\n")
                for line in filter(None, lines):
                    pid = _forked(json.loads(line), [launcher.fileno(), *children], outputs)
                    while outputs:
                        os.close(outputs.pop())
                    children[os.pidfd_open(pid)] = pid
                    launcher.sendall(json.dumps({"pid": pid}).encode() + b"\n")
            else:
                pid = children.pop(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                launcher.sendall(json.dumps({"pid": pid, "status": status}).encode() + b"\n")


def _forked(message: dict[str, Any], descriptors: Sequence[int], outputs: Sequence[int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        end_with_parent(server)
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        for descriptor in (*descriptors, *outputs):
            os.close(descriptor)
        status = _run(message["command"], message["folder"], message["variables"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run(command: list[str], folder: str, variables: dict[str, str]) -> int:
    """Run a script as Python does; return the status of its exit."""
    import numpy as np
    import torch

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    if rank := variables.get("RANK", ""):
        with suppress(OSError), open("/proc/self/comm", "w") as name:
            name.write(f"rank {rank}")  # for `ps` and `top`: the command is the server's
    if threads := variables.get("OMP_NUM_THREADS", ""):
        torch.set_num_threads(int(threads))
    torch.default_generator.seed()  # as each process of its own, like those of NumPy and, by itself, Python
    np.random.seed()
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    if not sys.flags.safe_path:
        sys.path[0] = folder if is_module else os.path.dirname(os.path.realpath(command[0]))
    status = _status_of(_run_module if is_module else _run_file)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return status


def _run_module() -> None:
    runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]


def _run_file() -> None:
    path = os.path.abspath(sys.argv[0])
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __loader__=loader)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _status_of(run: Callable[[], None]) -> int:
    try:
        run()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 1
    except BaseException as error:
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = _of_script(error)
        sys.excepthook(type(error), error.with_traceback(sys.last_traceback), sys.last_traceback)
        return 1
    return 0


def _of_script(error: BaseException) -> TracebackType | None:
    """Return an error's traceback without the frames of this file and of `runpy`.

    Of a `PolyrhythmError` it ends with the script's call: the message has the rest.
    """
    own = (__file__, runpy.__file__, "<frozen runpy>")
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    last = each = trace
    while each is not None:
        if not each.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            last = each
        each = each.tb_next
    if last is not None and isinstance(error, PolyrhythmError):
        last.tb_next = None
    return trace


def main(launcher: int, descriptor: int, modules: Sequence[str]) -> NoReturn:
    """Serve a launcher, with these modules."""
    end_with_parent(launcher)
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # forbidden in some containers: ranks start Python
        os._exit(0)
    for module in modules:
        import_module(module)
    from polyrhythm.training.flat_optimizer import make_optimizers_quickly

    make_optimizers_quickly()
    with socket.socket(fileno=descriptor) as connection:
        serve(connection)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
