"""Workers on several hosts of one machine: is one that waits for a core, or for a slow link, taken for lost?

    python benchmarks/many-workers/hosts.py [--hosts 4] [--workers 64] [--megabits 1000]

Hosts are network namespaces with shaped links (`benchmarks/namespaces.py`; needs root and iproute2); `--workers` is the
number on each. The run is that of measure.py. Its row is added to hosts.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no name server knows the namespaces, and it says so

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from namespaces import Host, shaped_hosts
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from polyrhythm.config.assemble import CheckpointConfig, assemble
from polyrhythm.config.recipe import configure
from polyrhythm.events import Event, Notice, RunEnded
from polyrhythm.launch.process import allow_descriptors, ask_names_briefly
from polyrhythm.launch.rank import RankContext, run_rank
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import StopRequest
from polyrhythm.strategies.role_assignment import roles_in_order

UPDATES, BATCH, PORT, LONGEST_S = 24, 2, 29700, 600.0
RESULTS = Path(__file__).with_name("hosts.json")


def play(
    job: Job, host: Host, rank: int, address: str, pipe: Connection, turn: AbstractContextManager[bool]
) -> None:
    """Be a rank of the run, and report its notices and its end."""
    host.enter()
    ask_names_briefly()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.workers), MASTER_ADDR=address, MASTER_PORT=str(PORT))

    def emit(event: Event) -> None:
        if isinstance(event, Notice | RunEnded):
            with turn:
                pipe.send(event.to_json())

    run_rank(job, roles_in_order(job.workers, 0), from_environment(), 1, RankContext(StopRequest(), emit))
    os._exit(0)


def row(hosts: list[Host], workers: int) -> dict[str, Any]:
    """Return what a run with so many workers on each host took."""
    options = {"data": "digits", "model": "mlp", "strategy": "synchronous", "batch_size": BATCH}
    options |= {"workers": workers * len(hosts), "updates": UPDATES, "balance": "off"}
    job = assemble(configure(options), CheckpointConfig(checkpoints=0))
    allow_descriptors(job.workers)
    context, began_s = multiprocessing.get_context("fork"), time.monotonic()
    (ours, theirs), turn = context.Pipe(duplex=False), context.Lock()
    processes = [
        context.Process(target=play, args=(job, host, rank, hosts[0].address, theirs, turn), daemon=True)
        for rank, host in enumerate(each for each in hosts for _ in range(workers))
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    notices, result = [], {}
    try:
        for process in processes:
            process.start()
        theirs.close()
        while time.monotonic() - began_s < LONGEST_S and ours.poll(LONGEST_S):
            try:
                event = ours.recv()
            except EOFError:
                break
            if event["event"] == "Notice":
                notices.append(event["text"])
                print(event["text"], flush=True)
            else:
                result = event["result"]
    finally:
        for process in processes:
            process.join(0.0 if not result else 30.0)
            process.kill()
            process.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "hosts": len(hosts),
        "workers_a_host": workers,
        "status": [process.exitcode for process in processes].count(0),
        "steps": result.get("steps"),
        "seconds": round(time.monotonic() - began_s, 1),
        "trained_s": round(result.get("seconds", 0.0), 1),
        "cpu_s_a_worker": round(cpu_s / job.workers, 3),
        "silent": sum("has been silent" in text for text in notices),
        "lost": sum("is taken for lost after" in text or "it leaves" in text for text in notices),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure, and add the row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--megabits", type=float, default=1000.0)
    options = parser.parse_args()
    with shaped_hosts(options.hosts, options.megabits * 1e6) as hosts:
        measured = row(hosts, options.workers) | {"megabits": options.megabits}
    print(measured, flush=True)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    keys = ("hosts", "workers_a_host", "megabits")
    rows = [each for each in rows if any(each[key] != measured[key] for key in keys)] + [measured]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
