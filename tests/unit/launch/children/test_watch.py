"""The launcher's watch, as far as it can be seen without processes."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from conformance.jobs import make_job
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed import rendezvous
from polyrhythm.communication.transports.torch_distributed.rendezvous import newest_incarnations
from polyrhythm.errors import RunError
from polyrhythm.events import Event, Notice, RunEnded
from polyrhythm.launch.children.ranks import Child
from polyrhythm.launch.children.supervisor import Watch
from polyrhythm.roles.job import Losses
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.role_assignment import cast_in_order

GUEST = Peer(1, 1)


def test_a_guest_and_a_successor_of_worker_0_that_come_at_once_know_of_each_other() -> None:
    """Whenever the guest looks who is there: if it does not find the successor, that one is told of the guest."""
    store = rendezvous.host_store()
    present: set[Peer] = set()
    found: list[dict[int, int]] = []

    def look() -> None:  # the guest comes at the last moment at which it may be heard of
        found.append(newest_incarnations(store, 3))
        present.add(GUEST)

    told: list[Collection[Peer]] = []

    def start(peer: Peer, guests: Collection[Peer], ledger: object) -> None:
        told.append(guests)

    job = replace(make_job("parameter_server", 2), losses=Losses(restarts=1))
    ranks = SimpleNamespace(job=job, cast=cast_in_order(2, 1), children=[], start=start)
    watch = Watch(ranks, StopRequest(), mock.Mock(), mock.Mock())  # type: ignore[arg-type]
    watch._recovery.guests = SimpleNamespace(look=look, present=present)  # type: ignore[assignment]
    watch._recovery.succession.lose(Peer(0, 0), -10.0)
    watch._recovery.start_successors(store)
    assert found == [{0: 1}]
    assert told == [{GUEST}]


@dataclass
class Said:
    """What a watch makes of a run of three workers.

    Attributes:
        events: that it passed on.
        error: what it says that the run has failed of.
    """

    events: list[Event] = field(default_factory=list)
    error: str = ""

    @property
    def outcomes(self) -> list[str]:
        """How the run has ended, as its events say."""
        return [event.outcome for event in self.events if isinstance(event, RunEnded)]


def worker(rank: int, status: int) -> tuple[Child, Any]:
    """Gives a worker's process that leaves with a status when its end of the pipe, given too, is closed."""
    ours, theirs = multiprocessing.Pipe()
    process: Any = SimpleNamespace(exitcode=status, join=lambda: None)
    return Child(Peer(rank, 0), process, ours), theirs


def watched(min_workers: int, statuses: tuple[int, int], *, stopped: bool = False) -> Said:
    """Watches a run whose worker 0 hears of no loss, and stops when it is asked to.

    Args:
        min_workers: of the run, in which nobody is started again.
        statuses: with which workers 1 and 2 leave, one after the other; less than 0: by so much a signal.
        stopped: whether somebody wants the run to stop before.
    """
    leader, of_leader = worker(0, 0)
    first, of_first = worker(1, statuses[0])
    second, of_second = worker(2, statuses[1])

    def end(outcome: str) -> None:
        if not of_leader.closed:
            said = RunEnded(time_s=1.0, outcome=outcome, result={})
            of_leader.send_bytes(json.dumps({"event": said.to_json()}).encode())
            of_leader.close()

    def tell(number: signal.Signals) -> None:
        assert number == signal.SIGTERM
        end("interrupted")

    said, stop = Said(), StopRequest()

    def take(event: Event) -> None:
        said.events.append(event)

    job = replace(make_job("parameter_server", 3), losses=Losses(min_workers=min_workers))
    ranks: Any = SimpleNamespace(
        job=job, cast=cast_in_order(3, 1), signal=tell, name=lambda rank: f"rank {rank}"
    )
    ranks.children = [leader, first, second]
    watch = Watch(ranks, stop, take, SimpleNamespace(is_possible=False, check=lambda resume: None))  # type: ignore[arg-type]
    if stopped:
        stop.request()
    of_first.close()
    watch._hear(first)
    watch._deal_with_failures(store := rendezvous.host_store())
    of_second.close()
    watch._hear(second)
    watch._deal_with_failures(store)
    end("interrupted" if stopped else "done")
    try:
        watch.run(store)
    except RunError as error:
        said.error = str(error)
    return said


def test_a_run_that_is_made_to_stop_for_want_of_workers_has_failed_whatever_its_leader_has_heard() -> None:
    said = watched(3, (0, -signal.SIGKILL))
    assert said.error == "2 of 3 workers are left, and min_workers is 3; continue with --resume"
    assert said.outcomes == []
    assert watched(3, (-signal.SIGKILL, -signal.SIGKILL)).error.startswith("1 of 3 workers are left")


def test_who_has_left_in_good_order_is_not_missed() -> None:
    said = watched(2, (0, -signal.SIGKILL))
    assert (said.error, said.outcomes) == ("", ["done"])


def test_a_run_that_people_stop_is_interrupted_however_few_are_left() -> None:
    said = watched(3, (0, -signal.SIGKILL), stopped=True)
    assert (said.error, said.outcomes) == ("", ["interrupted"])
    assert [event.text for event in said.events if isinstance(event, Notice)] == [
        "rank 2 was killed by SIGKILL; the others go on"
    ]
