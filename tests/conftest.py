"""What holds for all tests: one that takes too long tells where all processes are that it has started.

And signals are what they are in a terminal, even where tests run in the background, or under `nohup`, and inherit
that some are ignored. Ranks that are threads of the tests do not wait for name servers, as those in processes do not.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from polyrhythm.launch.process import ask_names_briefly
from processes.stacks import stacks_of_children, watch


def pytest_configure() -> None:
    ask_names_briefly()
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    watch()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Iterator[Any]:
    """Adds the children's stacks to those of this process, which the limit on a test's time shows."""
    result = yield
    end = signal.getsignal(signal.SIGALRM)
    if callable(end):

        def tell_and_end(number: int, frame: FrameType | None) -> None:
            print(stacks_of_children(), file=sys.stderr, flush=True)
            end(number, frame)

        signal.signal(signal.SIGALRM, tell_and_end)
    return result
