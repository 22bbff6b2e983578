"""A worker's host is cut off in silence: the cable between two network namespaces is pulled."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import replace
from pathlib import Path

from conformance.jobs import blobs, make_job, strategy
from conformance.rank_processes import RankProcesses, Seat
from on_processes.faults.play import IMAGES, WORKERS
from on_processes.faults.seen import Seen
from on_processes.two_hosts import ip, plug_in, switched_hosts, two_hosts, unplug
from polyrhythm.api.faults import Outcome
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from polyrhythm.errors import PolyrhythmError
from polyrhythm.events import Event, WorkerLost, WorkerProgress
from polyrhythm.launch.rank import RankContext, run_rank
from polyrhythm.roles.job import FaultTolerance
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.role_assignment import roles_in_order
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


def _train(
    seat: Seat, hosts: list[str], spec: str, address: str = "10.78.0.1", silence_s: float = SILENCE_S
) -> None:
    _enter(hosts[seat.rank == FAR])
    make_optimizers_quickly()
    os.environ.update(
        RANK=str(seat.rank), WORLD_SIZE=str(seat.size), MASTER_ADDR=address, MASTER_PORT=str(_PORT)
    )
    job = make_job(spec, WORKERS, dataset=blobs(train=IMAGES), epochs=100_000)
    job = replace(job, fault_tolerance=FaultTolerance(silence_s=silence_s))
    roles = roles_in_order(WORKERS, job.strategy.traits(WORKERS).servers)

    def tell(event: Event) -> None:
        if seat.rank == 0 and isinstance(event, WorkerLost | WorkerProgress):
            seat.tell((type(event).__name__, event.worker, time.monotonic()))

    try:
        run_rank(job, roles, from_environment(), 1, RankContext(StopRequest(), tell))
    except PolyrhythmError as error:
        seat.tell((FAILED, str(error)))


def cut_off(spec: str, folder: Path) -> Seen:
    """Cuts a worker's host off: the others go on without it, or all of them end, and say with whom."""
    size = WORKERS + strategy(spec).traits(WORKERS).servers
    near = [rank for rank in range(size) if rank != FAR]
    with two_hosts() as hosts, RankProcesses(_train, size, hosts, spec) as ranks:

        def hear_until(*facts: tuple[str, int]) -> tuple[str, str | int]:
            while (heard := ranks.hear(0)[:2]) not in facts and heard[0] != FAILED:
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
    return Seen(Outcome.CONTINUES, f"worker {said} is lost")


def cut_for(spec: str, seconds: float, silence_s: float = SILENCE_S) -> tuple[set[str], float]:
    """Unplugs the far host for a while; returns what was said until a limit later, and when all went on, in seconds.

    Args:
        spec: of the strategy.
        seconds: for how long.
        silence_s: the watchdog's floor; four of them take somebody for lost.
    """
    size = WORKERS + strategy(spec).traits(WORKERS).servers
    with (
        switched_hosts(2) as (hosts, switch),
        RankProcesses(_train, size, hosts, spec, "10.79.0.1", silence_s) as ranks,
    ):
        while (heard := ranks.hear(0))[:2] != ("WorkerProgress", FAR):
            assert heard[0] != FAILED, heard
        unplug(switch, "port2")
        time.sleep(seconds)
        plug_in(switch, "port2")
        up_s = time.monotonic()
        heard_s = dict.fromkeys(range(WORKERS), 0.0)
        first_s = 0.0
        while min(heard_s.values()) < up_s + 5 * silence_s:
            heard = ranks.hear(0)
            if heard[0] != "WorkerProgress":
                return {" ".join(map(str, heard[:2]))}, first_s
            heard_s[heard[1]] = heard[2]
            if not first_s and heard[1] == FAR and heard[2] > up_s:
                first_s = heard[2] - up_s
    return set(), first_s
