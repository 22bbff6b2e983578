"""Count what really runs: the files and functions of one steady step, of a whole run, and two ways through them.

python scripts/count_step.py           a table
python scripts/count_step.py --json    the same figures for programs
python scripts/count_step.py --list    and every file and function of the steady step, and the frames of both ways

Two real runs of two workers go through the front door, `polyrhythm.train` with forked ranks: `synchronous`, and
`parameter_server(servers=1)`, whose server is asynchronous. What runs is recorded inside the ranks: a profiler of
Python's is installed in every process as it is forked, and on all threads that it starts; nothing of the product is
changed. The package that is counted is the one that Python imports.

Definitions:

- step: from one call of `BOUNDARY`, which torch itself defines and every step calls once, to the next, on rank 0. It
  so has the exchange of one step and the beginning of the next. Counted are `STEPS`, in the middle of an epoch: their
  median, least and most, and the union of all, which hardly differs from run to run. Steps differ by whether this
  rank or the other comes last to the exchange, and has to wait.
- files and functions of a step: those of the package in which a function began to run, was resumed, or called
  something meanwhile, on any thread of the rank; so the loop that makes the steps is among them. Comprehensions belong
  to the function around them; what a module or a class body does when it is imported is no function.
- files of a run: the same from the fork to the end; on rank 0, and over all ranks together.
- frames: of the package, on the stack from an entry to a leaf, both included, on the way that the whole run goes most
  often (a server's first message also tries the optimizer out, and goes deeper); comprehensions do not count, lambdas
  do. `WAYS` names entries and leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import current_process
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import polyrhythm

SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "parameter_server(servers=1)"
STRATEGIES = (SYNCHRONOUS, ASYNCHRONOUS)
OPTIONS: dict[str, Any] = {
    "data": "digits",
    "model": "mlp",
    "workers": 2,
    "epochs": 2,
    "batch_size": 16,
    "threads": 1,
}
"""Of both runs: small batches, so that the first epoch has 45 steps."""
BOUNDARY = ("torch/_tensor.py", "Tensor.backward")
"""File and function, called once in every step of a worker."""
STEPS = range(10, 41)
"""Those that are counted, out of the 45 of the first epoch."""
WAYS = {
    "step_to_all_reduce": (SYNCHRONOUS, "FlatReplica.exchange", "Exchange.all_reduce"),
    "message_to_update": (ASYNCHRONOUS, "ServerSession.on_message", "FlatOptimizer.step"),
}
"""For each way: in which run, the function where it begins, and the one that does it. Renamed ones go here.

The first begins where a step's gradients are ready to be exchanged, the second where a server gets a message. Both end
at the first function that knows nothing of ranks, messages and plans: the sum in shared memory, and w -= lr * g.
"""

SOURCE = f"{Path(polyrhythm.__file__).parent}{os.sep}"
OPTIMIZED = 0x1
"""The flag of code that belongs to a function, and not to the body of a module or a class."""


@dataclass
class Record:
    """What ran in one rank; functions are written `file:qualified name`.

    Attributes:
        run: all functions that ran.
        steps: for each of the counted steps, the functions that ran in it.
        ways: for each way that was gone, its frames, and how often.
    """

    run: set[str] = field(default_factory=set)
    steps: dict[int, set[str]] = field(default_factory=dict)
    ways: dict[str, tuple[list[str], int]] = field(default_factory=dict)


class Profiler:
    """Notes what runs in a process, on all of its threads.

    Args:
        folder: where it writes its record, named after the process, when the process leaves.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step = 0
        self._run: set[CodeType] = set()
        self._steps: dict[int, set[CodeType]] = defaultdict(set)
        self._ways: dict[str, Counter[tuple[CodeType, ...]]] = defaultdict(Counter)
        self._leaves: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for way, (_, entry, leaf) in WAYS.items():
            self._leaves[leaf].append((way, entry))

    def install(self) -> None:
        """Begin to note what runs; called in a process that has just been forked."""
        self._leave = os._exit
        os._exit = self._write_and_leave  # a forked rank ends by this alone
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(SOURCE):
            self._note(code)
            if event == "call":
                if code.co_qualname in self._leaves:
                    self._follow(frame)
                self._note_caller(frame)
        elif event == "call":
            self._note_caller(frame)
            if code.co_qualname == BOUNDARY[1] and code.co_filename.endswith(BOUNDARY[0]):
                self._step += 1

    def _note_caller(self, frame: FrameType) -> None:
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(SOURCE):
            self._note(caller.f_code)

    def _note(self, code: CodeType) -> None:
        self._run.add(code)
        if self._step in STEPS:
            self._steps[self._step].add(code)

    def _follow(self, leaf: FrameType) -> None:
        """Note the frames from a leaf's entries to it; the outermost entry counts."""
        for way, entry in self._leaves[leaf.f_code.co_qualname]:
            codes: list[CodeType] = []
            length = 0
            frame: FrameType | None = leaf
            while frame is not None:
                if _counts(frame.f_code):
                    codes.append(frame.f_code)
                    if frame.f_code.co_qualname == entry:
                        length = len(codes)
                frame = frame.f_back
            if length:
                self._ways[way][tuple(codes[:length])] += 1

    def _write_and_leave(self, status: int) -> NoReturn:
        sys.setprofile(None)
        threading.setprofile(None)
        record = {
            "run": sorted(_names(self._run)),
            "steps": {step: sorted(_names(codes)) for step, codes in list(self._steps.items())},
            "ways": {way: _usual(found) for way, found in self._ways.items()},
        }
        rank = current_process().name.rpartition(" ")[2]
        (self._folder / f"{rank}.json").write_text(json.dumps(record))
        self._leave(status)


def _usual(found: Counter[tuple[CodeType, ...]]) -> tuple[list[str], int]:
    """Return the way that was gone most often, from its entry, and how often."""
    codes, times = found.most_common(1)[0]
    return [_name(code) for code in reversed(codes)], times


def _counts(code: CodeType) -> bool:
    """Whether a frame of this code is one that a reader passes: the package's, and not a comprehension."""
    return (
        code.co_filename.startswith(SOURCE)
        and bool(code.co_flags & OPTIMIZED)
        and _without_comprehensions(code.co_qualname) == code.co_qualname
    )


def _names(codes: Iterable[CodeType]) -> set[str]:
    return {_name(code) for code in list(codes) if code.co_flags & OPTIMIZED}


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(SOURCE)}:{_without_comprehensions(code.co_qualname)}"


def _without_comprehensions(name: str) -> str:
    while name.endswith(
        (".<locals>.<listcomp>", ".<locals>.<setcomp>", ".<locals>.<dictcomp>", ".<locals>.<genexpr>")
    ):
        name = name.rpartition(".<locals>.")[0]
    return name


def record_run(strategy: str) -> dict[int, Record]:
    """Train with a strategy, and return what ran in each rank."""
    with tempfile.TemporaryDirectory() as folder:
        records, parent = Path(folder) / "records", os.getpid()
        records.mkdir()

        def follow() -> None:
            # A rank of this run, and not a process that a rank has started; what is registered stays for the next run.
            if os.getppid() == parent and records.exists():
                Profiler(records).install()

        os.register_at_fork(after_in_child=follow)
        polyrhythm.train(out=Path(folder) / "run", strategy=strategy, start_method="fork", **OPTIONS)
        found = {int(path.stem): _read(path) for path in sorted(records.glob("[0-9]*.json"))}
    if 0 not in found or not found[0].steps:
        raise SystemExit(
            f"no steps of rank 0 were recorded: are ranks still forked, named '… 0', do they leave by os._exit, and "
            f"do steps call {BOUNDARY[1]}?"
        )
    return found


def _read(path: Path) -> Record:
    found = json.loads(path.read_text())
    steps = {int(step): set(names) for step, names in found["steps"].items()}
    return Record(
        set(found["run"]), steps, {way: (frames, times) for way, (frames, times) in found["ways"].items()}
    )


def files(functions: Iterable[str]) -> set[str]:
    """Return the files that functions are in."""
    return {name.partition(":")[0] for name in functions}


def usual_step(record: Record) -> set[str]:
    """Return the functions that run in more than half of the counted steps."""
    steps = list(record.steps.values())
    every = set().union(*steps)
    return {name for name in every if 2 * sum(name in step for step in steps) > len(steps)}


def count_run(records: dict[int, Record]) -> dict[str, Any]:
    """Count the files and functions of a run, and of its steady steps on rank 0."""
    leader, everywhere = records[0], set().union(*(record.run for record in records.values()))
    steps = list(leader.steps.values())
    return {
        "ranks": len(records),
        "steps": {
            "files": _spread([files(step) for step in steps]),
            "functions": _spread(steps),
        },
        "run_of_leader": {"files": len(files(leader.run)), "functions": len(leader.run)},
        "run_of_all": {"files": len(files(everywhere)), "functions": len(everywhere)},
    }


def _spread(sets: list[set[str]]) -> dict[str, Any]:
    sizes = [len(each) for each in sets]
    return {
        "median": statistics.median(sizes),
        "least": min(sizes),
        "most": max(sizes),
        "union": len(set().union(*sets)),
    }


def way_of(name: str, records: dict[str, dict[int, Record]]) -> list[str]:
    """Return the frames of a way; empty if nobody went it."""
    strategy = WAYS[name][0]
    found = [record.ways[name] for record in records[strategy].values() if name in record.ways]
    return max(found, key=lambda way: way[1])[0] if found else []


def print_table(figures: dict[str, Any]) -> None:
    """Print the figures for people."""
    for strategy, run in figures["runs"].items():
        print(f"{strategy}, {run['ranks']} ranks")
        for what in ("files", "functions"):
            spread = run["steps"][what]
            print(
                f"  {what + ' in a steady step of rank 0':38} {spread['median']:>6g}   "
                f"({spread['least']} to {spread['most']}; all counted steps together {spread['union']})"
            )
        for key, label in (("run_of_leader", "run, rank 0"), ("run_of_all", "run, all ranks")):
            print(
                f"  {'files in the whole ' + label:38} {run[key]['files']:>6}   ({run[key]['functions']} functions)"
            )
    print("frames")
    for name, frames in figures["frames"].items():
        _, entry, leaf = WAYS[name]
        reached = f"{frames:>6}" if frames else "  none; if one was renamed, change WAYS"
        print(f"  {entry + ' to ' + leaf:38} {reached}")


def print_lists(records: dict[str, dict[int, Record]]) -> None:
    """Print the functions of the steady steps by files, and the frames of both ways."""
    for strategy, ranks in records.items():
        print(f"\n{strategy}: what runs in steady steps of rank 0 (*: in few of them)")
        usual = usual_step(ranks[0])
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in sorted(set().union(*ranks[0].steps.values())):
            file, _, function = name.partition(":")
            by_file[file].append(function + " *" * (name not in usual))
        for file, functions in by_file.items():
            print(f"  {file}")
            for function in functions:
                print(f"      {function}")
    for name in WAYS:
        print(f"\n{name}")
        for frame in way_of(name, records):
            print(f"  {frame}")


def main() -> None:
    """Read the command line, run, count and print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--list", action="store_true", help="print what ran, too")
    options = parser.parse_args()
    records = {strategy: record_run(strategy) for strategy in STRATEGIES}
    figures = {
        "runs": {strategy: count_run(ranks) for strategy, ranks in records.items()},
        "frames": {name: len(way_of(name, records)) for name in WAYS},
    }
    if options.json:
        lists = {strategy: sorted(usual_step(ranks[0])) for strategy, ranks in records.items()}
        print(json.dumps(figures | ({"usual_step": lists} if options.list else {}), indent=2))
        return
    print_table(figures)
    if options.list:
        print_lists(records)


if __name__ == "__main__":
    main()
