"""Two thousand wrong requests: is any of them not refused in one line, with status 2 and nothing written?

    python benchmarks/wrong-inputs/study.py [--count 2000] [--first 0] [--out DIR]

The requests are those of the tests (tests/conformance/wrong_inputs.py), which try 40 others at every change.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # whose requests these are

from conformance.wrong_inputs import complaint_about, drawn

SLOW_S = 30.0


def main() -> None:
    """Try every request, and write a table of what was wrong with whose refusal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    chosen = parser.parse_args()
    tried, bad, longest_s = Counter[str](), [], 0.0
    complaint_about(drawn(chosen.first))  # which imports what the others need
    began_s = time.monotonic()
    for seed in range(chosen.first, chosen.first + chosen.count):
        wrong = drawn(seed)
        what, took_s = complaint_about(wrong)
        tried[wrong.kind.partition(":")[0].partition(" ")[0]] += 1
        longest_s = max(longest_s, took_s)
        if what or took_s > SLOW_S:
            bad.append({"seed": seed, "kind": wrong.kind, "bad": what or f"took {took_s:.1f} s"})
            print(seed, wrong.kind, what, f"{took_s:.1f} s", flush=True)
    found = {"tried": dict(sorted(tried.items())), "bad": bad, "longest_s": round(longest_s, 2)}
    (chosen.out / "results.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for kind, count in sorted(tried.items()):
        of_kind = sum(each["kind"].startswith(kind) for each in bad)
        print(f"| {kind} | {count:,} | {count - of_kind:,} | {of_kind} |")
    print(f"{chosen.count:,} in {time.monotonic() - began_s:.0f} s, the longest {longest_s:.1f} s")


if __name__ == "__main__":
    main()
