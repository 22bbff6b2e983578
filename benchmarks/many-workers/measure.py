"""Hundreds of workers on one machine: what they cost, and whether one that waits for a core is taken for lost.

    python benchmarks/many-workers/measure.py [N …]
    python benchmarks/many-workers/measure.py --kill N …

Each N is one run of `polyrhythm train` on digits. Its row is added to results.json when it is through. With `--kill`, a
tenth of the workers, rank 0 among them, is killed at once during the first epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

NUMBERS = (2, 8, 32, 128, 256, 512)
UPDATES, UPDATES_WITH_KILLS, BATCH = 24, 400, 2
KILLED = 0.1
LONGEST_S = 600.0
RESULTS = Path(__file__).with_name("results.json")


class Memory:
    """Looks every two seconds how much memory processes have of their own.

    Args:
        leader: process whose descendants are looked at.

    Attributes:
        own_mb: median over those processes, at the moment when it was highest.
    """

    def __init__(self, leader: int) -> None:
        self.own_mb = 0.0
        self._leader = leader
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(2.0):
            looked_at = _descendants(self._leader)[:64]
            found = [own for each in looked_at if (own := _own_mb(each)) is not None]
            if found and len(found) == len(looked_at):  # else many have left, and rank 0 remains
                self.own_mb = max(self.own_mb, median(found))


def _descendants(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(file.parent.name))
    found, ahead = [], [process]
    while ahead:
        ahead = [child for parent in ahead for child in children.get(parent, [])]
        found += ahead
    return found


def _own_mb(process: int) -> float | None:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return None
    return sum(map(int, re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE))) / 1000


def _command(workers: int, updates: int, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "polyrhythm", "train", "--strategy", "synchronous", "--balance", "off"),
        *("--data", "digits", "--model", "mlp", "--workers", str(workers), "--batch-size", str(BATCH)),
        *("--updates", str(updates), "--out", str(folder)),
    ]


def _events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def row(workers: int, folder: Path) -> dict[str, object]:
    """Return what a run of so many workers took."""
    command = _command(workers, UPDATES, folder)
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    memory = Memory(process.pid)
    try:
        printed, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return {"workers": workers, "status": f"not done after {LONGEST_S:.0f} s"}
    finally:
        memory.close()
        process.kill()
        process.wait()
    seconds = time.monotonic() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = _events(folder / "events.jsonl")[-1]["result"]
    return {
        "workers": workers,
        "status": process.returncode,
        "steps": result["steps"],
        "seconds": round(seconds, 1),
        "trained_s": round(result["seconds"], 1),
        "cpu_s_a_worker": round(cpu_s / workers, 3),
        "own_mb": round(memory.own_mb, 1),
        "lost": result["workers_lost"],
        "lines": printed.count("\n"),
        "load": round(os.getloadavg()[0], 1),
    }


def row_with_kills(workers: int, folder: Path) -> dict[str, object]:
    """Return what became of a run of which a tenth of the workers was killed at once."""
    log = folder / "events.jsonl"
    process = subprocess.Popen(
        _command(workers, UPDATES_WITH_KILLS, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while not (log.exists() and any(each["event"] == "WorkerProgress" for each in _events(log))):
            time.sleep(0.1)
            if process.poll() is not None:
                return {"workers": workers, "status": f"ended with {process.returncode} before a step"}
        ranks = sorted(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
        killed = [ranks[0], *random.Random(0).sample(ranks[1:], max(0, round(KILLED * workers) - 1))]
        for rank in killed:
            os.kill(rank, signal.SIGKILL)
        at_s = _events(log)[-1]["time_s"]
        printed, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return {"workers": workers, "status": f"not done after {LONGEST_S:.0f} s"}
    finally:
        process.kill()
        process.wait()
    events = _events(log)
    joined = [each["time_s"] for each in events if each["event"] == "WorkerJoined"]
    result = events[-1]["result"]
    return {
        "workers": workers,
        "killed": len(killed),
        "status": process.returncode,
        "joined": len(joined),
        "all_back_s": round(max(joined, default=0.0) - at_s, 1),
        "lost": result["workers_lost"],
        "steps": result["steps"],
        "images_not_seen": result["images_not_seen"],
        "lines": printed.count("\n"),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure, and add the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workers", nargs="*", type=int, default=NUMBERS)
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the run ends with this
    for workers in options.workers:
        folder = Path(tempfile.mkdtemp())
        try:
            measured = (row_with_kills if options.kill else row)(workers, folder / "run")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(measured, flush=True)
        rows = [each for each in rows if _key(each) != _key(measured)] + [measured]
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, sorted(rows, key=_key))) + "\n]\n")


def _key(row: dict[str, object]) -> tuple[bool, object]:
    return "killed" in row, row["workers"]


if __name__ == "__main__":
    main()
