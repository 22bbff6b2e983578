"""Ten thousand damaged files of each kind that Polyrhythm reads: none is anything but read or refused in one line.

    python benchmarks/hostile-files/fuzz.py [--only KIND …] [--count 10000] [--warm-up 1000] [--out DIR]

The files and the damage are those of the tests (tests/conformance/test_hostile_files.py), which try 300 of each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # whose files these are

from conformance.test_hostile_files import FILES, other_bytes, other_value, structure
from polyrhythm.errors import RequestError, RunError

LONGEST_REFUSAL = 2000
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


def fuzz(what: str, count: int, warm_up: int, folder: Path) -> Row:
    """Damages a file in so many ways, and reads each."""
    name, make = FILES[what]
    path, random, row, others = folder / name, Random(1), Row(what), {}
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


def main() -> None:
    """Tries all kinds, and writes what became of them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", nargs="*", default=list(FILES), choices=list(FILES))
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--warm-up", type=int, default=1_000)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    rows = []
    print("| file | damaged | read all the same | refused in a line | anything else | memory grown |")
    print("|---|---|---|---|---|---|")
    for what in chosen.only:
        with tempfile.TemporaryDirectory() as folder:
            row = fuzz(what, chosen.count, min(chosen.warm_up, chosen.count - 1), Path(folder))
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
