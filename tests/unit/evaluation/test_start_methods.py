"""Spawned processes are forks of one clean process, and have the environment and signals of the one that makes them."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver

import pytest

from polyrhythm.evaluation.feature_cache import call_in_process
from polyrhythm.evaluation.start_methods import context_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems start Python for each process")


@pytest.fixture(scope="module", autouse=True)
def _own_server() -> None:
    """End the server that other tests have started: it has not imported what blocks signals."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _facts() -> dict[str, object]:
    return {
        "parent": os.getppid(),
        "variable": os.environ.get("POLYRHYTHM_TEST"),
        "blocked": signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }


def _wait() -> None:
    signal.pause()


def test_they_are_forks_of_one_process_with_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    first = call_in_process("spawn", _facts)
    monkeypatch.setenv("POLYRHYTHM_TEST", "set since")
    second = call_in_process("spawn", _facts)
    assert first["parent"] == second["parent"] != os.getpid()
    assert (first["variable"], second["variable"]) == (None, "set since")


@pytest.mark.parametrize("blocked", [False, True])
def test_signals_are_blocked_as_in_the_process_that_makes_them(*, blocked: bool) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM] if blocked else [])
    try:
        assert call_in_process("spawn", _facts)["blocked"] is blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_processes_of_others_that_the_server_forks_have_no_signals_blocked() -> None:
    server = call_in_process("spawn", _facts)["parent"]
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(_facts) == {"parent": server, "variable": None, "blocked": False}


def test_the_import_blocks_signals_in_the_server_alone() -> None:
    program = (
        "import signal\n"
        "import polyrhythm.evaluation.spawn_server\n"
        "print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_a_signal_that_ends_a_job_ends_them_and_not_their_server() -> None:
    server = call_in_process("spawn", _facts)["parent"]
    os.kill(server, signal.SIGTERM)
    process = context_of("spawn").Process(target=_wait)  # type: ignore[attr-defined]
    process.start()
    process.terminate()
    process.join(60.0)
    assert process.exitcode == -signal.SIGTERM
    assert call_in_process("spawn", _facts)["parent"] == server
