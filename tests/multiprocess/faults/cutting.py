"""A worker's host is cut off in silence: the cable between two network namespaces is pulled."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

from conformance.jobs import blobs, make_job, strategy
from conformance.rank_processes import RankProcesses, Seat
from multiprocess.faults.play import IMAGES, WORKERS
from multiprocess.faults.seen import Seen
from multiprocess.two_hosts import ip, two_hosts
from polyrhythm.api.faults import Outcome
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from polyrhythm.errors import PolyrhythmError
from polyrhythm.events import Event, WorkerLost, WorkerProgress
from polyrhythm.launch.rank import Circumstances, run_rank
from polyrhythm.roles.job import FaultTolerance
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.role_assignment import cast_in_order
from polyrhythm.training.flat_optimizer import make_optimizers_quickly

_CLONE_NEWNET = 0x40000000
_PORT = 29402
FAR = 2
SILENCE_S = 1.0
"""Four of them take somebody for lost: longer than a busy machine lets those wait who are not."""
FAILED = "failed"


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
    job = make_job(spec, WORKERS, dataset=blobs(train=IMAGES), epochs=100_000)
    job = replace(job, losses=FaultTolerance(silence_s=SILENCE_S))
    cast = cast_in_order(WORKERS, job.strategy.traits(WORKERS).servers)

    def tell(event: Event) -> None:
        if seat.rank == 0 and isinstance(event, WorkerLost | WorkerProgress):
            seat.tell((type(event).__name__, event.worker))

    try:
        run_rank(job, cast, from_environment(), 1, Circumstances(StopRequest(), tell))
    except PolyrhythmError as error:
        seat.tell((FAILED, str(error)))


def cut_off(spec: str, folder: Path) -> Seen:
    """Cuts a worker's host off: the others go on without it, or all of them end, and say with whom."""
    size = WORKERS + strategy(spec).traits(WORKERS).servers
    near = [rank for rank in range(size) if rank != FAR]
    with two_hosts() as hosts, RankProcesses(_train, size, hosts, spec) as ranks:

        def hear_until(*facts: tuple[str, int]) -> tuple[str, str | int]:
            while (heard := ranks.hear(0)) not in facts and heard[0] != FAILED:
                pass
            return heard  # type: ignore[no-any-return]

        assert hear_until(("WorkerProgress", FAR))[0] != FAILED
        ip("-n", hosts[0], "link", "set", "cable", "down")
        kind, said = hear_until(("WorkerLost", FAR))
        if kind == FAILED:
            told = [str(said), *(ranks.hear(rank)[1] for rank in near[1:])]
            assert all("is gone" in text for text in told), (
                told
            )  # some only hear of those who ended because of it
            assert any(f"rank {FAR}" in text for text in told), told
            ranks.wait_for_end(near)
            return Seen(Outcome.STOPS, str(said))
        for worker in (0, 0, 1, 1):  # a report tells of the steps since the one before
            assert hear_until(("WorkerProgress", worker))[0] != FAILED
    return Seen(Outcome.GOES_ON, f"worker {said} is lost")
