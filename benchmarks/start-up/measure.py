"""How long does a run of two workers take to its first step, and a replacement to its own, by each way to start them?

    python benchmarks/start-up/measure.py [--rounds 5] [--only WAY …] [--data fashion-mnist] [--model lenet5]
    python benchmarks/start-up/measure.py --imports         names the modules whose import takes longest

All ways start in turn, each with new processes and warm file caches, next to a process that only imports torch. A run
has started when its events say that training starts: then both workers hold the same parameters and begin their first
step. Worker 1 is killed after that, and has a replacement when the event of its joining is there. Processor time is
that of all processes of a run until it has started, and that of the replacement's own process until it has joined.
Every round is written to `results.json` as it comes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
POLL_S = 0.002
GIVE_UP_S = 120.0
NAMED_MODULES = 12
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
RANK_BYTES = 60 << 20
"""Least memory of a process that has imported torch."""
COLUMNS = ("start_s", "start_cpu_s", "replaced_s", "replaced_cpu_s", "joined_s")

Commands = list[tuple[list[str], dict[str, str]]]


def module(*words: str) -> list[str]:
    """Return the command of a Python module."""
    return [sys.executable, "-m", *words]


def free_port() -> int:
    """Return a port that no process uses now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def torchrun(job: list[str], folder: Path) -> Commands:
    """Two hosts of one rank: with several ranks on a host torchrun starts all of them again."""
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--master-addr", "127.0.0.1"]
    where += ["--master-port", str(free_port())]
    train = [
        "-m",
        "polyrhythm",
        *without(job, "--workers"),
        "--out",
        str(folder / "run"),
        "--resume",
        "auto",
    ]
    return [
        (module("torch.distributed.run", *where, "--node-rank", str(host), *train), {}) for host in range(2)
    ]


def without(job: list[str], option: str) -> list[str]:
    """Return a job's words without an option and its value."""
    place = job.index(option)
    return job[:place] + job[place + 2 :]


def over_ssh(job: list[str], folder: Path) -> Commands:
    """A host that is this one, reached by a stand-in of ssh that executes its command here."""
    stand_in = folder / "ssh"
    stand_in.write_text(
        '#!/bin/sh\nif [ "$1" = -G ]; then echo hostname 127.0.0.1; exit; fi\n'
        'while [ "$1" = -o ]; do shift 2; done\nshift\nexec sh -c "exec $*"\n'
    )
    stand_in.chmod(0o755)
    (folder / "hosts").write_text("localhost slots=2\n")
    engine = f"ssh(hosts='{folder / 'hosts'}')"
    words = module("polyrhythm", "submit", "--engine", engine, "--wait", "--", *job)
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return [([*words, "--out", str(folder / "run")], path)]


def by_spawn(job: list[str], folder: Path) -> Commands:
    """`polyrhythm.train` in a script, with its own default of a start method."""
    return [([sys.executable, str(HERE / "in_python.py"), str(folder / "run"), *job], {})]


def own_loop(job: list[str], folder: Path) -> Commands:
    """A user's loop, which writes the same events."""
    (folder / "run").mkdir()
    return [
        (module("polyrhythm", "run", "--workers", "2", str(HERE / "own_loop.py"), str(folder / "run")), {})
    ]


WAYS: dict[str, Callable[[list[str], Path], Commands]] = {
    "train (fork)": lambda job, folder: [
        (module("polyrhythm", *job, "--out", str(folder / "run"), "--json"), {})
    ],
    "train() in Python (spawn)": by_spawn,
    "run, own loop": own_loop,
    "submit, ssh": over_ssh,
    "torchrun": torchrun,
}


def stat_of(pid: int) -> list[str]:
    """Return the fields of a process's state from the third on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants() -> dict[int, list[str]]:
    """Return this process's living descendants and their states, the oldest first."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                found[int(entry.name)] = stat_of(int(entry.name))
    kin = {os.getpid()}
    while more := {pid for pid, stat in found.items() if int(stat[1]) in kin and pid not in kin}:
        kin |= more
    kin.discard(os.getpid())
    return {pid: found[pid] for pid in sorted(kin, key=lambda pid: (int(found[pid][19]), pid))}


def own_cpu_s(stat: list[str]) -> float:
    """Return the processor time of a process."""
    return (int(stat[11]) + int(stat[12])) * TICK_S


def total_cpu_s() -> float:
    """Return the processor time of all descendants, and of their children that have ended."""
    return sum(sum(map(int, stat[11:15])) * TICK_S for stat in descendants().values())


def ranks() -> list[int]:
    """Return the processes of ranks: descendants that have torch and no children, in the order of their start."""
    kin = descendants()
    parents = {int(stat[1]) for stat in kin.values()}
    own = [pid for pid, stat in kin.items() if pid not in parents and int(stat[21]) * 4096 > RANK_BYTES]

    def rank(pid: int) -> bytes:
        with suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if variable.startswith(b"RANK="):
                    return variable
        return b""

    return sorted(own, key=rank)


def await_event(name: str, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until a run's events have one of this name."""
    events, until = folder / "run" / "events.jsonl", time.perf_counter() + GIVE_UP_S
    while not (events.exists() and name in events.read_text()):
        failed = any(process.poll() is not None for process in processes)
        if failed or time.perf_counter() > until:
            raise SystemExit(f"no {name}: {(folder / 'words').read_text()[-3000:]}")
        time.sleep(POLL_S)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what was started, in order and then at once."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        for process in processes:
            process.wait(20.0)
    for pid in descendants():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def start(way: str, job: list[str], folder: Path) -> dict[str, float]:
    """Start a run, kill a worker and end the run; return its seconds."""
    with (folder / "words").open("wb") as words:
        began_s = time.perf_counter()
        processes = [
            subprocess.Popen(
                command, env=os.environ | variables, stdout=words, stderr=words, stdin=subprocess.DEVNULL
            )
            for command, variables in WAYS[way](job, folder)
        ]
        try:
            await_event("RunStarted", folder, processes)
            found = {"start_s": time.perf_counter() - began_s, "start_cpu_s": total_cpu_s()}
            time.sleep(1.0)
            before = ranks()
            assert len(before) == 2, before
            killed_s = time.perf_counter()
            os.kill(before[1], signal.SIGKILL)
            await_event("WorkerJoined", folder, processes)
            joined_s = time.perf_counter()
            now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            [replacement] = [pid for pid in ranks() if pid not in before]
            stat = descendants()[replacement]
            found["replaced_s"] = now_s - int(stat[19]) * TICK_S
            found["replaced_cpu_s"] = own_cpu_s(stat)
            found["joined_s"] = joined_s - killed_s
        finally:
            end(processes)
    return found


def import_torch() -> dict[str, float]:
    """Start a process that imports torch and ends; return its seconds."""
    begun = os.times()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    done = os.times()
    cpu_s = done.children_user + done.children_system - begun.children_user - begun.children_system
    return {"start_s": done.elapsed - begun.elapsed, "start_cpu_s": cpu_s}


def slowest_imports() -> list[tuple[float, str]]:
    """Return the modules outside torch whose own code takes longest to import, with their milliseconds."""
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-c",
        "import torch, polyrhythm.cli.main, polyrhythm.api.train",
    ]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = []
    for line in told.splitlines()[1:]:
        own, _, name = line.removeprefix("import time:").split("|")
        if not name.strip().startswith("torch"):
            found.append((int(own) / 1000, name.strip()))
    return sorted(found, reverse=True)[:NAMED_MODULES]


TORCH = "import torch"


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    """Return the medians, and the ratio of each run's processor time to that of importing torch in its round."""
    lines = [
        "| way | start | processor time | to `import torch` | replacement joins | its processor time | after the kill |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for way in rounds[0]:
        own: dict[str, Any] = {
            key: statistics.median(row[way][key] for row in rounds)
            for key in COLUMNS
            if key in rounds[0][way]
        }
        ratios = [row[way]["start_cpu_s"] / row[TORCH]["start_cpu_s"] for row in rounds]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        cells = [f"{own[key]:.2f} s" if key in own else "–" for key in COLUMNS]
        lines.append(f"| {way} | {' | '.join([*cells[:2], spread, *cells[2:]])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the chosen ways, write the rows and print a table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    options.add_argument("--data", default="fashion-mnist")
    options.add_argument("--model", default="lenet5")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument(
        "--imports", action="store_true", help="name the modules that take longest to import, and end"
    )
    chosen = options.parse_args()
    if chosen.imports:
        for milliseconds, name in slowest_imports():
            print(f"  {milliseconds:7.1f} ms  {name}")
        return
    job = ["train", "--data", chosen.data, "--model", chosen.model, "--strategy", "synchronous"]
    job += ["--workers", "2", "--epochs", "100", "--threads", "1"]
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds, load = [], [round(os.getloadavg()[0], 1)]
    for number in range(chosen.rounds + 1):
        row = {TORCH: import_torch()}
        for way in chosen.only:
            with TemporaryDirectory() as place:
                row[way] = start(way, job, Path(place))
        load.append(round(os.getloadavg()[0], 1))
        rounds += [row] if number else []  # the first one fills caches
        print(f"round {number}", json.dumps(row), flush=True)
        chosen.results.write_text(json.dumps({"load": load, "rounds": rounds}, indent=1) + "\n")
    print(table(rounds))
    print(f"load {min(load)} to {max(load)} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
