"""A rank that torchrun has started, on one host or several.

Compute threads are a host's cores, divided among its workers. torchrun passes on how many ranks it has
started itself. There may be other torchruns on the same machine (two of them are a usual way to try several
hosts), so ranks publish their machine and their usable cores in the store.

One host's notice of preemption is shared by all ranks, so that all leave with the same status:

SIGTERM at any rank ─▶ store: some host is preempted ─┐
worker 0: the run has ended, done or early ───────────┴─▶ all ranks leave with 0, or with 75
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from polyrhythm.communication.transports.shared_memory.meeting import machine_key
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    GROUP_VARIABLE,
    Rendezvous,
    from_environment,
    newest_generations,
)
from polyrhythm.errors import RequestError
from polyrhythm.events import Event, RunEnded
from polyrhythm.launch.devices import check_kinds_of_devices, gpu_of, threads_for_worker, usable_cores
from polyrhythm.launch.joining.join_server import Admission
from polyrhythm.launch.patience import LIMIT_S, Patience
from polyrhythm.launch.process import ask_names_briefly, first_parent, leave_with
from polyrhythm.launch.rank import RankContext, run_rank
from polyrhythm.launch.signals import PREEMPTED, Preemption, asked_to_stop
from polyrhythm.launch.torchrun.gathering import (
    LEADER,
    Gathered,
    RunIsOver,
    StartIsVoid,
    announce_end,
    check_counts,
    end_start,
    gather,
    leave_with_start,
    make_whole,
    starts_hosts_apart,
)
from polyrhythm.launch.torchrun.reception import Late, receiving
from polyrhythm.launch.torchrun.report_rank import leader_speaks
from polyrhythm.launch.torchrun.report_rank import leads as leads
from polyrhythm.launch.torchrun.report_rank import started_by_torchrun as started_by_torchrun
from polyrhythm.launch.torchrun.software import check_software
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.role_assignment import RoleAssignment, roles_for
from polyrhythm.strategies.strategy import Strategy


def workers_of(strategy: Strategy) -> int:
    """Return the number of workers: all processes that are not needed as servers.

    Raises:
        RequestError: there are too few processes.
    """
    size = int(os.environ["WORLD_SIZE"])
    servers = strategy.traits(1).servers  # the same for any number of workers
    workers = size - servers
    if workers < 1:
        raise RequestError(
            f"{strategy} needs {servers} servers and a worker, torchrun started {size} processes: "
            f"start at least {servers + 1}"
        )
    return workers


def roles_of(
    strategy: Strategy, rendezvous: Rendezvous, vacant: int = 0, patience: Patience | None = None
) -> RoleAssignment:
    """Return the role of every rank, after all have published their hosts.

    Args:
        strategy: strategy, which determines the number and places of servers.
        rendezvous: rendezvous of the ranks that torchrun has started.
        vacant: number of vacant worker places; their ranks follow torchrun's.
        patience: time limit; None: the default.
    """
    store, size = rendezvous.store, rendezvous.size
    store.set(f"host/{rendezvous.rank}", os.environ.get("GROUP_RANK", "0"))
    patience = patience or Patience()
    hosts = list(map(int, patience.keys(store, lambda rank: f"host/{rank}", range(size))))
    traits = strategy.traits(1)  # its servers are the same for any number of workers
    roles = roles_for(hosts, traits.servers, traits.placement)
    return replace(roles, workers=(*roles.workers, *range(size, size + vacant)))


@dataclass(frozen=True)
class Parts:
    """A run in parts, which the same ranks execute in sequence; rank 0 announces the next one, and the end of all.

    Attributes:
        outside: rendezvous of the ranks, from the first part to the last.
        jobs: jobs of all parts, the same on all ranks.
    """

    outside: Rendezvous
    jobs: Sequence[Job]


def meet() -> Rendezvous:
    """Return where this rank meets the others; from now on it ends with its torchrun.

    Raises:
        RequestError: a variable of the environment is missing or wrong, or the port is in use.
        RunError: the store cannot be reached.
    """
    ask_names_briefly()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # else the starting process may leave it behind on purpose
        leave_with(first_parent())
    return from_environment()


@contextmanager
def as_group(name: str, first: int, rank: int, size: int) -> Iterator[None]:
    """Have this process be a rank of a run that some of the ranks make by themselves which have been started.

    Args:
        name: name of the run, new.
        first: the global rank of its rank 0.
        rank: rank of this process in it.
        size: number of its ranks.
    """
    own = {"RANK": str(rank), "WORLD_SIZE": str(size), GROUP_VARIABLE: f"{name}:{first}"}
    before = {key: os.environ.get(key) for key in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def run_under_torchrun(
    job: Job,
    emit: Callable[[Event], None],
    threads: int | None = None,
    admission: Admission | None = None,
    gather_s: float = LIMIT_S,
) -> bool:
    """Play this process's role.

    Args:
        job: training job.
        emit: receiver of the run's events, one at a time; called on rank 0 only, but for notices.
        threads: compute threads of each worker; None shares the host's cores out.
        admission: ways for others to join; None: joining is disabled.
        gather_s: seconds for which ranks wait for each other at the start.

    Returns:
        Whether the run ended early because one of its hosts is taken away.

    Raises:
        RequestError: this rank has another run token than rank 0, or none; or its device does not go with the others'.
        RunError: the run failed, or some ranks were missing at the start.
    """
    outside = meet()
    try:
        start, job, roles, shared = _met(outside, lambda start, patience: job, Patience(gather_s))
    except RunIsOver:
        return False
    return _play(outside, start, job, roles, threads or shared, emit, admission)


def lead_part(
    parts: Parts,
    number: int,
    job: Job,
    emit: Callable[[Event], None],
    threads: int | None = None,
    gather_s: float = LIMIT_S,
) -> bool:
    """Play rank 0's role in a part of a run; as `run_under_torchrun` else.

    Args:
        parts: parts of the run.
        number: number of the part.
        job: job of it, resumed or not.
        emit: receiver of the run's events, one at a time.
        threads: compute threads of each worker; None shares the host's cores out.
        gather_s: seconds for which ranks wait for each other.
    """

    def read_job(start: Gathered, patience: Patience) -> Job:
        start.rendezvous.store.set(_PART, f"{number} {job.checkpointing.resume:d}")
        return job

    start, job, roles, shared = _met(parts.outside, read_job, Patience(gather_s))
    preempted = _play(parts.outside, start, job, roles, threads or shared, emit, None, follows=True)
    end_start(parts.outside, start)
    return preempted


def follow_parts(
    parts: Parts, emit: Callable[[Event], None], threads: int | None = None, gather_s: float = LIMIT_S
) -> bool:
    """Play this rank's role in all parts that rank 0 names, until the run is over (`take_leave`).

    Args:
        parts: parts of the run.
        emit: receiver of notices.
        threads: compute threads of each worker; None shares the host's cores out.
        gather_s: seconds for which ranks wait for each other at the start of a part.

    Returns:
        Whether the run ended early because one of its hosts is taken away.

    Raises:
        RunError: the run failed, or some ranks were missing at the start.
    """

    def named(start: Gathered, patience: Patience) -> Job:
        number, resumed = map(int, patience.key(start.rendezvous.store, _PART, LEADER).split())
        job = parts.jobs[number]
        return replace(job, checkpointing=replace(job.checkpointing, resume=bool(resumed)))

    while True:
        try:
            start, job, roles, shared = _met(parts.outside, named, Patience(gather_s))
        except RunIsOver:
            return False
        if _play(parts.outside, start, job, roles, threads or shared, emit, None, follows=True):
            return True


_PART = "part"
"""Key of a start: the number of its part of a run, and whether that part resumes a checkpoint."""


def _play(
    outside: Rendezvous,
    start: Gathered,
    job: Job,
    roles: RoleAssignment,
    threads: int,
    emit: Callable[[Event], None],
    admission: Admission | None,
    *,
    follows: bool = False,
) -> bool:
    """Play this rank's role in a start of a run; return whether the run ended early, a host being taken away."""
    if outside.rank and starts_hosts_apart(outside):
        leave_with_start(outside, start)
    start = _among(start, roles, admission)
    if start.rendezvous.generation:  # the others send its state
        job = replace(job, checkpointing=replace(job.checkpointing, resume=False))
    stop = StopRequest()
    notice = SharedNotice(Preemption(job.fault_tolerance.notice_s), start.rendezvous, emit)

    entrance = None if admission is None else admission.entrance

    def ask() -> None:
        stop.request()
        if entrance is not None:
            entrance.ask_to_stop()

    late = Late(entrance, job.fault_tolerance.silence_s, follows)
    with (
        asked_to_stop(ask, notice.arrive),
        receiving(outside, start, roles, notice.emit, late) as on_event,
    ):
        run_rank(job, roles, start.rendezvous, threads, RankContext(stop, on_event))
    return notice.ended_the_run()


def take_leave(gather_s: float, outside: Rendezvous | None = None) -> None:
    """Let all other ranks leave, on rank 0, where a run has nothing left to do; RunError: some are missing.

    Args:
        gather_s: seconds for which they are waited for.
        outside: rendezvous of the ranks; None: they have not met.
    """
    ask_names_briefly()
    announce_end(from_environment() if outside is None else outside, Patience(gather_s))


def _met(
    outside: Rendezvous, job_of: Callable[[Gathered, Patience], Job], patience: Patience
) -> tuple[Gathered, Job, RoleAssignment, int]:
    """Return the start that this process is of, what to train, the ranks by role, and a worker's compute threads."""
    while True:
        start = gather(outside, patience)
        looking = patience.looking(partial(check_counts, outside, start))
        try:
            check_software(start.rendezvous, range(outside.size), looking)
            job = job_of(start, looking)
            roles = roles_of(job.strategy, start.rendezvous, job.fault_tolerance.vacant, looking)
            shared = threads_beside(start.rendezvous, range(outside.size), roles, job.strategy, looking)
            check_devices(start.rendezvous, range(outside.size), roles, job, looking)
            make_whole(start, looking)
        except StartIsVoid:
            continue
        return start, job, roles, shared


def _among(start: Gathered, roles: RoleAssignment, admission: Admission | None) -> Gathered:
    found = replace(start.rendezvous, size=roles.size)
    if found.generation:
        found = replace(found, met=newest_generations(found.store, roles.size))
    return replace(start, rendezvous=found if admission is None else admission.of(found))


def device_of(device: torch.device) -> torch.device:
    """Return this rank's device: the GPU of its local rank where replicas use GPUs; ranks beyond the last share."""
    return gpu_of(device, int(os.environ.get("LOCAL_RANK", "0")))


def check_devices(
    rendezvous: Rendezvous,
    started: Sequence[int],
    roles: RoleAssignment,
    job: Job,
    patience: Patience | None = None,
) -> None:
    """Refuse that some workers found a GPU on their host and others did not, where the bits of all must agree.

    Every rank that was started must call it.

    Args:
        rendezvous: rendezvous of this rank.
        started: the ranks that torchrun has started.
        roles: ranks by role.
        job: job of this rank, on the device that it has found.
        patience: time limit; None: the default.

    Raises:
        RequestError: the strategy cannot have it.
    """
    store = rendezvous.store
    store.set(f"device/{rendezvous.rank}", job.device.type)
    reported = (patience or Patience()).keys(store, lambda rank: f"device/{rank}", started)
    ranks: dict[str, list[int]] = {}
    for rank, kind in zip(started, reported, strict=True):
        if roles.works(rank):
            ranks.setdefault(kind, []).append(rank)
    if len(ranks) > 1:
        found = ", ".join(f"{kind} on ranks {','.join(map(str, its))}" for kind, its in sorted(ranks.items()))
        # All find the same, except a replacement, which the others do not receive from.
        with nullcontext() if rendezvous.generation else leader_speaks():
            check_kinds_of_devices(job.strategy, job.workers, f"device auto has found {found}: ")


_VARIABLE = "OMP_NUM_THREADS"
_TORCHRUNS_OWN = "1"
"""Value that torchrun sets by default where it starts several ranks."""


def threads_beside(
    rendezvous: Rendezvous,
    started: Sequence[int],
    roles: RoleAssignment,
    strategy: Strategy,
    patience: Patience | None = None,
) -> int:
    """Return the compute threads of this rank, if it is a worker; every rank that was started must call it.

    Args:
        rendezvous: rendezvous of this rank.
        started: the ranks that torchrun has started.
        roles: ranks by role.
        strategy: strategy, which determines whether servers need cores of their own.
        patience: time limit; None: the default.
    """
    store = rendezvous.store
    store.set(f"cores/{rendezvous.rank}", json.dumps([machine_key(), sorted(usable_cores())]))
    reported = map(json.loads, (patience or Patience()).keys(store, lambda rank: f"cores/{rank}", started))
    places = {rank: (machine, set(cores)) for rank, (machine, cores) in zip(started, reported, strict=True)}
    return asked_threads(os.environ) or share_of_cores(rendezvous.rank, places, roles, strategy)


def share_of_cores(
    rank: int, places: Mapping[int, tuple[str, set[int]]], roles: RoleAssignment, strategy: Strategy
) -> int:
    """Return a worker's share of the cores that it may use, among all ranks that may use some of them.

    `places` has every rank's machine and the cores that it may use.
    """
    machine, cores = places[rank]
    beside = [other for other, (where, its) in places.items() if where == machine and its & cores]
    workers = sum(roles.works(other) for other in beside)
    return threads_for_worker(len(cores), max(1, workers), strategy, servers=len(beside) - workers)


def asked_threads(environment: Mapping[str, str]) -> int | None:
    """Return the number of threads requested in the environment, if it was not set by torchrun itself.

    Raises:
        RequestError: the value is no number.
    """
    # The first of a list applies outside of nested regions.
    asked = environment.get(_VARIABLE, "").partition(",")[0].strip()
    several = environment.get("LOCAL_WORLD_SIZE", "1") != "1"
    if not asked or (several and asked == _TORCHRUNS_OWN):
        return None
    if not (asked.isascii() and asked.isdecimal() and int(asked) > 0):
        raise RequestError(
            f"{_VARIABLE} is {asked!r} in the environment: it must be a whole number, 1 or more"
        )
    return int(asked)


_COME, _OUTCOME = "preemption/come", "preemption/outcome"
_PATIENCE = timedelta(seconds=30)
_INTERRUPTED = "interrupted"


class SharedNotice:
    """The notice of preemption that a run's hosts share, as one rank sees it.

    Args:
        preemption: preemption of this host.
        rendezvous: rendezvous of the rank.
        emit: receiver of the run's events.
    """

    def __init__(self, preemption: Preemption, rendezvous: Rendezvous, emit: Callable[[Event], None]) -> None:
        self._preemption = preemption
        self._store = rendezvous.store.clone() if preemption.is_possible else None
        self._emit = emit
        self._over = threading.Event()

    def arrive(self) -> None:
        """Take SIGTERM; what is not done when the notice ends is given up."""
        if self._preemption.is_possible and not self._preemption.begun:
            self._preemption.begin()
            threading.Thread(target=self._exit_in_time, name="notice", daemon=True).start()

    def emit(self, event: Event) -> None:
        """Pass an event on; the others wait for the outcome of the run."""
        if isinstance(event, RunEnded) and self._store is not None:
            with suppress(RuntimeError):
                self._store.set(_OUTCOME, event.outcome)
        self._emit(event)

    def ended_the_run(self) -> bool:
        """Return whether the run ended early for this; called once this rank has left it."""
        self._over.set()
        if self._store is None:
            return False
        try:
            if not self._preemption.begun and not self._store.check([_COME]):
                return False
            self._store.wait([_OUTCOME], _PATIENCE)
            return bytes(self._store.get(_OUTCOME)).decode() == _INTERRUPTED
        except (RuntimeError, dist.DistError):  # the store has left before this rank
            return self._preemption.begun

    def _exit_in_time(self) -> None:
        assert self._store is not None, "no notice arrives where none is possible"
        with suppress(RuntimeError):
            self._store.set(_COME, "")
        if not self._over.wait(self._preemption.left_s):
            os._exit(PREEMPTED)
