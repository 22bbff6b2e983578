"""How a local run shares out its cores, and what becomes of its events."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import pytest
import torch.distributed as dist

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RunError
from polyrhythm.events import Event, Notice, RunEnded
from polyrhythm.launch.devices import threads_for_worker
from polyrhythm.launch.process_source import Launcher
from polyrhythm.launch.supervisor import Exited, Fact, Order, Rules, Stop, Supervisor
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss
from polyrhythm.strategies.role_assignment import RoleAssignment


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


class Scripted:
    """Three workers, of which worker 0 hears of no loss, and stops when it is asked to.

    Args:
        statuses: with which workers 1 and 2 leave, one after the other; less than 0: by so much a signal.
    """

    look_every_s = inf
    waitables: tuple[()] = ()

    def __init__(self, statuses: tuple[int, int]) -> None:
        self.on_event: Callable[[Event], None] = lambda event: None
        self._facts: list[Fact] = [Exited(Peer(rank, 0), status) for rank, status in enumerate(statuses, 1)]
        self.outcome = "done"
        self._over = False

    def poll(self, ready: Sequence[Any]) -> list[Fact]:
        if self._facts:
            return [self._facts.pop(0)]
        if self._over:
            return []
        self._over = True
        self.on_event(RunEnded(time_s=1.0, outcome=self.outcome, result={}))
        return [Exited(Peer(0, 0), 0)]

    def carry_out(self, order: Order) -> None:
        if isinstance(order, Stop):
            self.outcome = "interrupted"


def watched(min_workers: int, statuses: tuple[int, int], *, stopped: bool = False) -> tuple[list[Event], str]:
    """Return the events of a run, and the error with which it has failed.

    Args:
        min_workers: of the run, in which nobody is started again.
        statuses: of workers 1 and 2.
        stopped: whether somebody wants the run to stop before.
    """
    events: list[Event] = []
    stop, source = StopRequest(), Scripted(statuses)
    if stopped:
        stop.request()
        source.outcome = "interrupted"
    rules = Rules(min_workers=min_workers, too_few=lambda left: RunError(f"{left} are left"), resume="resume")
    policy = FaultPolicy(worker=OnLoss.GO_ON)
    supervisor = Supervisor(RoleAssignment((0, 1, 2)), range(3), rules, policy, admits="")
    launcher = Launcher(supervisor, dist.HashStore(), source, events.append, stop=stop)
    source.on_event = launcher.on_event
    launcher.run(look_every_s=0.0)
    return events, str(launcher.error or "")


def outcomes(events: list[Event]) -> list[str]:
    return [event.outcome for event in events if isinstance(event, RunEnded)]


@pytest.fixture(autouse=True)
def _a_store_without_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrhythm.launch.process_source.record_loss", lambda store, lost, to: None)


def test_a_run_that_is_made_to_stop_for_want_of_workers_has_failed_whatever_its_leader_has_heard() -> None:
    events, error = watched(3, (0, -signal.SIGKILL))
    assert (outcomes(events), error) == ([], "2 are left")
    assert watched(3, (-signal.SIGKILL, -signal.SIGKILL))[1] == "1 are left"


def test_who_has_left_in_good_order_is_not_missed() -> None:
    events, error = watched(2, (0, -signal.SIGKILL))
    assert (outcomes(events), error) == (["done"], "")


def test_a_run_that_people_stop_is_interrupted_however_few_are_left() -> None:
    events, error = watched(3, (0, -signal.SIGKILL), stopped=True)
    assert (outcomes(events), error) == (["interrupted"], "")
    assert [event.text for event in events if isinstance(event, Notice)] == [
        "worker 2 (rank 2) was killed by SIGKILL; the others continue"
    ]
