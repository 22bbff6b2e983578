"""A rank as a child process of the launcher: its side of the pipe.

The child tells its launcher, one JSON object a message: {"event": …} for the run's events, and at most once
{"error": text, "kind": …} before it leaves with a status that is not 0.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import local
from polyrhythm.errors import PeerLost, PolyrhythmError, RequestError, fault_of_machine
from polyrhythm.events import Event
from polyrhythm.launch.children.meeting_point import MeetingPoint
from polyrhythm.launch.gpus import gpu_of
from polyrhythm.launch.name_service import ask_names_briefly
from polyrhythm.launch.parentage import leave_with
from polyrhythm.launch.rank import Circumstances, run_rank
from polyrhythm.launch.signals import ASKING
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.cast import Cast

REQUEST, RUN, PEER, BUG = "request", "run", "peer", "bug"


def child_main(job: Job, cast: Cast, peer: Peer, threads: int, pipe: Connection) -> None:
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
