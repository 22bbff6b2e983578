"""Lets every fault happen to every strategy, on real processes, and compares what becomes of it with what is declared.

    python benchmarks/fault-table/measure.py [--strategies S …] [--faults F …] [--out DIR]

Every cell of the table in docs/faults.md: 3 workers learn three blobs with a perceptron; the cells themselves are
those of the tests (tests/on_processes/faults). Only root may pull cables and mount disks. With --out, results.json and
the table of README.md there are brought up to date: cells that were not asked for stay as they were.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # whose cells these are

from attempt import prepare
from conformance.jobs import strategy
from on_processes.faults.cells import CELLS
from polyrhythm.api.faults import VARIATIONS, Fault, Outcome, outcomes
from polyrhythm.specs import choices
from polyrhythm.strategies import FAMILIES

LONGEST_S = 120.0
STEPS_ALLOWED, ALLOWED_S = 2, 1.0
"""A death may hold up the others for so many median steps, and so long, on a machine that does nothing else."""
BEGIN, END = "<!-- cells -->\n", "<!-- /cells -->"
Row = dict[str, Any]


def cells(specs: list[str], faults: list[Fault]) -> Iterator[tuple[str, Fault, Outcome]]:
    """Return the cells that there are, with what is declared."""
    for spec in specs:
        declared = outcomes(strategy(spec))
        for fault in faults:
            if declared[fault] is not Outcome.NONE:
                yield spec, fault, declared[fault]


def _child(spec: str, fault: Fault, folder: Path, pipe: Connection) -> None:
    os.setsid()
    with (folder / "words").open("w") as words:
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)
    room = folder / "room"
    room.mkdir()
    try:
        seen = CELLS[fault](spec, room)
        pipe.send({**vars(seen), "outcome": str(seen.outcome)})
    except BaseException as error:
        pipe.send({"outcome": "failed", "said": f"{type(error).__name__}: {error}"})


def tried(spec: str, fault: Fault, declared: Outcome) -> Row:
    """Tries a cell in a process of its own, which is ended with all that it has started if it takes too long."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ours, theirs = context.Pipe()
        child = context.Process(target=_child, args=(spec, fault, Path(folder), theirs))
        began_s = time.monotonic()
        child.start()
        theirs.close()
        seen: Row = {"outcome": "hung", "said": f"no end after {LONGEST_S:g} s"}
        if ours.poll(LONGEST_S):
            with suppress(EOFError):
                seen = ours.recv()
        else:
            with suppress(ProcessLookupError):
                os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        seconds = time.monotonic() - began_s
        said = str(seen.pop("said")).replace(folder, "")
    outcome = seen.pop("outcome")
    same = outcome == declared or (declared is Outcome.REGROUPS and outcome == Outcome.CONTINUES)
    row = {"strategy": spec, "fault": str(fault), "declared": str(declared), "seen": outcome, "fits": same}
    return {**row, "seconds": round(seconds, 2), **seen, "said": said}


def brought_up_to_date(rows: list[Row], row: Row) -> list[Row]:
    """Puts a row where the one of the same cell was, or at the end."""
    same = [(old["strategy"], old["fault"]) == (row["strategy"], row["fault"]) for old in rows]
    if not any(same):
        return [*rows, row]
    return [row if is_same else old for old, is_same in zip(rows, same, strict=True)]


def table(rows: list[Row]) -> str:
    """Return how many cells were seen as declared, and how soon the others went on, as Markdown."""
    lines = ["| fault | cells | as declared | others | seconds a cell, median |", "|---|---|---|---|---|"]
    for fault in Fault:
        found = [row for row in rows if row["fault"] == fault]
        others = ", ".join(f"`{row['strategy']}`: {row['seen']}" for row in found if not row["fits"])
        seconds = statistics.median(row["seconds"] for row in found) if found else 0.0
        fitting = sum(row["fits"] for row in found)
        lines.append(f"| {fault} | {len(found)} | {fitting} | {others or '–'} | {seconds:.1f} |")
    deaths = (Fault.WORKER_KILLED, Fault.LEADER_KILLED, Fault.SERVER_KILLED)
    lines += ["", f"| strategy | {' | '.join(deaths)} | allowed |", "|---" * (len(deaths) + 2) + "|"]
    for spec in dict.fromkeys(row["strategy"] for row in rows if row.get("going_on_s") is not None):
        by_fault = {row["fault"]: row for row in rows if row["strategy"] == spec and row.get("going_on_s")}
        told = [f"{by_fault[fault]['going_on_s']:.2f} s" if fault in by_fault else "–" for fault in deaths]
        allowed_s = STEPS_ALLOWED * statistics.median(row["step_s"] for row in by_fault.values()) + ALLOWED_S
        lines.append(f"| `{spec}` | {' | '.join(told)} | {allowed_s:.2f} s |")
    return "\n".join(lines) + "\n"


def keep(rows: list[Row], out: Path) -> None:
    """Writes results.json, and the table of README.md."""
    facts = {"command": "python benchmarks/fault-table/measure.py", "torch": torch.__version__, "rows": rows}
    (out / "results.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    page = out / "README.md"
    if page.exists():
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(f"{before}{BEGIN}{table(rows)}{END}{after}", encoding="utf-8")


def main() -> None:
    """Tries the cells that are asked for."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*(name for family in FAMILIES for name in choices(family)), *VARIATIONS]
    options.add_argument("--strategies", nargs="*", default=known)
    options.add_argument("--faults", nargs="*", type=Fault, default=list(Fault))
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    results = None if chosen.out is None else chosen.out / "results.json"
    rows: list[Row] = []
    if results is not None and results.exists():
        rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    odd = 0
    for spec, fault, declared in cells(chosen.strategies, chosen.faults):
        row = tried(spec, fault, declared)
        odd += not row["fits"]
        mark = "" if row["fits"] else f"  DECLARED {declared}: {row['said']}"
        print(f"{row['seconds']:6.1f} s  {spec}, {fault}: {row['seen']}{mark}", flush=True)
        rows = brought_up_to_date(rows, row)
        if chosen.out is not None:
            keep(rows, chosen.out)
    sys.exit(odd > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare()
    main()
