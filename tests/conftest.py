"""What holds for all tests: one that takes too long tells where all processes are that it has started.

A test process that dies, as in a compiled library, leaves the stacks of its threads to the end of the output.

And signals are what they are in a terminal, even where tests run in the background, or under `nohup`, and inherit
that some are ignored. Ranks that are threads of the tests do not wait for name servers, as those in processes do not.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import settings

import sample
from polyrhythm.launch.process import ask_names_briefly
from processes.stacks import stacks_of_children, watch
from rounding import rounding_by_address

_DEATHS = "TEST_DEATHS_FOLDER"
_FOR_PYTHON_S = 300.0
"""After which a test's process ends: pytest-timeout ends all that can be interrupted, which compiled code cannot."""
_NOT_OURS = ("_pytest", "pluggy", "xdist", "execnet")
settings.register_profile("explore", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
_deaths = pytest.StashKey[int]()  # where stacks are written


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--round-by-address",
        choices=["vectors", "matrices"],
        help="perturb products of vectors, or of all matrices, by where their operands lie (tests/rounding.py)",
    )
    parser.addoption(
        "--sample", action="store_true", help="leave out what tests/sample.md leaves to `make test-all`"
    )
    parser.addoption("--compute-threads", type=int, default=1, help="threads of torch in this process")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sample"):
        kept = sample.chosen(items)
        config.hook.pytest_deselected(items=[*set(items) - set(kept)])
        items[:] = kept


@pytest.fixture(autouse=True, scope="session")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sums over several threads have another order, so the number is the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("--compute-threads"))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    products = request.config.getoption("--round-by-address")
    with rounding_by_address(products == "matrices") if products else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _blocked_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before, "later tests' processes would inherit them"


@pytest.hookimpl(trylast=True)  # after pytest's own, which would write into the middle of the output
def pytest_configure(config: pytest.Config) -> None:
    if not _is_of_xdist(config):
        os.environ[_DEATHS] = tempfile.mkdtemp(prefix="deaths-")
        config.stash[_deaths] = os.dup(2)
    else:
        config.stash[_deaths] = os.open(Path(os.environ[_DEATHS], str(os.getpid())), os.O_WRONLY | os.O_CREAT)
    sample.whole = not config.getoption("--sample")
    faulthandler.enable(config.stash[_deaths])
    ask_names_briefly()
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    watch()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Look for garbage once when all tests are found, and then never again among what they are made of.

    These are millions of objects, which each look afterwards would take a second for.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    faulthandler.dump_traceback_later(_FOR_PYTHON_S, exit=True, file=item.config.stash[_deaths])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for stacks in sorted(Path(os.environ[_DEATHS]).iterdir()):
        lines = stacks.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            terminalreporter.section(f"test process {stacks.name} has died")
        for line in lines:
            if not any(f"/{each}/" in line for each in _NOT_OURS):
                terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _is_of_xdist(config):
        shutil.rmtree(os.environ.pop(_DEATHS), ignore_errors=True)


def _is_of_xdist(config: pytest.Config) -> bool:
    """Return whether another process of pytest has started this one, to share out the tests."""
    return hasattr(config, "workerinput")
