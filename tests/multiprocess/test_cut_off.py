"""A worker's host is cut off in silence: the others go on without it, as strategies declare."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace

import pytest

from conformance.jobs import blobs, make_job, strategy
from conformance.rank_processes import RankProcesses, Seat
from multiprocess.two_hosts import ip, two_hosts
from polyrhythm.api.faults import REPRESENTATIVES, Fault, Outcome, outcomes
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from polyrhythm.errors import PolyrhythmError
from polyrhythm.events import Event, WorkerLost, WorkerProgress
from polyrhythm.launch.rank import run_rank
from polyrhythm.roles.job import Losses
from polyrhythm.roles.world import StopWish
from polyrhythm.strategies.cast import cast_in_order
from polyrhythm.training.quick_optimizers import make_optimizers_quickly

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

_CLONE_NEWNET = 0x40000000
_PORT = 29402
WORKERS, FAR = 3, 2
SILENCE_S = 0.6


def _enter(namespace: str) -> None:
    """Moves this process, which has one thread, into a namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as handle:
        assert library.setns(handle.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _train(seat: Seat, hosts: list[str], spec: str) -> None:
    _enter(hosts[seat.rank == FAR])
    make_optimizers_quickly()
    os.environ.update(
        RANK=str(seat.rank), WORLD_SIZE=str(seat.size), MASTER_ADDR="10.78.0.1", MASTER_PORT=str(_PORT)
    )
    job = make_job(spec, WORKERS, dataset=blobs(train=240), epochs=100_000)
    job = replace(job, losses=Losses(silence_s=SILENCE_S))
    cast = cast_in_order(WORKERS, job.strategy.server_count)

    def tell(event: Event) -> None:
        if seat.rank == 0 and isinstance(event, WorkerLost | WorkerProgress):
            seat.tell((type(event).__name__, event.worker))

    try:
        run_rank(job, cast, from_environment(), 1, StopWish(), tell)
    except PolyrhythmError as error:
        seat.tell(("failed", str(error)))


@pytest.mark.parametrize("spec", REPRESENTATIVES)
def test_the_others_bear_it(spec: str) -> None:
    size = WORKERS + strategy(spec).server_count
    with two_hosts() as hosts, RankProcesses(_train, size, hosts, spec) as ranks:

        def wait_for(fact: tuple[str, int]) -> None:
            while (heard := ranks.hear(0)) != fact:
                assert heard[0] != "failed", heard

        wait_for(("WorkerProgress", FAR))
        ip("-n", hosts[0], "link", "set", "cable", "down")
        assert outcomes(strategy(spec), WORKERS)[Fault.CUT_OFF] is not Outcome.STOPS
        wait_for(("WorkerLost", FAR))
        for worker in (0, 0, 1, 1):  # a report tells of the steps since the one before
            wait_for(("WorkerProgress", worker))
