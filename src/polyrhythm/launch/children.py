"""Ranks as child processes of their launcher: both sides of the pipe between them, and a run made of them.

The launcher starts, signals and ends its children (`Children`). It first sends each of them the meeting point
of the ranks and the events so far (`MeetingPoint`). A child sends one JSON object a message: {"event": …} for
the run's events, and at most once {"error": text, "kind": …} before it exits with a nonzero status. The
consequences of a failed rank are decided in `supervisor.py`.

A child that is forked has the garbage of its parent too, and must not collect it.

If the run cannot continue without a failed rank, it is restarted from its last checkpoint (`run_restarting`):

session 1   |---C---C-----x  server 0 dies: all ranks end          C: checkpoint
session 2           |-----------C---C---|                          steps after the last checkpoint are
repeated
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (else each rank imports it, for its first connection)
import gc
import json
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

from polyrhythm.communication.secret import NONCE_BYTES
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, host_store, local
from polyrhythm.errors import PeerLost, PolyrhythmError, RequestError, fault_of_machine
from polyrhythm.evaluation.start_methods import context_of
from polyrhythm.events import (
    Event,
    Restarted,
    RunStarted,
    WorkerProgress,
    from_json,
)
from polyrhythm.launch.devices import (
    available_cores,
    device_of_worker,
    gpu_of,
    threads_for_worker,
    threads_next_to_gpus,
)
from polyrhythm.launch.joining.connections import Address
from polyrhythm.launch.joining.join_server import Entrance, Inside
from polyrhythm.launch.process import (
    ask_names_briefly,
    leave_errors_to_python,
    leave_with,
    tolerate_lost_output,
)
from polyrhythm.launch.process_source import Launcher
from polyrhythm.launch.rank import RankContext, run_rank
from polyrhythm.launch.signals import ASKING, Preemption, asked_to_stop, held_back
from polyrhythm.launch.supervisor import (
    BUG,
    PEER,
    REQUEST,
    RUN,
    Exited,
    Fact,
    Failed,
    Kill,
    Order,
    RankLost,
    Rules,
    Start,
    Stop,
    Supervisor,
)
from polyrhythm.launch.watchdog import cause_of_loss
from polyrhythm.roles.checkpointing.archive import Archive, Snapshot
from polyrhythm.roles.job import Job
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import LEADER, StopRequest
from polyrhythm.strategies.role_assignment import RoleAssignment, roles_in_order
from polyrhythm.training.flat_optimizer import make_optimizers_quickly

Emit = Callable[[Event], None]
Play = Callable[[Job, Emit], bool]


@dataclass(frozen=True)
class MeetingPoint:
    """Meeting point of the ranks.

    Attributes:
        port: TCP port of the store, on the loopback interface.
        address: address of this host, as ranks of other hosts reach it.
        key: key that links between ranks prove to know.
        met: generations of the present ranks, for a late rank.
        ledger: ledger of the run so far, for a replacement of the leader.
    """

    port: int
    address: str = LOOPBACK
    key: bytes = field(default=b"", repr=False)
    met: Mapping[int, int] = field(default_factory=dict)
    ledger: Ledger | None = None

    def to_bytes(self) -> bytes:
        """Return it as bytes, for a pipe."""
        values = {"port": self.port, "address": self.address, "key": self.key.hex(), "met": dict(self.met)}
        ledger = None if self.ledger is None else self.ledger.to_json()
        return json.dumps(values | {"ledger": ledger}).encode()

    @classmethod
    def from_bytes(cls, packed: bytes) -> MeetingPoint:
        """Rebuild it from the result of `to_bytes`."""
        values = json.loads(packed)
        met = {int(rank): generation for rank, generation in values["met"].items()}
        ledger = None if values["ledger"] is None else Ledger.from_json(values["ledger"])
        return cls(values["port"], values["address"], bytes.fromhex(values["key"]), met, ledger)


def child_main(job: Job, roles: RoleAssignment, peer: Peer, threads: int, pipe: Connection) -> None:
    """Run a rank with `threads` compute threads, and leave the process. The launcher first sends where ranks meet."""
    tolerate_lost_output()  # new streams: a thread of the launcher may have held the old ones' locks at the fork
    gc.freeze()  # garbage of the launcher (a store of an earlier run) must not be collected here
    ask_names_briefly()
    make_optimizers_quickly()
    stop = StopRequest()
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal sends them to all; the launcher decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.request())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)  # the launcher held them back until there is an answer
    launcher = os.getppid()
    leave_with(launcher)

    speaking = threading.Lock()

    def emit(event: Event) -> None:
        if os.getppid() != launcher:  # others may have ended already: do not continue without them
            os._exit(1)
        with speaking:  # the watchdog has a thread of its own
            pipe.send_bytes(json.dumps({"event": event.to_json()}).encode())

    status = 0
    try:
        point = MeetingPoint.from_bytes(pipe.recv_bytes())
        met = local(peer.rank, roles.size, point.port, peer.generation)
        job = _on_its_device(job, roles, peer.rank)
        met = replace(met, address=point.address, key=point.key, met=point.met)
        run_rank(job, roles, met, threads, RankContext(stop, emit, point.ledger))
    except BaseException as error:
        status = 1
        _report(pipe, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing of the launcher's that was inherited (its terminal, its handlers) may be torn down from here.
    os._exit(status)


def _on_its_device(job: Job, roles: RoleAssignment, rank: int) -> Job:
    if job.devices and rank in roles.workers:
        return replace(job, device=device_of_worker(job.devices, roles.workers.index(rank)))
    return replace(job, device=gpu_of(job.device, rank))


def _report(pipe: Connection, error: BaseException) -> None:
    kind = BUG
    error = fault_of_machine(error) or error
    text = "".join(traceback.format_exception(error))
    if isinstance(error, PolyrhythmError):
        kind = REQUEST if isinstance(error, RequestError) else PEER if isinstance(error, PeerLost) else RUN
        text = str(error)
    try:
        pipe.send_bytes(json.dumps({"error": text, "kind": kind}).encode())
    except OSError:
        print(text, file=sys.stderr)


@contextmanager
def left_to_the_parent() -> Iterator[None]:
    """Keep a child that is forked in the meantime from collecting what was garbage before.

    The destructor of an unused store waits for threads, which a fork does not copy: it would crash the child.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass
class Child:
    """A rank's process.

    Attributes:
        open: whether it may still send something.
        failed: whether it has reported an error.
    """

    peer: Peer
    process: BaseProcess
    pipe: Connection
    open: bool = True
    failed: bool = False


class Children:
    """The child processes of a launcher, as a source of processes.

    Args:
        job: training job of the children.
        roles: the ranks by role.
        threads: compute threads of each rank, if it is a worker.
        start_method: `fork` or `spawn`.
        stop: returns whether a stop was requested.

    Attributes:
        on_event: receiver of the events of the run, each with its rank.
    """

    look_every_s = inf

    def __init__(
        self,
        job: Job,
        roles: RoleAssignment,
        threads: Sequence[int],
        start_method: str,
        stop: StopRequest,
    ) -> None:
        self.on_event: Callable[[Event, int], None] = lambda event, rank: None
        self._job = job
        self._roles = roles
        self._threads = threads
        self._context = context_of(start_method)
        self._stop = stop
        self._ledger = Ledger.of(job.workers)  # a replacement of rank 0 continues with it
        self._children: list[Child] = []
        self._point: MeetingPoint | None = None
        self._store: Any = None

    def start(self, peer: Peer, met: Mapping[int, int] = MappingProxyType({})) -> None:
        """Start the process of a rank; `met` has the generations of the ranks that are there.

        Raises:
            RequestError: the job cannot be sent to it.
        """
        ours, theirs = self._context.Pipe()
        process = self._context.Process(  # type: ignore[attr-defined]
            target=child_main,
            args=(self._job, self._roles, peer, self._threads[peer.rank], theirs),
            name=f"polyrhythm rank {peer.rank}",
            daemon=True,
        )
        try:
            with left_to_the_parent():
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # spawn sends the job to the child
            raise RequestError(
                f"workers cannot be given the data or the model ({error}): define classes and functions at the top "
                "of a module, not inside functions"
            ) from None
        theirs.close()
        child = Child(peer, process, ours)
        if self._point is not None:
            ledger = self._ledger if peer.rank == LEADER else None
            self._notify(child, replace(self._point, met=dict(met), ledger=ledger))
        self._children.append(child)

    def open_at(self, point: MeetingPoint, store: Any) -> None:
        """Send all children where they meet; `store` is the same for this process."""
        self._point, self._store = point, store
        for child in self._children:
            self._notify(child, point)

    def signal(self, number: signal.Signals) -> None:
        """Signal all that live."""
        for child in self._children:
            if child.process.pid is not None and child.process.is_alive():
                os.kill(child.process.pid, number)

    def end(self) -> None:
        """Kill all, and wait until they have left."""
        self.signal(signal.SIGKILL)
        for child in self._children:
            child.process.join()

    @property
    def waitables(self) -> list[Connection]:
        """Pipes of the children that may still send messages."""
        return [child.pipe for child in self._children if child.open]

    def poll(self, ready: Sequence[Any]) -> list[Fact]:
        """Take one message of each child that has one; its event is passed on at once."""
        facts: list[Fact] = []
        left = []
        for child in [child for child in self._children if child.open and child.pipe in ready]:
            try:
                record = json.loads(child.pipe.recv_bytes())
            except (EOFError, OSError):
                left.append(child)
                continue
            if "event" in record:
                event = from_json(record["event"])
                self._ledger.note(event, time.perf_counter())
                self.on_event(event, child.peer.rank)
            else:
                child.failed = True
                facts.append(Failed(child.peer, record["kind"], record["error"]))
        # Rank 0 is first, and all deaths follow the others' messages.
        return facts + [self._left(child) for child in sorted(left, key=lambda child: child.peer)]

    def carry_out(self, order: Order) -> None:
        """Start, kill or stop children."""
        match order:
            case Start(peer=peer, met=met):
                with held_back():  # by the child, until its handlers are installed
                    self.start(peer, met)
                if self._stop.requested:
                    self.signal(signal.SIGTERM)
            case Kill(peer=peer):
                for child in [child for child in self._children if child.peer == peer]:
                    child.process.kill()
                    child.process.join()
                    self._children.remove(child)
            case Stop():
                self.signal(signal.SIGTERM)

    def _left(self, child: Child) -> Exited:
        child.process.join()
        child.open = False
        status = child.process.exitcode or 0
        cause = cause_of_loss(self._store, child.peer) if status or child.failed else ""
        return Exited(child.peer, status, cause=cause)

    def _notify(self, child: Child, point: MeetingPoint) -> None:
        with suppress(BrokenPipeError):  # it has died already, as will be seen
            child.pipe.send_bytes(point.to_bytes())


def run_local(
    job: Job,
    emit: Emit,
    *,
    port: int = 0,
    threads: int | None = None,
    start_method: str = "fork",
    entrance: Entrance | None = None,
) -> bool:
    """Run a job on this host, one process a rank; return whether it was preempted.

    Args:
        job: training job.
        emit: receiver of the run's events.
        port: TCP port of the store, on the loopback interface; 0 picks a free one.
        threads: compute threads of each worker; None shares the cores out.
        start_method: `fork` (quick, data shared; only from a process that has not computed on several threads)
            or `spawn`.
        entrance: admission of joining workers; None: joining is disabled.

    Raises:
        RequestError: the port is in use, a rank found the request wrong, or the job cannot be sent to ranks.
        RunError: a rank failed or died, and the others could not continue.
        Preempted: the notice ran out before everything was written.
    """
    roles = roles_in_order(job.workers, job.traits.servers)
    vacant = roles.workers[job.workers - job.fault_tolerance.vacant :]
    started = sorted(set(range(roles.size)) - set(vacant))
    cores = available_cores()
    shared = threads or threads_for_worker(cores, len(roles.workers) - len(vacant), job.strategy)
    each = [shared] * roles.size
    if job.devices and threads is None:
        for worker, rank in enumerate(roles.workers):
            each[rank] = threads_next_to_gpus(cores, job.devices, worker)
    leave_errors_to_python()  # spawned children inherit it
    stop, preemption = StopRequest(), Preemption(job.fault_tolerance.notice_s)
    children = Children(job, roles, each, start_method, stop)
    resume = "continue with --resume" + (
        "" if job.checkpointing.folder is None else f" {job.checkpointing.folder}"
    )

    def ask() -> None:
        stop.request()
        children.signal(signal.SIGTERM)
        if entrance is not None:
            entrance.ask_to_stop()

    try:
        with asked_to_stop(ask, preemption.begin):
            with held_back():  # by the children, until their handlers are installed
                for rank in started:
                    children.start(Peer(rank, 0))
            if stop.requested:  # when there were only some of them
                ask()
            store = host_store(port)  # after the children were forked: they must not inherit its thread
            children.open_at(_meeting_point(store.port, entrance), store)
            supervisor = Supervisor(
                roles,
                started,
                Rules(
                    job.fault_tolerance.restarts,
                    job.fault_tolerance.min_workers,
                    job.too_few,
                    _LAST_WORDS_S,
                    resume,
                    has_join_server=entrance is not None,
                ),
                job.faults,
                admits="",
            )

            def emit_all(event: Event) -> None:
                if isinstance(event, RunStarted) and not job.devices:
                    event = replace(event, threads=shared, cores=cores)
                emit(event)

            launcher = Launcher(supervisor, store, children, emit_all, entrance, stop)
            children.on_event = launcher.on_event
            launcher.open(Inside(Address(LOOPBACK, store.port), roles))
            look_every_s = _LOOK_EVERY_S if preemption.is_possible else inf  # a signal does not end the wait
            launcher.run(lambda: preemption.check(resume), look_every_s)
            launcher.see_off()
            if launcher.error is not None:
                raise launcher.error
    finally:
        with held_back():  # a user may interrupt again
            children.end()
            if entrance is not None:
                entrance.close()
    return preemption.begun


def _meeting_point(port: int, entrance: Entrance | None) -> MeetingPoint:
    if entrance is None:
        return MeetingPoint(port, LOOPBACK, secrets.token_bytes(NONCE_BYTES))
    return MeetingPoint(port, entrance.address.host, entrance.link_key)


_LOOK_EVERY_S = 0.1
_LAST_WORDS_S = 2.0
"""Seconds for the others to report their observations, once a rank has failed."""


def run_restarting(job: Job, play: Play, emit: Emit, restarts: int) -> bool:
    """Run a job; restart it from its last checkpoint whenever it loses a rank that it cannot continue without.

    Args:
        job: training job; it writes checkpoints where it is to be restarted.
        play: runs a job, and returns whether it was preempted.
        emit: receiver of the run's events.
        restarts: largest number of restarts.
    """
    time_s = 0.0
    for restart in range(1, restarts + 2):
        steps: dict[int, int] = {}

        def on_event(event: Event, steps: dict[int, int] = steps, shift_s: float = time_s) -> None:
            nonlocal time_s  # all times are those since the first start
            event = replace(event, time_s=event.time_s + shift_s)
            time_s = max(time_s, event.time_s)
            if isinstance(event, WorkerProgress):
                steps[event.worker] = event.step
            emit(event)

        try:
            return play(job, on_event)
        except RankLost as loss:
            if restart > restarts:
                raise
            job, text, lost = _again(job, steps, loss, f"restart {restart} of {restarts}")
            emit(Restarted(time_s=time_s, text=text, updates_lost=lost))
    raise AssertionError("the last time either ends well or raises")


def steps_held(snapshot: Snapshot, worker: int, workers: int) -> int:
    """Return how many of a worker's steps a checkpoint holds; servers that count those of all workers know best."""
    counts = [facts["steps"] for _, facts in snapshot.servers if len(facts.get("steps", ())) == workers]
    if counts:
        return min(int(count[worker]) for count in counts)
    state = snapshot.workers.get(worker)
    return 0 if state is None else state.account.step


def _again(job: Job, steps: Mapping[int, int], loss: RankLost, which: str) -> tuple[Job, str, int]:
    archive_job = replace(job, checkpointing=replace(job.checkpointing, resume=True))
    try:
        snapshot = Archive(archive_job).load()
    except RequestError:  # nothing was saved: from the beginning
        held, where = {}, "from the beginning, since there is no checkpoint yet"
        job = replace(job, checkpointing=replace(job.checkpointing, resume=False))
    else:
        held = {worker: steps_held(snapshot, worker, job.workers) for worker in steps}
        where, job = f"from its last checkpoint, epoch {snapshot.epoch}, step {snapshot.step}", archive_job
    lost = sum(max(0, step - held.get(worker, 0)) for worker, step in steps.items())
    text = f"{loss.what}; the run is started again ({which}) {where}: {lost} updates since then are lost"
    return job, text, lost
