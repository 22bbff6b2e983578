"""What holds for all tests: one that takes too long tells where all processes are that it has started."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from processes.stacks import stacks_of_children, watch


def pytest_configure() -> None:
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
