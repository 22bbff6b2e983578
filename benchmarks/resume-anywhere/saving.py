"""Kill -9 while a run saves and tests during its steps, then resume it: has it the bits and results of a whole run?

    python benchmarks/resume-anywhere/saving.py [--kills 300] [--out …/saving.json]

Real processes: `mlp` on `digits`, `synchronous` with one worker and with two, a checkpoint every three steps, tests in
processes of their own. The moment is anywhere in the run, while a checkpoint is written, or while a model is tested. A
run is killed as a whole, by its launcher, by its rank 0, or only in its test; one of two workers is killed right before
the whole run, since the other one would continue with other batches. Once in three, the resumed run is killed
again; once in five, its folder is lost, too, and it is resumed from its mirror. Cases that are in the output are not
repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share
from resume_anywhere import result_of

from attempt import Attempt, prepare
from polyrhythm.events import Evaluated
from polyrhythm.reporting.event_log import read_events
from polyrhythm.reporting.summary import read_summary
from polyrhythm.training.checkpoint import checkpoints

JOB: dict[str, Any] = {
    "data": "digits",
    "model": "mlp(hidden=[16])",
    "strategy": "synchronous",
    "epochs": 8,
    "batch_size": 24,
    "threads": 1,
    "balance": "off",
    "restarts": 0,
    "checkpoint_every": "3steps",
    "evaluation": "async",
    "until": "top1=1",  # so that no test is skipped
}
MOMENTS = ("anywhere", "saving", "testing")
VICTIMS = {
    1: ("whole run", "launcher", "rank 0", "test"),
    2: ("whole run", "launcher", "rank 0 first", "test"),
}
SECOND_KILL, ELSEWHERE = 3, 5
PATIENCE_S = 3.0
"""Seconds to wait for a checkpoint or a test to begin."""


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process's main thread."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0: there is none."""
    newest = next(iter(checkpoints(folder / "checkpoints")), None)
    return 0 if newest is None else int(newest.stem.rpartition("-")[2])


def stat_of(pid: int) -> str:
    """Return the state letter of a process; empty where there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def killed(attempt: Attempt, folder: Path, workers: int, draw: random.Random, steps: int) -> str:
    """Kill processes of a run at a random moment; return the moment and the victim, or that it was too late."""
    moment, victim = draw.choice(MOMENTS), draw.choice(VICTIMS[workers])
    attempt.wait_for_ranks(workers)
    step = draw.randrange(steps)
    while attempt.process.is_alive() and step and saved_step(folder) < step:
        time.sleep(0.001)
    leader = next(iter(attempt.ranks()), 0)
    until_s = time.monotonic() + PATIENCE_S
    while attempt.process.is_alive() and time.monotonic() < until_s:
        drafts = moment == "saving" and any((folder / "checkpoints").glob(".step-*.partial"))
        tests = (moment == "testing" or victim == "test") and children_of(leader)
        if (moment == "anywhere" and victim != "test") or (drafts and victim != "test") or tests:
            break
        time.sleep(0.0002)
    time.sleep(draw.uniform(0, 0.003 if moment == "saving" else 0.03))
    launcher = attempt.process.pid
    assert launcher is not None
    ranks, tests = attempt.ranks(), children_of(leader)
    if not attempt.process.is_alive() or not ranks or (victim == "test" and not tests):
        return "too late"
    everyone = draw.sample([launcher, *ranks, *tests], 1 + len(ranks) + len(tests))
    chosen = {
        "whole run": everyone,
        "launcher": [launcher],
        "rank 0": ranks[:1],
        "rank 0 first": [ranks[0], *everyone],
        "test": tests,
    }[victim]
    for pid in chosen:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until_s = time.monotonic() + PATIENCE_S
    while any(stat_of(pid) not in ("", "Z") for pid in tests) and time.monotonic() < until_s:
        time.sleep(0.002)
    left = [pid for pid in tests if victim != "launcher" and stat_of(pid) not in ("", "Z")]
    return f"{moment}: {victim}" + (f" ({len(left)} tests left behind)" if left else "")


def tests_of(folder: Path) -> list[list[Any]]:
    """Return the results of all tests by the run's summary."""
    return [
        [test.event.epoch, test.event.step, test.event.test_loss, test.event.test_top1, test.event.test_top5]
        for test in read_summary(folder).tests
    ]


def logged(folder: Path) -> set[tuple[Any, ...]]:
    """Return every result that was ever announced."""
    return {
        (event.epoch, event.step, event.test_loss, event.test_top1, event.test_top5)
        for event in read_events(folder / "events.jsonl")
        if isinstance(event, Evaluated)
    }


def outcome_of(seed: int, workers: int, whole: dict[str, Any], root: Path) -> dict[str, Any]:
    """Kill a run once or twice, resume it to its end, and compare it."""
    draw = random.Random(seed)
    folder, mirror = root / f"run{seed}", root / f"mirror{seed}"
    options = JOB | {"workers": workers}
    elsewhere = draw.randrange(ELSEWHERE) == 0
    if elsewhere:
        options["checkpoint_mirror"] = mirror.as_uri()
    case: dict[str, Any] = {"seed": seed, "workers": workers, "kills": [], "resumed": 0, "from_step_0": 0}
    case |= {"elsewhere": 0, "failure": ""}
    asked = 2 if draw.randrange(SECOND_KILL) == 0 else 1
    attempt = Attempt(folder, options)
    for turn in range(asked + 2):
        if turn < asked:
            case["kills"].append(killed(attempt, folder, workers, draw, whole["tests"][-1][1]))
        how, told = attempt.end()
        if how == "killed" and (ended := result_of(folder)) is not None:
            how, told = "done", ended  # it died over its report
        if how in ("done", "hung") or (how == "failed" and "SIGKILL" not in told):
            break
        if elsewhere and (mirror / "config.yaml").exists():
            shutil.rmtree(folder, ignore_errors=True)
            case["elsewhere"] += 1
        begun = (folder / "config.yaml").exists() or case["elsewhere"]
        if not begun:
            shutil.rmtree(folder, ignore_errors=True)
        case["resumed"] += 1
        kept = checkpoints((mirror if case["elsewhere"] else folder) / "checkpoints")
        case["from_step_0"] += not kept
        attempt = Attempt(folder, options | ({"out": folder, "resume": "auto"} if begun else {}))
    if how != "done":
        case["failure"] = f"{how}: {told}"
    elif told["workers_lost"]:
        case["failure"] = "a worker was lost: other bits are allowed"
    elif told["parameters_sha256"] != whole["parameters_sha256"]:
        case["failure"] = "other parameters"
    elif tests_of(folder) != whole["tests"]:
        case["failure"] = f"other tests: {tests_of(folder)}"
    elif logged(folder) - set(map(tuple, whole["tests"])):
        case["failure"] = f"other results were announced: {sorted(logged(folder))}"
    if case["failure"]:
        shutil.copytree(folder, Path(tempfile.gettempdir(), f"saving-{seed}"), dirs_exist_ok=True)
        case["words"] = (root / "words").read_text()[-2000:]
    (root / "words").unlink(missing_ok=True)
    for path in (folder, mirror):
        shutil.rmtree(path, ignore_errors=True)
    return case


def whole_run(workers: int, root: Path) -> dict[str, Any]:
    """Return facts of a run that is not disturbed."""
    folder = root / f"whole{workers}"
    how, told = Attempt(folder, JOB | {"workers": workers}).end()
    assert how == "done", told
    return {"parameters_sha256": told["parameters_sha256"], "tests": tests_of(folder)}


def table(cases: list[dict[str, Any]]) -> str:
    """Return what became of the cases, as Markdown."""
    rows = [
        "| workers | kills | of these | resumptions | before the first checkpoint | elsewhere | same bits and tests |"
    ]
    rows.append("|---|---|---|---|---|---|---|")
    for workers in sorted(VICTIMS):
        own = [case for case in cases if case["workers"] == workers]
        kills = Counter(
            kill.partition(": ")[2] for case in own for kill in case["kills"] if kill != "too late"
        )
        names = ", ".join(f"{count} {name}" for name, count in kills.most_common())
        sums = (sum(case[name] for case in own) for name in ("resumed", "from_step_0", "elsewhere"))
        same = f"{sum(not case['failure'] for case in own)} of {len(own)} runs"
        cells = (workers, kills.total(), names, *sums, same)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main() -> None:
    """Try cases until there were enough kills, and write each as it ends."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--kills", type=int, default=300)
    options.add_argument("--first", type=int, default=0, help="seed of the first case")
    options.add_argument("--seed", type=int, default=None, help="this case alone, without output")
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("saving.json"))
    chosen = options.parse_args()
    head = {"torch": torch.__version__, "cores": os.cpu_count(), "options": JOB}
    found = json.loads(chosen.out.read_text()) if chosen.out.exists() else {**head, "cases": []}
    if {key: found[key] for key in head} != head:
        raise SystemExit(f"{chosen.out} has cases of other options: name another --out")

    def kills() -> int:
        return sum(kill != "too late" for case in found["cases"] for kill in case["kills"])

    with tempfile.TemporaryDirectory() as name:
        wholes = {workers: whole_run(workers, Path(name)) for workers in VICTIMS}
        if chosen.seed is not None:
            print(outcome_of(chosen.seed, 1 + chosen.seed % 2, wholes[1 + chosen.seed % 2], Path(name)))
            return
        while kills() < chosen.kills:
            seed = chosen.first + len(found["cases"])
            workers = 1 + seed % len(VICTIMS)
            case = outcome_of(seed, workers, wholes[workers], Path(name))
            found["cases"].append(case)
            print(kills(), case, flush=True)
            draft = chosen.out.with_suffix(".partial")
            cases = ",\n".join(map(json.dumps, found["cases"]))
            head = json.dumps({key: value for key, value in found.items() if key != "cases"})
            draft.write_text(f'{head[:-1]}, "cases": [\n{cases}\n]}}\n', encoding="utf-8")
            draft.replace(chosen.out)
    print(table(found["cases"]))
    sys.exit(any(case["failure"] for case in found["cases"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare()
    main()
