"""Measures the link between two ranks of this host, in two processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
from multiprocessing.connection import Connection

from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.communication.transports.torch_distributed.transport import connect
from polyrhythm.errors import RunError
from polyrhythm.launch.name_service import ask_names_briefly
from polyrhythm.launch.signals import held_back
from polyrhythm.planning.link import MeasuredLink, answer_link, measure_link

_MEASURER, _ANSWERER = 0, 1
_PATIENCE_S = 60.0


def measure_inside(start_method: str = "spawn") -> MeasuredLink:
    """Measures a link inside this host, as two ranks of a run would use it.

    Args:
        start_method: `spawn`, or `fork` (quicker) from a process that has not computed on several threads.

    Raises:
        RunError: the two processes came to no end.
    """
    context = multiprocessing.get_context(start_method)
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
        if not ours.poll(_PATIENCE_S):
            raise RunError(f"two ranks of this host exchanged no messages within {_PATIENCE_S:g} s")
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
        results.send_bytes(json.dumps(measured.to_json()).encode())
    results.close()
    os._exit(0)  # there is nothing to leave in good order: the other rank is done too
