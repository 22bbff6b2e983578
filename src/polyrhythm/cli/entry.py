"""Where the command line begins: Ctrl-C counts from here on, before anything that is slow has been loaded.

A KeyboardInterrupt in the middle of an import may be lost: PyTorch, for one, goes on without NumPy when NumPy cannot be
loaded, and the user's Ctrl-C with it. Nothing has been begun then, so the process just leaves.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
_IMPORTING = "<frozen importlib._bootstrap>"


def main() -> NoReturn:
    """Runs a verb, and leaves with its status; see `polyrhythm.cli.main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, interrupt)
    from polyrhythm.cli.main import main as run_verb

    run_verb()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Leaves at once while something is being imported; else interrupts what is under way.

    Args:
        number: of the signal.
        frame: that it has come upon.

    Raises:
        KeyboardInterrupt: nothing is being imported.
    """
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            sys.stderr.write("interrupted\n")
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
