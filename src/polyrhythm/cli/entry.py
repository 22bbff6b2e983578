"""Entry point of the command line: takes signals before anything slow is loaded."""

from __future__ import annotations

import signal
from typing import NoReturn

from polyrhythm.launch.signals import ASKING, interrupt


def main() -> NoReturn:
    """Run a verb and exit with its status; see `polyrhythm.cli.main`."""
    for number in ASKING:
        if (
            signal.getsignal(number) is not signal.SIG_IGN
        ):  # as under nohup, and in the background of a script
            signal.signal(number, interrupt)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, ASKING
    )  # a parent's threads may have blocked them, as Ray's do
    from polyrhythm.launch.process import leave_errors_to_python, loading, open_standard_descriptors

    open_standard_descriptors()
    leave_errors_to_python()
    with loading():
        from polyrhythm.cli.main import main as run_verb

    run_verb()
