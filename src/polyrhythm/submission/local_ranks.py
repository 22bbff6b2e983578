"""Ranks of a placed run on one host: starts them, forwards their output, and ends them with the requesting process.

As a program (`python -m polyrhythm.submission.local_ranks`) it is one host's end of an ssh connection; with Ray an
actor holds it. One JSON object a line:

    {"look": {…}}                              ──▶  {"found": {…}}            versions, clock, paths, a port
    {"reach": [address, port]}                 ──▶  {"reached": "" or why not}
    {"start": rank, "environment": …, "words": …}
                                               ──▶  {"rank": 0, "stream": 1 or 2, "line": …} …, {"rank": 0, "status": 0}
    {"signal": 2}                                   to all ranks
    end of input                                    SIGTERM to all ranks, SIGKILL after a few seconds

Imports nothing that is slow: at the end of an ssh connection, ranks are forked from a process that does (Linux).
"""

from __future__ import annotations

import json
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from polyrhythm.launch.rank_server import ForkedRank, RankServer

GRACE_S = 10.0
_PATIENCE_S = 5.0
_LOOK_EVERY_S = 0.02
HostMessage = dict[str, Any]


class LocalRanks:
    """The ranks of this host, and their output.

    Args:
        directory: directory where paths of their commands begin.
        server: server from which they are forked; None: each starts Python.
    """

    def __init__(self, directory: str = ".", server: RankServer | None = None) -> None:
        self.directory = directory
        self.messages: queue.Queue[HostMessage] = queue.Queue()
        self._server = server
        self._processes: dict[int, subprocess.Popen[bytes] | ForkedRank] = {}

    def start(self, rank: int, environment: Mapping[str, str], words: Sequence[str]) -> None:
        """Start a rank: `words` after `polyrhythm`, with these variables in its environment."""
        command, variables = ["-m", "polyrhythm", *words], {**os.environ, **environment}
        pipes = [os.pipe() for _ in ("output", "error")]
        output, error = (written for _, written in pipes)
        forked = self._server and self._server.start(command, variables, self.directory, [output, error])
        process = forked or subprocess.Popen(
            [sys.executable, *command],
            env=variables,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            start_new_session=True,
        )
        os.close(output)
        os.close(error)
        self._processes[rank] = process
        read = [descriptor for descriptor, _ in pipes]
        threading.Thread(target=self._watch, args=(rank, process, read), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes] | ForkedRank, pipes: Sequence[int]) -> None:
        readers = [
            threading.Thread(target=self._read, args=(rank, number, pipe), daemon=True)
            for number, pipe in enumerate(pipes, 1)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        while process.poll() is None:  # soon, since it has closed its output
            time.sleep(_LOOK_EVERY_S)
        self.messages.put({"rank": rank, "status": process.returncode})

    def _read(self, rank: int, number: int, pipe: int) -> None:
        with open(pipe, "rb") as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\n").rpartition("\r")[2]
                self.messages.put({"rank": rank, "stream": number, "line": text})

    def next_messages(self, patience_s: float) -> list[HostMessage]:
        """Return the messages since the last call: at least one, unless none arrives within `patience_s` seconds."""
        found = []
        with suppress(queue.Empty):
            found.append(self.messages.get(timeout=patience_s))
            while True:
                found.append(self.messages.get_nowait())
        return found

    def signal(self, number: int) -> None:
        """Send a signal to every rank that lives."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End all ranks."""
        self.signal(signal.SIGTERM)
        ends = time.monotonic() + grace_s
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends - time.monotonic()))
        self.signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()


def look(directory: str, data: str | None, files: Mapping[str, str]) -> HostMessage:
    """Return a host's facts about itself before ranks are started on it.

    Args:
        directory: directory where the command was given; the host's own folder for jobs is taken where it is
            not there.
        data: a path that must be there, if the command names one.
        files: texts that the command needs, by name; written into the folder.
    """
    place = Path(directory).expanduser()
    if not place.is_dir():
        place = Path.home() / ".cache" / "polyrhythm" / "jobs" / (place.name or "job")
        place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "versions": {name: _version(name) for name in ("polyrhythm", "torch", "torchvision", "timm")},
        "time": time.time(),
        "directory": str(place),
        "data": data is None or (place / Path(data).expanduser()).exists(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def reach(address: str, port: int) -> str:
    """Return why this host cannot open a connection there; empty if it can."""
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE_S):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def serve(lines: Iterator[str]) -> None:
    """Execute the requests in the lines, as the module describes, until they end."""
    server = (
        RankServer(None, "polyrhythm.cli.main", "polyrhythm.api.train") if sys.platform == "linux" else None
    )
    ranks, speaking = LocalRanks(server=server), threading.Lock()
    listeners = []

    def notify(what: HostMessage) -> None:
        with speaking, suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(what) + "\n")
            sys.stdout.flush()

    def pass_on() -> None:
        while True:
            notify(ranks.messages.get())

    threading.Thread(target=pass_on, daemon=True).start()
    for line in lines:
        order = json.loads(line)
        if "look" in order:
            found = look(**order["look"])
            ranks.directory = found["directory"]
            listeners.append(socket.create_server(("", 0)))
            notify({"found": {**found, "port": listeners[-1].getsockname()[1]}})
        elif "reach" in order:
            notify({"reached": reach(*order["reach"])})
        elif "start" in order:
            while listeners:
                listeners.pop().close()
            ranks.start(order["start"], order["environment"], order["words"])
        elif "signal" in order:
            ranks.signal(order["signal"])
    ranks.close()
    if server is not None:
        server.close()


if __name__ == "__main__":
    for _ignored in (signal.SIGINT, signal.SIGHUP):  # the end of the connection ends the ranks
        signal.signal(_ignored, signal.SIG_IGN)
    serve(iter(sys.stdin.readline, ""))
