"""Entry point of the command line: handles Ctrl-C before anything slow is loaded.

A KeyboardInterrupt in the middle of an import may be lost: PyTorch, for one, continues without NumPy if importing
NumPy fails, and swallows the user's Ctrl-C with it. Nothing has begun by then, so the process just exits.
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
    """Run a verb and exit with its status; see `polyrhythm.cli.main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, interrupt)
    from polyrhythm.cli.main import main as run_verb

    run_verb()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Exit at once while something is being imported; otherwise raise KeyboardInterrupt.

    Args:
        number: of the signal.
        frame: the interrupted frame.

    Raises:
        KeyboardInterrupt: no import is under way.
    """
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            sys.stderr.write("interrupted\n")
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
