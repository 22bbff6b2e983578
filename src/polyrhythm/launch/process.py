"""Operating system settings of a run's process: its parent, name server, memory, output and files.

It ends with the process that has started it, however that one ends. It does not wait long for a name server
that does not answer. It keeps memory that a step frees for the next one: a forward and a backward pass take
and free the same blocks in every step. glibc gives large ones back to the system at once, which then fills
every page with zeros again when the next step first writes to it: 350 to 4,000 page faults a step of
`lenet5`, 11,000 of `resnet18`, and 4 to 7 % of their time. What it prints ends nothing, even where it cannot be
written: a terminal that is gone, a full disk, a reader that has left.

Imports nothing that is slow: the command line imports it first, while its parent most likely lives.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polyrhythm.errors import RequestError

_LOOK_EVERY_S = 1.0


_PARENT = [os.getppid()]  # asked only after PyTorch is there, the parent may have died already
os.register_at_fork(after_in_child=lambda: _PARENT.__setitem__(0, os.getppid()))


def _end_idle_compute_threads() -> None:
    """End the threads with which this one has computed: GNU's OpenMP starts them again when they are needed.

    A fork copies this thread alone. A child would wait for ever for the others at its first computation on several
    threads, since OpenMP takes them to be there still.
    """
    with suppress(OSError):
        for library in {
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/libgomp" in line
        }:
            pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
            if pause is not None:
                pause(_OMP_PAUSE_HARD)


_OMP_PAUSE_HARD = 2
os.register_at_fork(before=_end_idle_compute_threads)


@contextmanager
def importable_main() -> Iterator[None]:
    """Keep processes that are spawned inside from importing a `__main__` that has no file: standard input, or `-c`."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or Path(file).is_file():
        yield
        return
    del main.__file__  # multiprocessing would run it
    try:
        yield
    finally:
        main.__file__ = file


def first_parent() -> int:
    """Return the process that has started this one, even if it is gone."""
    return _PARENT[0]


def leave_with(parent: int) -> None:
    """End this process soon after the process `parent` has died, from now on."""
    threading.Thread(target=_leave_with, args=(parent,), name="parentage", daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def ask_names_briefly() -> None:
    """Keep a name server that does not answer from delaying this process's connections; call it before the first.

    To log it, torch looks up the name of every address that it connects to, even of loopback, one after the other.
    The resolver's usual patience is 5 seconds for each, and twice that.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def leave_errors_to_python() -> None:
    """Keep torch's C++ from printing warnings with traces of its stack next to the errors that it raises as well.

    Call it before torch is imported; processes started later have it, too.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


LOOPBACK = "127.0.0.1"
_LOOPBACK_PATIENCE_S = 2.0


def check_loopback(port: int = 0) -> None:
    """Check that ranks of this host can meet on loopback, at this port; 0 is any that is free.

    Raises:
        RequestError: the port is in use, or the interface is down.
    """
    with socket.socket() as listener, socket.socket() as visitor:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise RequestError(
                f"port {port} cannot be used ({error.strerror}): choose another with --port"
            ) from None
        listener.listen()
        visitor.settimeout(_LOOPBACK_PATIENCE_S)
        try:
            visitor.connect(listener.getsockname())
        except OSError as error:
            raise RequestError(
                f"the loopback interface, on which ranks meet, does not answer ({error.strerror or error}): bring it "
                "up, as with `ip link set lo up`"
            ) from None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ALL_BYTES = 2**31 - 1
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
"""Upper limit that glibc accepts; still larger blocks are mapped by the system every time."""


@contextmanager
def loading() -> Iterator[None]:
    """Import modules without looking for garbage on the way: a tenth of the start, and modules stay anyway."""
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked:
            gc.enable()


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; return False under another C library than glibc."""
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is None:
        return False
    return bool(choose(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)) and bool(
        choose(_TRIM_THRESHOLD, _ALL_BYTES)
    )


class _Output(io.RawIOBase):
    """A descriptor that raises no errors; `lost_bytes` counts unwritten bytes, `error` is the first error."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lost_bytes = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.number

    def isatty(self) -> bool:
        return os.isatty(self.number)

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                left = left[os.write(self.number, left) :]
        except OSError as error:
            self.error = self.error or error
            self.lost_bytes += len(left)
        return size


_OUTPUTS: dict[int, _Output] = {}


def open_standard_descriptors() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed: else the next socket or checkpoint had their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free


def tolerate_lost_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that raise no errors and count them; see `lost_output`."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        _OUTPUTS[number] = _Output(number)
        stream = io.TextIOWrapper(
            io.BufferedWriter(_OUTPUTS[number]),
            encoding=before.encoding if before else "utf-8",
            errors=before.errors if before else "replace",
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, stream)


def lost_output(number: int) -> tuple[int, OSError] | None:
    """Return how many bytes could not be written to descriptor 1 or 2, and the first reason; None if all were."""
    output = _OUTPUTS.get(number)
    return None if output is None or output.error is None else (output.lost_bytes, output.error)


_OTHER_FILES, _FILES_A_RANK = 40, 7
"""Open files of a launcher, measured with 2 to 8 ranks: pipes, handles, the store's connections; a rank has less."""


def descriptors_needed(ranks: int) -> int:
    """Return the number of files that a process of a run with `ranks` ranks may have open at once."""
    return _OTHER_FILES + _FILES_A_RANK * ranks


def allow_descriptors(ranks: int) -> None:
    """Raise this process's limit on open files as far as it may be raised; its children have it, too.

    Raises:
        RequestError: it does not suffice for a run with `ranks` ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors_needed(ranks)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else hard
    if most < needed:
        raise RequestError(
            f"{ranks} ranks need about {needed} open files a process, and this host allows {most}: raise its limit "
            "(`ulimit -Hn`), or ask for fewer workers and servers"
        )
    if soft not in (resource.RLIM_INFINITY, most):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, 1 << 16)), hard))
