"""What do steps pay for a test that runs during them? `lenet5`, one run, in which kinds of tests take turns.

    python benchmarks/evaluation/steps.py [--tests 33] [--images 1600] [--out …/steps.json]

After each epoch, the model is tested in place, by a fork that sleeps, or by a fork that computes until the next epoch
is over. All seconds are those of worker 0's processor, in and outside of the kernel, of the 25 steps that follow; after
a test in place, without the test, which is timed apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measure import tensors

from polyrhythm.api.train import prepare_process, train
from polyrhythm.data.open import open_data
from polyrhythm.evaluation.forked_call import ForkedCall
from polyrhythm.roles.leading import evaluator
from polyrhythm.roles.leading.evaluator import Evaluator, ModelTest

KINDS = ("in place", "fork sleeps", "fork computes")


def spent() -> list[float]:
    """Return this process's seconds outside of and in the kernel, and its page faults."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return [own.ru_utime, own.ru_stime, own.ru_minflt]


def computing(test: ModelTest[Any]) -> None:
    """Test the model again and again, until this process is killed."""
    while True:
        test.evaluate(test.snapshot)


def asleep() -> None:
    """Wait until this process is killed."""
    time.sleep(10_000)


class TakesTurns:
    """Replaces the evaluator's tests.

    Args:
        out: file of the results, a line of JSON each.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._number = out, 0
        self._begun: tuple[str, list[float]] | None = None

    def begin(self, evaluator_: Evaluator, test: ModelTest[Any]) -> None:
        """End the block of steps that is over, and begin another during a test of the next kind."""
        if self._begun is not None:
            kind, before = self._begun
            self._note(kind, [late - early for late, early in zip(spent(), before, strict=True)])
        evaluator_.drop()
        evaluator_._over = False
        turn, place = divmod(self._number, len(KINDS))
        kind = KINDS[place if turn % 2 == 0 else len(KINDS) - 1 - place]
        self._number += 1
        if kind == "in place":
            before = spent()
            test.evaluate(test.snapshot)
            self._note("test", [late - early for late, early in zip(spent(), before, strict=True)])
        self._begun = kind, spent()
        if kind != "in place":
            call = ForkedCall(asleep if kind == "fork sleeps" else partial(computing, test))
            evaluator_._running = evaluator._Running(test, call, 1)

    def _note(self, kind: str, values: list[float]) -> None:
        with self._out.open("a", encoding="utf-8") as out:
            out.write(json.dumps([kind, *values]) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--tests", type=int, default=33)
    options.add_argument("--images", type=int, default=1600)
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("steps.json"))
    chosen = options.parse_args()
    prepare_process()
    dataset = open_data("fashion-mnist")
    lines = chosen.out.with_suffix(".lines")
    lines.unlink(missing_ok=True)
    turns = TakesTurns(lines)
    Evaluator.begin = lambda self, test: turns.begin(self, test)  # type: ignore[method-assign]
    Evaluator.wait = Evaluator.drop  # type: ignore[method-assign]
    with TemporaryDirectory() as folder:
        train(
            out=Path(folder, "run"),
            data=(tensors(dataset.train, chosen.images), tensors(dataset.test, len(dataset.test))),
            model="lenet5",
            workers=1,
            threads=1,
            epochs=chosen.tests + 2,
            checkpoint_every="100steps",
            evaluation="async",
            until="top1=1",
            start_method="fork",
        )
    found: dict[str, list[list[float]]] = {}
    for line in lines.read_text().splitlines():
        kind, *values = json.loads(line)
        found.setdefault(kind, []).append(values)
    lines.unlink()
    facts = {"cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()[0]}
    chosen.out.write_text(json.dumps({**facts, "images": chosen.images, **found}) + "\n", encoding="utf-8")
    print(report(found))


def report(found: dict[str, list[list[float]]]) -> str:
    """Return medians as Markdown, and the share of a test's seconds that steps do not pay."""
    rows = ["| | blocks | outside of the kernel | in the kernel | page faults |\n|---|---|---|---|---|"]
    total = {}
    for kind in ("test", *KINDS):
        own = found[kind]
        user, system, faults = (statistics.median(column) for column in zip(*own, strict=True))
        total[kind] = statistics.median(one + other for one, other, _ in own)
        rows.append(f"| {kind} | {len(own)} | {user:.3f} s | {system:.3f} s | {faults:,.0f} |")
    for kind in KINDS[1:]:
        paid = total[kind] - total["in place"]
        rows.append(
            f"\n{kind}: steps pay {paid:.3f} s of a test of {total['test']:.3f} s: gain {1 - paid / total['test']:.0%}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
