"""Which of several failures the launcher names, and how it shares out cores."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.config.assemble import assemble, strategy_from
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch.children.ranks import BUG, PEER, REQUEST, RUN, Child, Ranks
from polyrhythm.launch.children.supervisor import verdict
from polyrhythm.launch.devices import threads_for_worker
from polyrhythm.roles.job import Job, Keeping
from polyrhythm.strategies.role_assignment import RoleAssignment

CAST = RoleAssignment((0, 1), (2,))


@pytest.fixture(scope="module")
def job() -> Job:
    made = assemble(configure({"data": "digits", "model": "mlp", "device": "cpu"}), Keeping())
    return replace(made, keeping=Keeping(folder=Path("runs/a")))


def said(children: list[Child], job: Job) -> Exception:
    failed = [child for child in children if child.failed]
    return verdict(failed, Ranks(job, CAST, 1, "fork"), job)


def child(rank: int, status: int, kind: str = "", error: str = "") -> Child:
    process: Any = SimpleNamespace(exitcode=status)
    pipe: Any = None
    return Child(Peer(rank, 0), process, pipe, open=False, error=error, kind=kind, failed=status != 0)


def test_a_wrong_request_explains_all(job: Job) -> None:
    found = said([child(0, 1, RUN, "broke"), child(1, 1, REQUEST, "the loss is nan")], job)
    assert isinstance(found, RequestError)
    assert str(found) == "the loss is nan"


@pytest.mark.parametrize("echo", [RUN, PEER, BUG])
def test_a_killed_rank_explains_what_the_others_saw(echo: str, job: Job) -> None:
    found = said([child(0, 1, echo, "a collective broke"), child(2, -signal.SIGKILL)], job)
    assert isinstance(found, RunError)
    assert str(found) == "server 0 (rank 2) was killed by SIGKILL; continue with --resume runs/a"


def test_a_failure_explains_a_lost_peer(job: Job) -> None:
    found = said([child(0, 1, PEER, "rank 1 is gone"), child(1, 1, BUG, "Traceback…")], job)
    assert str(found) == "worker 1 (rank 1): Traceback…"


def test_a_lost_peer_is_better_than_nothing(job: Job) -> None:
    found = said([child(0, 1, PEER, "rank 1 is gone"), child(1, 0)], job)
    assert str(found) == "worker 0 (rank 0): rank 1 is gone"


@pytest.mark.parametrize(
    ("cores", "workers", "strategy", "threads"),
    [
        (8, 2, "synchronous", 4),
        (8, 3, "synchronous", 2),
        (2, 4, "synchronous", 1),
        (8, 2, "parameter_server(servers=2)", 4),
        (8, 2, "parameter_server(servers=2, placement=dedicated)", 3),
        (2, 2, "parameter_server(servers=2, placement=dedicated)", 1),
    ],
)
def test_cores_are_shared_out(cores: int, workers: int, strategy: str, threads: int) -> None:
    assert threads_for_worker(cores, workers, strategy_from(strategy)) == threads
