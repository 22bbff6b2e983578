"""The processes of a run, as its launcher has them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.errors import RequestError
from polyrhythm.launch.children.child import child_main
from polyrhythm.launch.children.inherited_garbage import left_to_the_parent
from polyrhythm.launch.children.meeting_point import MeetingPoint
from polyrhythm.roles.job import Job
from polyrhythm.roles.ledger import Ledger
from polyrhythm.strategies.cast import Cast


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

    def __init__(self, job: Job, cast: Cast, threads: int, start_method: str) -> None:
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
