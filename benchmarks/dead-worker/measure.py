"""What does a dead worker cost? Three workers, one of them killed with SIGKILL; medians over kills.

    python benchmarks/dead-worker/measure.py [--only NAME …] [--kills 3] [--torchft-python PYTHON]
        [--hivemind-python PYTHON]
    python benchmarks/dead-worker/measure.py --chart        only draws chart.svg from results.json

Every result is written to results.json as it comes; rows of other peers in it are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import job
import numpy
import torch

HERE = Path(__file__).parent
RESULTS, CHART = HERE / "results.json", HERE / "chart.svg"
KILLED = 1
LONGEST_S = 300.0
TORCHRUN = ["-m", "torch.distributed.run"]
NAMES = {
    "train": "polyrhythm train",
    "own_loop": "polyrhythm, own loop",
    "ddp_50": "torchrun, checkpoint every 50 steps",
    "ddp_epoch": "torchrun, checkpoint every epoch",
    "torchft": "torchft, README settings",
    "torchft_1s": "torchft, heartbeat timeout 1 s",
    "ray": "Ray Train, checkpoint every epoch",
    "hivemind": "Hivemind, quickstart settings",
}
UNTIL = 'until "$0" "$@"; do :; done'
"""Restarts a process that failed, where a peer has no launcher that would."""


@dataclass(frozen=True)
class Row:
    """An entry of a diary: whether the step's update is done, its time, and its images."""

    done: bool
    at_s: float
    keys: tuple[float, ...]


def read(file: Path) -> list[Row]:
    """Read a process's diary; an unfinished last row is dropped."""
    numbers, rows, place = numpy.fromfile(file).tolist(), [], 0
    while place + 3 <= len(numbers):
        kind, at_s, count = numbers[place : place + 3]
        end = place + 3 + int(count)
        if end > len(numbers):
            break
        rows.append(Row(kind == 1, at_s, tuple(round(key, 6) for key in numbers[place + 3 : end])))
        place = end
    return rows


def free_port() -> int:
    """Return a port that no process uses now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def commands(name: str, folder: Path, python: str) -> list[tuple[list[str], dict[str, str]]]:
    """Return the processes of a peer, each as arguments and variables of its environment."""
    here = sys.executable
    if name == "train":
        return [([here, str(HERE / "train.py"), str(folder)], {})]
    if name == "own_loop":
        run = [here, "-m", "polyrhythm", "run", "--workers", str(job.WORKERS), "--restarts", "10"]
        return [([*run, str(HERE / "own_loop.py"), str(folder)], {})]
    restarts = ["--max-restarts", "10"]
    if name.startswith("ddp"):
        every = "50" if name == "ddp_50" else str(job.STEPS_PER_EPOCH)
        place = ["--standalone", "--nproc-per-node", str(job.WORKERS)]
        script = [str(HERE / "ddp.py"), str(folder), every]
        return [([here, *TORCHRUN, *restarts, *place, *script], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})]
    if name == "ray":
        return [([here, str(HERE / "ray_loop.py"), str(folder)], {"PYTHONPATH": with_path(HERE)})]
    if name == "hivemind":
        loop = [python, str(HERE / "hivemind_loop.py"), str(folder)]
        peers = [
            (["bash", "-c", UNTIL, *loop], {"REPLICA_GROUP_ID": str(rank)}) for rank in range(job.WORKERS)
        ]
        return [([*loop, "--first"], {}), *peers]
    port = free_port()
    beat = ["--heartbeat_timeout_ms", "1000"] if name == "torchft_1s" else []
    lighthouse = [str(Path(python).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
    waits = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000", *beat]
    found: list[tuple[list[str], dict[str, str]]] = [([*lighthouse, *waits], {})]
    for rank in range(job.WORKERS):
        given = {"REPLICA_GROUP_ID": str(rank), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        given["NUM_REPLICA_GROUPS"] = str(job.WORKERS)
        place = ["--nnodes", "1", "--nproc-per-node", "1", "--master-port", str(free_port())]
        found.append(
            ([python, *TORCHRUN, *restarts, *place, str(HERE / "torchft_loop.py"), str(folder)], given)
        )
    return found


def with_path(folder: Path) -> str:
    """Return the search path of this process with a folder in front."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def started(name: str, folder: Path, python: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a peer's processes; end what still lives of them."""
    own = {"OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "1"}
    with Path(f"{folder}-words").open("wb") as words:
        output: Any = {"stdout": words, "stderr": words, "start_new_session": True}
        processes = [
            subprocess.Popen(command, env=os.environ | own | given, **output)
            for command, given in commands(name, folder, python)
        ]
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):  # of one that has ended, processes that it started may be left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in folder.glob("*-*"):  # workers of a launcher that was killed have sessions of their own
            pid = file.name.partition("-")[2]
            with suppress(FileNotFoundError, ProcessLookupError):
                if str(folder) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(int(pid), signal.SIGKILL)


def words_of(folder: Path) -> str:
    """Return the last lines that a peer has printed."""
    return Path(f"{folder}-words").read_text()[-3000:]


def steps_of(folder: Path, rank: int, kinds: int) -> int:
    """Return about how many steps a rank's processes have begun; diaries have `kinds` rows per step."""
    numbers = sum(file.stat().st_size for file in folder.glob(f"{rank}-*")) / 8
    return int(numbers / (job.BATCH + 3) / kinds)


def one_kill(name: str, at_step: int, python: str) -> dict[str, float]:
    """Run a peer, kill a worker at a step, and return what that cost."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "diaries"
        folder.mkdir()
        with started(name, folder, python) as processes:
            deadline = time.monotonic() + LONGEST_S
            workers = processes[1:] if name.startswith(("torchft", "hivemind")) else processes
            while steps_of(folder, KILLED, 1 if name == "train" else 2) < at_step:
                time.sleep(0.01)
                assert any(each.poll() is None for each in workers), words_of(folder)
                assert time.monotonic() < deadline, words_of(folder)
            [victim] = folder.glob(f"{KILLED}-*")
            killed_s = time.monotonic()
            os.kill(int(victim.name.partition("-")[2]), signal.SIGKILL)
            while any(each.poll() is None for each in workers):
                time.sleep(0.1)
                assert time.monotonic() < deadline, words_of(folder)
            assert len(list(folder.glob(f"{KILLED}-*"))) > 1, f"no replacement:\n{words_of(folder)}"
            found = cost(folder, victim, killed_s)
            if name == "hivemind":  # peers draw images independently
                del found["images"]
            return found


def cost(folder: Path, victim: Path, killed_s: float) -> dict[str, float]:
    """Return the longest gap between a survivor's steps, the time until all step again, and images not counted once."""
    ranks = {
        rank: sorted(
            row.at_s
            for file in folder.glob(f"{rank}-*")
            if file != victim
            for row in read(file)
            if not row.done
        )
        for rank in range(job.WORKERS)
    }
    gaps = [
        after - before
        for rank, times in ranks.items()
        if rank != KILLED
        for before, after in pairwise(times)
        if after > killed_s
    ]
    usual = statistics.median(
        after - before for times in ranks.values() for before, after in pairwise(times) if after < killed_s
    )
    back_s = min(ranks[KILLED])
    again_s = max(min(at_s for at_s in times if at_s >= back_s) for times in ranks.values())
    diaries = {file: read(file) for file in folder.iterdir()}
    kinds = {row.done for rows in diaries.values() for row in rows}
    counts: Counter[float] = Counter()
    for rows in diaries.values():
        counts.update(key for row in rows if row.done == max(kinds) for key in row.keys)

    def wrong(seen: Counter[float]) -> int:
        never = (job.IMAGES - len(seen)) * job.EPOCHS
        return never + sum(abs(count - job.EPOCHS) for count in seen.values())

    # The last step before the kill: the victim's update may be known to the others or not; and a diary with forward
    # passes alone does not show that a broken step was repeated.
    before = {file: [row for row in rows if row.at_s <= killed_s] for file, rows in diaries.items()}
    last = {file: [row for row in rows if row.done == max(kinds)][-1:] for file, rows in before.items()}
    chosen = [[], [victim], list(last)] if kinds == {False} else [[], [victim]]
    images = min(
        wrong(counts - Counter(key for file in files for row in last[file] for key in row.keys))
        for files in chosen
    )
    return {
        "gap_s": max(gaps),
        "again_s": again_s - killed_s,
        "images": images,
        "usual_step_s": usual,
    }


def measure(name: str, kills: int, python: str) -> dict[str, Any]:
    """Return a row of results.json."""
    draw = random.Random(0)
    load = os.getloadavg()[0]
    found = [one_kill(name, draw.randrange(60, 180), python) for _ in range(kills)]
    medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
    return {"name": name, "kills": found, "load": [round(load, 1), round(os.getloadavg()[0], 1)], **medians}


def chart(rows: list[dict[str, Any]]) -> str:
    """Return an SVG with two bars per peer: the survivors' pause, and the time until all workers step again."""
    rows = sorted(rows, key=lambda row: row["gap_s"])
    most, left, width, ink = max(row["again_s"] for row in rows), 250, 760, "#3b4252"
    high = 66 + 50 * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {high}" font-family="sans-serif" role="img">',
        f'<rect width="{width}" height="{high}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold" fill="{ink}">'
        "One of three workers is killed: seconds lost, and images applied twice or never</text>",
        f'<text x="16" y="46" font-size="13" fill="{ink}">'
        "dark: longest pause of a survivor; light: until all three step again</text>",
    ]
    for place, row in enumerate(rows):
        top = 64 + 50 * place
        parts.append(
            f'<text x="{left - 10}" y="{top + 22}" font-size="13" text-anchor="end" fill="{ink}">'
            f"{NAMES[row['name']]}</text>"
        )
        own = row["name"] in ("train", "own_loop")
        images = f", {row['images']:,.0f} images" if "images" in row else ""
        notes = (f"{row['gap_s']:.1f} s", f"{row['again_s']:.1f} s{images}")
        colors = ("#2f6fb0", "#a8c5e4") if own else ("#6b7686", "#c3cad4")
        for line, (seconds, note, fill) in enumerate(
            zip((row["gap_s"], row["again_s"]), notes, colors, strict=True)
        ):
            long = max(2.0, (width - left - 160) * seconds / most)
            y = top + 18 * line
            parts += [
                f'<rect x="{left}" y="{y}" width="{long:.1f}" height="15" rx="2" fill="{fill}"/>',
                f'<text x="{left + long + 8:.1f}" y="{y + 12}" font-size="12" fill="{ink}">{note}</text>',
            ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Measure the chosen peers, and draw the chart."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", nargs="*", choices=NAMES, default=list(NAMES))
    options.add_argument("--kills", type=int, default=3)
    options.add_argument("--torchft-python", default=sys.executable, help="a Python with torchft")
    options.add_argument("--hivemind-python", default=sys.executable, help="a Python with Hivemind")
    options.add_argument("--chart", action="store_true")
    chosen = options.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    rows = {row["name"]: row for row in known["rows"]}
    for name in [] if chosen.chart else chosen.only:
        python = chosen.hivemind_python if name == "hivemind" else chosen.torchft_python
        rows[name] = row = measure(name, chosen.kills, python)
        images = f"{row['images']:,.0f}" if "images" in row else "–"
        print(f"| {NAMES[name]} | {row['gap_s']:.1f} s | {row['again_s']:.1f} s | {images} |", flush=True)
        facts = {"torch": torch.__version__, "rows": [rows[each] for each in NAMES if each in rows]}
        RESULTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    CHART.write_text(chart(list(rows.values())), encoding="utf-8")


if __name__ == "__main__":
    main()
