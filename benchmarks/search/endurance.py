"""200 trials whose workers are killed every minute, and all of it once: every trial ends, and none is made twice.

    python benchmarks/search/endurance.py --out DIR [--trials 200] [--every 60] [--stop-after S]

`polyrhythm tune` with two real workers a trial, on `digits`. Every so many seconds a process below the search is ended
by SIGKILL: a worker, or the process that makes the runs. When half of the trials are over, the search and everything
below it are, and `tune --resume` goes on; so they are after `--stop-after`, and the same command goes on. At the end:
how many trials came to an end, how many numbers, folders and parameters occur twice, and how many runs' logs do not
tell of exactly one end, after the epochs that were asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

EPOCHS = 2


def below(pid: int) -> list[int]:
    """Gives the processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        for child in children.get(left.pop(), []):
            found.append(child)
            left.append(child)
    return found


def ended(folder: Path) -> int:
    """Gives how many trials have ended."""
    if not (folder / "study.db").is_file():
        return 0
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{folder / 'study.db'}?mode=ro", uri=True)) as study,
    ):
        return int(study.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0])
    return 0


def epochs_of(run: Path) -> list[float]:
    """Gives the epochs of each end of a run that its log tells of."""
    with suppress(OSError):
        events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        return [event["result"]["epochs"] for event in events if event.get("event") == "RunEnded"]
    return []


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stop-after", type=float, default=float("inf"))
    given = parser.parse_args()
    place = given.out
    place.mkdir(parents=True, exist_ok=True)
    space, folder, counts = place / "space.yaml", place / "search", place / "counts.json"
    done = {"killed": 0, "killed_all": 0, "seconds": 0.0, "halfway": False}
    if counts.is_file():
        done = json.loads(counts.read_text())
    space.write_text("lr: {from: 0.001, to: 0.5, log: true}\nlabel_smoothing: {from: 0.0, to: 0.2}\n")
    command = [sys.executable, "-m", "polyrhythm", "tune"]
    first = [
        *command,
        str(space),
        "--method",
        "random",
        "--budget",
        f"{given.trials} trials",
        "--out",
        str(folder),
    ]
    first += ["--data", "digits", "--model", "mlp", "--workers", "2", "--epochs", str(EPOCHS)]
    again = [*command, "--resume", str(folder)]
    draw, began_s, before_s = random.Random(done["killed"]), time.monotonic(), done["seconds"]

    def killed_all() -> None:
        for pid in (process.pid, *below(process.pid)):
            kill(pid)
        process.wait()
        done["killed_all"] += 1

    process = subprocess.Popen(
        again if (folder / "search.yaml").is_file() else first, stdout=subprocess.DEVNULL
    )
    next_s = given.every
    while process.poll() is None:
        time.sleep(0.5)
        spent_s = time.monotonic() - began_s
        done["seconds"] = before_s + spent_s
        if spent_s > given.stop_after:
            killed_all()
            counts.write_text(json.dumps(done))
            print(f"{ended(folder)} trials have ended: the same command goes on")
            return
        if not done["halfway"] and ended(folder) >= given.trials // 2:
            killed_all()
            done["halfway"] = True
            process = subprocess.Popen(again, stdout=subprocess.DEVNULL)
        if spent_s >= next_s:
            next_s += given.every
            victims = below(process.pid)
            if victims:
                kill(draw.choice(victims))
                done["killed"] += 1
    told = json.loads((folder / "search.json").read_text())
    trials = told["trials"]
    states = Counter(trial["state"] for trial in trials)
    numbers, folders = Counter(t["number"] for t in trials), Counter(t["folder"] for t in trials)
    drawn = Counter(json.dumps(trial["parameters"], sort_keys=True) for trial in trials)
    wrong = 0
    for trial in trials:
        wrong += epochs_of(folder / trial["folder"]) != [EPOCHS]
    print(
        json.dumps(
            {
                "trials": len(trials),
                "states": dict(states),
                "killed": done["killed"],
                "killed_all": done["killed_all"],
                "numbers_twice": sum(count > 1 for count in numbers.values()),
                "folders_twice": sum(count > 1 for count in folders.values()),
                "parameters_twice": sum(count > 1 for count in drawn.values()),
                "without_their_epochs": wrong,
                "seconds": round(done["seconds"]),
                "status": process.returncode,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
