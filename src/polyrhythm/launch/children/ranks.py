"""Ranks as child processes of their launcher: both sides of the pipe between them.

The launcher starts, signals and ends its children (`Ranks`). It tells each of them first where the ranks meet
and what has happened there (`MeetingPoint`). The child tells its launcher, one JSON object a message:
{"event": …} for the run's events, and at most once {"error": text, "kind": …} before it leaves with a status
that is not 0.

A child that is forked has the garbage of its parent too, and must not collect it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, local
from polyrhythm.errors import PeerLost, PolyrhythmError, RequestError, fault_of_machine
from polyrhythm.events import Event
from polyrhythm.launch.devices import gpu_of
from polyrhythm.launch.process import ask_names_briefly, leave_with
from polyrhythm.launch.rank import Circumstances, run_rank
from polyrhythm.launch.signals import ASKING
from polyrhythm.roles.job import Job
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.role_assignment import RoleAssignment


@dataclass(frozen=True)
class MeetingPoint:
    """Where ranks meet.

    Attributes:
        port: of the store, on the loopback interface.
        address: of this host, under which its ranks are reached by the others.
        key: that links between ranks prove to know.
        met: the incarnations of the ranks that are there, for one that comes late.
        ledger: of the run so far, for a successor of the leader.
    """

    port: int
    address: str = LOOPBACK
    key: bytes = field(default=b"", repr=False)
    met: Mapping[int, int] = field(default_factory=dict)
    ledger: Ledger | None = None

    def to_bytes(self) -> bytes:
        """Packs it for a pipe."""
        told = {"port": self.port, "address": self.address, "key": self.key.hex(), "met": dict(self.met)}
        ledger = None if self.ledger is None else self.ledger.to_json()
        return json.dumps(told | {"ledger": ledger}).encode()

    @classmethod
    def from_bytes(cls, packed: bytes) -> MeetingPoint:
        """Reads what `to_bytes` gave."""
        told = json.loads(packed)
        met = {int(rank): incarnation for rank, incarnation in told["met"].items()}
        ledger = None if told["ledger"] is None else Ledger.from_json(told["ledger"])
        return cls(told["port"], told["address"], bytes.fromhex(told["key"]), met, ledger)


REQUEST, RUN, PEER, BUG = "request", "run", "peer", "bug"


def child_main(job: Job, cast: RoleAssignment, peer: Peer, threads: int, pipe: Connection) -> None:
    """Runs a rank and leaves the process; never returns.

    Args:
        job: what to train.
        cast: who does what.
        peer: this process: its rank, and how many have had it before.
        threads: compute threads of a worker.
        pipe: to the launcher, which first sends where ranks meet.
    """
    if peer.incarnation:
        _renew_streams()
    gc.freeze()  # what the launcher left to be collected (a store of an earlier run) must not be torn down here
    ask_names_briefly()
    stop = StopRequest()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the launcher decides
    signal.signal(signal.SIGTERM, lambda *_: stop.request())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)  # the launcher held them back until there is an answer
    leave_with(os.getppid())

    speaking = threading.Lock()

    def emit(event: Event) -> None:
        with speaking:  # the watchdog has a thread of its own
            pipe.send_bytes(json.dumps({"event": event.to_json()}).encode())

    status = 0
    try:
        point = MeetingPoint.from_bytes(pipe.recv_bytes())
        met = local(peer.rank, cast.size, point.port, peer.incarnation)
        job = replace(job, device=gpu_of(job.device, peer.rank))
        met = replace(met, address=point.address, key=point.key, met=point.met)
        run_rank(job, cast, met, threads, Circumstances(stop, emit, point.ledger))
    except BaseException as error:
        status = 1
        _report(pipe, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing of the launcher's that was inherited (its terminal, its handlers) may be torn down from here.
    os._exit(status)


def _renew_streams() -> None:
    """Makes output streams anew: a thread of the launcher may have held the old ones' locks when this was forked."""
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115


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
    """Lets a child that is forked meanwhile never collect what was garbage before.

    The end of a store that nobody uses any more waits for threads, which a fork does not copy: a child that came upon
    such a store would crash.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass
class Child:
    """A rank's process, and what it last said.

    Attributes:
        peer: which rank, and how many processes have had it before.
        process: of the rank.
        pipe: to it.
        open: whether it may still say something.
        error: what it said of its failure.
        kind: of that error; see `child.py`.
        failed: whether it did not leave well, or said that it will not.
        cause: why it was taken for lost, where it was.
        joined: whether it takes part in the run, as the leader sees it.
    """

    peer: Peer
    process: BaseProcess
    pipe: Connection
    open: bool = True
    error: str = ""
    kind: str = ""
    failed: bool = field(default=False)
    joined: bool = False
    cause: str = ""

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.peer.rank

    @property
    def death(self) -> str:
        """How it has left, in words."""
        status = self.process.exitcode
        if self.cause:
            return self.cause
        if self.error:
            return f"failed: {self.error}"
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"left with status {status}"


class Ranks:
    """Starts, signals and ends them.

    Args:
        job: what they train.
        cast: who does what.
        threads: compute threads of a worker.
        start_method: `fork` or `spawn`.

    Attributes:
        job: what they train.
        cast: who does what.
        children: those that count: who was lost, and can be done without, is left out.
    """

    def __init__(self, job: Job, cast: RoleAssignment, threads: int, start_method: str) -> None:
        self.children: list[Child] = []
        self.job = job
        self.cast = cast
        self._threads = threads
        self._context = multiprocessing.get_context(start_method)
        self._point: MeetingPoint | None = None

    def start(self, peer: Peer, guests: Collection[Peer] = (), ledger: Ledger | None = None) -> Child:
        """Starts a process.

        Args:
            peer: which rank, and how many have had it before.
            guests: who is there beside the children.
            ledger: of the run so far, for a successor of the leader.

        Raises:
            RequestError: the job cannot be sent to it.
        """
        ours, theirs = self._context.Pipe()
        process = self._context.Process(  # type: ignore[attr-defined]
            target=child_main,
            args=(self.job, self.cast, peer, self._threads, theirs),
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
            there = [other.peer for other in self.children if other.open and not other.failed]
            self._tell(child, replace(self._point, met=dict([*there, *guests]), ledger=ledger))
        self.children.append(child)
        return child

    def open_at(self, point: MeetingPoint) -> None:
        """Tells all where they meet."""
        self._point = point
        for child in self.children:
            self._tell(child, point)

    def signal(self, number: signal.Signals) -> None:
        """Signals all that live."""
        for child in self.children:
            if child.process.pid is not None and child.process.is_alive():
                os.kill(child.process.pid, number)

    def kill(self, child: Child) -> None:
        """Ends one, and forgets it."""
        child.process.kill()
        child.process.join()
        self.children.remove(child)

    def end(self) -> None:
        """Ends all."""
        self.signal(signal.SIGKILL)
        for child in self.children:
            child.process.join()

    def name(self, rank: int) -> str:
        """Names a rank for people."""
        if rank in self.cast.workers:
            return f"worker {self.cast.workers.index(rank)} (rank {rank})"
        return f"server {self.cast.servers.index(rank)} (rank {rank})"

    def _tell(self, child: Child, point: MeetingPoint) -> None:
        with suppress(BrokenPipeError):  # it has died already, as will be seen
            child.pipe.send_bytes(point.to_bytes())
