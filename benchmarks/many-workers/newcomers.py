"""Workers join a run by hand, all at once: how long does it take until all take part, and is anybody lost?

    python benchmarks/many-workers/newcomers.py [--workers 4] [--newcomers 20]

`polyrhythm train --listen` on digits with `--vacant` places, then as many `polyrhythm join` at the same time. Once all
take part, or after five minutes, the run is asked to stop. The row is written to newcomers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import BATCH

LONGEST_S = 300.0
RESULTS = Path(__file__).with_name("newcomers.json")
POLYRHYTHM = (sys.executable, "-m", "polyrhythm")


def events_of(log: Path) -> list[dict[str, Any]]:
    """Return the events so far."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def joined(log: Path) -> list[float]:
    """Return when workers have joined, in seconds of the run."""
    return [event["time_s"] for event in events_of(log) if event["event"] == "WorkerJoined"]


def row(workers: int, newcomers: int, folder: Path) -> dict[str, object]:
    """Return what became of the run."""
    log, token = folder / "run" / "events.jsonl", folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    command = (
        *(*POLYRHYTHM, "train", "--strategy", "synchronous", "--balance", "off", "--data", "digits"),
        *("--model", "mlp", "--workers", str(workers + newcomers), "--vacant", str(newcomers)),
        *("--batch-size", str(BATCH), "--epochs", "100000", "--keep-checkpoints", "1"),
        *("--listen", "127.0.0.1:29790", "--token-file", str(token), "--out", str(folder / "run")),
    )
    with (folder / "printed").open("w") as printed:
        run = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
    joins: list[subprocess.Popen[bytes]] = []
    try:
        while not any(event["event"] == "RunStarted" for event in events_of(log)):
            time.sleep(0.1)
            if run.poll() is not None:
                return {"newcomers": newcomers, "status": f"ended with {run.returncode} before a step"}
        began_s = time.monotonic()
        for _ in range(newcomers):
            words = (*POLYRHYTHM, "join", "127.0.0.1:29790", "--token-file", str(token), "--threads", "1")
            joins.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        while len(joined(log)) < newcomers and time.monotonic() - began_s < LONGEST_S:
            time.sleep(0.5)
        times = joined(log)
        took_s = time.monotonic() - began_s
        run.send_signal(signal.SIGTERM)
        run.wait(60)
        states = [join.wait(60) for join in joins]
    finally:
        for process in (run, *joins):
            process.kill()
            process.wait()
    said = (folder / "printed").read_text()
    return {
        "workers": workers,
        "newcomers": newcomers,
        "status": run.returncode,
        "joined": len(times),
        "first_to_last_s": round(max(times) - min(times), 1) if times else None,
        "all_there_s": round(took_s, 1),
        "of_these_ended_well": states.count(0),
        "lost": said.count("is taken for lost after") + said.count("it leaves"),
        "lines": said.count("\n"),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure, and write the row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--newcomers", type=int, default=20)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        measured = row(options.workers, options.newcomers, folder)
        print((folder / "printed").read_text()[-3000:], file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(measured)
    RESULTS.write_text(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main()
