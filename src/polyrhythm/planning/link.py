"""Latency and bandwidth of a link between two ranks, from round trips of messages.

    empty    round trip = 2 α + 128 bytes of headers, which are neglected
    large    there, an empty one back = 2 α + M β

Medians of several trips: a busy machine has outliers on one side only. The link inside this host is measured
between two processes started for it (`measure_inside`).
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait

import torch

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.errors import RunError
from polyrhythm.evaluation.start_methods import context_of
from polyrhythm.launch.process import ask_names_briefly
from polyrhythm.launch.signals import held_back

LARGE_BYTES = 8 << 20
_WARM_UP = 3
_EMPTY_TRIPS = 50
_MOST_LARGE_TRIPS = 9
_PATIENCE_S = 2.0
"""Limit for the duration of the large messages of a link together, once there have been three."""

_FEWEST_LARGE_TRIPS = 3


@dataclass(frozen=True)
class MeasuredLink:
    """A measured link between two ranks.

    Attributes:
        latency_s: α, of an empty message.
        bandwidth_bytes_per_s: 1/β.
    """

    latency_s: float
    bandwidth_bytes_per_s: float


def measure_link(network: Communicator, to: int, nbytes: int = LARGE_BYTES) -> MeasuredLink:
    """Measure the link to another rank, which must call `answer_link` at the same time.

    Args:
        network: communicator without other users during the measurement.
        to: the other rank.
        nbytes: number of bytes of a large message.

    Raises:
        PeerLost: the other rank is lost.
    """
    for _ in range(_WARM_UP):
        _trip_s(network, to, None)
    # Both directions are symmetric for empty messages, so half a round trip is the latency.
    empty_s = statistics.median(_trip_s(network, to, None) for _ in range(_EMPTY_TRIPS))
    payload = torch.ones(nbytes, dtype=torch.uint8)
    _trip_s(network, to, payload)  # the first one finds buffers still to be made
    large: list[float] = []
    while len(large) < _FEWEST_LARGE_TRIPS or (len(large) < _MOST_LARGE_TRIPS and sum(large) < _PATIENCE_S):
        large.append(_trip_s(network, to, payload))
    network.send(to, Message(Kind.LEAVE))
    moving_s = max(statistics.median(large) - empty_s, 1e-9)
    return MeasuredLink(empty_s / 2, nbytes / moving_s)


def answer_link(network: Communicator, source: int) -> None:
    """Answer another rank's `measure_link` until it has finished."""
    while network.receive(source)[1].kind is not Kind.LEAVE:
        network.send(source, Message(Kind.REPORT))


def _trip_s(network: Communicator, to: int, payload: torch.Tensor | None) -> float:
    started_at = network.clock.now()
    network.send(to, Message(Kind.VECTOR, payload))
    network.receive(to)
    return network.clock.now() - started_at


_MEASURER, _ANSWERER = 0, 1
_INSIDE_PATIENCE_S = 60.0


def measure_inside(start_method: str = "spawn") -> MeasuredLink:
    """Measure a link inside this host, between two ranks that use it like ranks of a run.

    Args:
        start_method: `spawn`, or `fork` (faster) from a process that has not computed on several threads.

    Raises:
        RunError: one of the two processes died or did not finish.
    """
    context = context_of(start_method)
    ours, theirs = context.Pipe(duplex=False)
    ports = [context.Pipe(duplex=False) for _ in (_MEASURER, _ANSWERER)]
    processes = [
        context.Process(target=_rank, args=(rank, port, theirs), daemon=True)  # type: ignore[attr-defined]
        for rank, (port, _) in enumerate(ports)
    ]
    try:
        with held_back():
            for process in processes:
                process.start()
        theirs.close()
        store = host_store()  # after the processes were forked: they must not inherit its thread
        for _, port in ports:
            port.send(store.port)
        running = {process.sentinel: process for process in processes}
        deadline_s = time.monotonic() + _INSIDE_PATIENCE_S
        while not ours.poll():
            # Either rank waits for the other forever.
            ready = wait([ours, *running], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RunError(
                    f"two ranks of this host exchanged no messages within {_INSIDE_PATIENCE_S:g} s"
                )
            for ended in [each for each in ready if each in running]:
                process = running.pop(ended)
                process.join()  # a sentinel is ready a moment before there is an exit code
                if process.exitcode:
                    raise EOFError
        return MeasuredLink(**json.loads(ours.recv_bytes()))
    except EOFError:
        raise RunError("a rank died while the link inside this host was measured") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(rank: int, port: Connection, results: Connection) -> None:
    ask_names_briefly()
    _, network = connect(local(rank, 2, port.recv()))
    if rank == _ANSWERER:
        answer_link(network, _MEASURER)
    else:
        measured = measure_link(network, _ANSWERER)
        results.send_bytes(json.dumps(asdict(measured)).encode())
    results.close()
    os._exit(0)  # there is nothing to leave in good order: the other rank is done too
