"""Ten thousand damaged files of each kind that Polyrhythm reads: none is anything but read or refused in one line.

    python benchmarks/hostile-files/fuzz.py [--only KIND …] [--count 10000] [--warm-up 1000] [--seed 1] [--out DIR]

The files and the damage are those of the tests (tests/conformance/test_hostile_files.py), which try 300 of each.

The kind `whole run folder` damages a random file of a run folder in each case, by bytes, by typed values, or by a link,
pipe, device or folder in its place, and lets a random command read it; nothing outside may change or be shown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # whose files these are

from conformance.test_hostile_files import (
    FILES,
    OUTSIDERS,
    SECRET,
    VERBS,
    names_of,
    other_bytes,
    other_value,
    outcome,
    outsider,
    structure,
    template,
)
from polyrhythm.errors import RequestError, RunError

LONGEST_REFUSAL = 2000
WHOLE = "whole run folder"
LIMIT_S = 120
RESUMES = 0.02
"""Share of the cases that resume the run, which takes seconds."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Row:
    """What became of the files of one kind.

    Attributes:
        what: kind of file.
        files: how many.
        read: that could be read all the same, since the damage hit nothing that counts.
        refused: in one line.
        others: what became of the rest, the first of each kind.
        grown_bytes: memory of the process after the last file less that after the warm-up.
        cpu_s: for all.
    """

    what: str
    files: int = 0
    read: int = 0
    refused: int = 0
    others: list[str] | None = None
    grown_bytes: int = 0
    cpu_s: float = 0.0


def resident_bytes() -> int:
    """Return what this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def fuzz(what: str, count: int, warm_up: int, folder: Path, seed: int) -> Row:
    """Damages a file in so many ways, and reads each."""
    name, make = FILES[what]
    path, random, row, others = folder / name, Random(seed), Row(what), {}
    read = make(path)
    raw, said = path.read_bytes(), structure(path)
    began, settled = time.process_time(), 0
    for number in range(count):
        if number == warm_up:
            settled = resident_bytes()
        by_value = said is not None and number % 2
        path.write_bytes(
            said[1](other_value(random, said[0])).encode() if by_value else other_bytes(random, raw)
        )
        row.files += 1
        try:
            read(path)
            row.read += 1
        except (RequestError, RunError) as refusal:
            if len(str(refusal).splitlines()) == 1 and len(str(refusal)) <= LONGEST_REFUSAL:
                row.refused += 1
            else:
                others.setdefault("a refusal of more than a line", str(refusal)[:500])
        except Exception as error:
            others.setdefault(type(error).__name__, f"{type(error).__name__}: {error}"[:500])
    row.grown_bytes, row.cpu_s = resident_bytes() - settled, time.process_time() - began
    row.others = list(others.values())
    return row


def damage(random: Random, path: Path, secret: Path) -> None:
    """Damages a file where it lies, in one of all ways."""
    how = random.choice(["bytes", "value", *OUTSIDERS])
    said = structure(path) if how == "value" else None
    if how in OUTSIDERS:
        outsider(how, path, secret)
    elif said is not None:
        path.write_text(said[1](other_value(random, said[0])))
    elif raw := path.read_bytes():
        path.write_bytes(other_bytes(random, raw))


def fuzz_folder(count: int, warm_up: int, folder: Path, seed: int) -> Row:
    """Damages one file of a run folder in so many ways, and lets a command read the folder."""
    random, row, others = Random(seed), Row(WHOLE), {}
    outside, run, names = folder / "outside", folder / "run", names_of(template())
    outside.mkdir()
    secret = outside / "secret"
    secret.write_text(SECRET)
    began, settled = time.process_time(), 0
    quick = [verb for verb in VERBS if verb != "resume"]

    def too_long(*_: object) -> None:
        raise TimeoutError("it waits")

    signal.signal(signal.SIGALRM, too_long)
    for number in range(count):
        if number == warm_up:
            settled = resident_bytes()
        shutil.copytree(template(), run)
        name, verb = random.choice(names), "resume" if random.random() < RESUMES else random.choice(quick)
        damage(random, run / name, secret)
        row.files += 1
        signal.alarm(LIMIT_S)
        try:
            shown, is_refusal = outcome(VERBS[verb], run)
        except Exception as error:
            others.setdefault(f"{verb}, {name}", f"{type(error).__name__}: {error}"[:500])
        else:
            shows = [path for path in run.rglob("*") if path.is_file() and not path.is_symlink()]
            if names_of(outside) != ["secret"] or secret.read_text() != SECRET:
                others.setdefault("written outside", f"{verb}, {name}")
            elif SECRET in shown or any(SECRET.encode() in path.read_bytes() for path in shows):
                others.setdefault("shown from outside", f"{verb}, {name}")
            elif is_refusal and (len(shown.splitlines()) != 1 or len(shown) > LONGEST_REFUSAL):
                others.setdefault("a refusal of more than a line", shown[:500])
            else:
                row.refused += is_refusal
                row.read += not is_refusal
        finally:
            signal.alarm(0)
        shutil.rmtree(run)
    row.grown_bytes, row.cpu_s = resident_bytes() - settled, time.process_time() - began
    row.others = [f"{what}: {text}" for what, text in others.items()]
    return row


def main() -> None:
    """Tries all kinds, and writes what became of them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = [*FILES, WHOLE]
    options.add_argument("--only", nargs="*", default=kinds, choices=kinds)
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--warm-up", type=int, default=1_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    rows = []
    print("| file | damaged | read all the same | refused in a line | anything else | memory grown |")
    print("|---|---|---|---|---|---|")
    for what in chosen.only:
        with tempfile.TemporaryDirectory() as folder:
            warm_up = min(chosen.warm_up, chosen.count - 1)
            if what == WHOLE:
                row = fuzz_folder(chosen.count, warm_up, Path(folder), chosen.seed)
            else:
                row = fuzz(what, chosen.count, warm_up, Path(folder), chosen.seed)
        rows.append(row)
        rest, grown = row.files - row.read - row.refused, f"{row.grown_bytes / 2**20:.1f} MiB"
        print(f"| {what} | {row.files:,} | {row.read:,} | {row.refused:,} | {rest} | {grown} |", flush=True)
        if chosen.out is not None:
            facts = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__}
            (chosen.out / "results.json").write_text(
                json.dumps(facts | {"rows": list(map(asdict, rows))}, indent=1) + "\n"
            )
    sys.exit(any(row.others for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
