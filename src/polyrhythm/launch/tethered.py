"""Turn this process into a command that does not outlive its launcher, however the launcher ends.

Run by path, without Polyrhythm's own imports, which would cost every rank a second:

    python -I -S tethered.py LAUNCHER_PID COMMAND…
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) to end this process with its parent; this holds beyond `execv`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the kernel knew
        os._exit(1)


def main(launcher: int, command: list[str]) -> None:
    """Become a command that ends with its launcher; never returns."""
    end_with_parent(launcher)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
