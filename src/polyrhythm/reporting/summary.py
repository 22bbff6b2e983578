"""The summary of a run, stored next to its log, so that a comparison of many runs need not read their logs again.

    RUN/events.jsonl ──▶ figures, tests, training losses ──▶ RUN/summary.json, with the length and the end of the log

A summary of another log (a run that has gone on, or was killed before it could write one) counts for nothing: then the
log is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated, Event, WorkerProgress, check_result, from_json
from polyrhythm.reporting.event_log import LOG_FILE, read_events
from polyrhythm.reporting.figures import RunFigures, as_one_run
from polyrhythm.reporting.tables import facts
from polyrhythm.run_files import MOST_EVENTS_BYTES, exists_in_run, open_in_run, read_json_in_run

SUMMARY_FILE, ENSEMBLE_FILE = "summary.json", "ensemble.json"
_FORMAT = 1
_MOST_LOSSES = 200
_END_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Test:
    """A test of the model during a run.

    Attributes:
        event: result, with its time in seconds.
        images: training images that all workers had seen, as far as they had reported.
    """

    event: Evaluated
    images: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of a run.

    Attributes:
        known: figures by the names of `train --json`.
        outcome: `done`, `interrupted`, `failed`, or `unfinished` where there is no end.
        tests: tests of the model, in order.
        losses: (seconds, images of all workers, mean training loss), of every report of a worker, or where there are
            many of some reports together.
    """

    known: Mapping[str, Any]
    outcome: str
    tests: Sequence[Test]
    losses: Sequence[tuple[float, int, float]]


def summarized(events: Iterable[Event]) -> tuple[RunFigures, Summary | None]:
    """Return the figures of a log, and its summary if a run has started."""
    figures = RunFigures()
    tests: list[Test] = []
    losses: list[tuple[float, int, float]] = []
    for event in as_one_run(events):
        figures.add(event)
        if isinstance(event, Evaluated):
            tests.append(Test(event=event, images=figures.tested_images))
        elif isinstance(event, WorkerProgress) and event.images and math.isfinite(event.loss):
            losses.append((event.time_s, figures.images_seen, event.loss))
    if figures.started is None:
        return figures, None
    outcome = figures.ended.outcome if figures.ended else "unfinished"
    size = max(1, math.ceil(len(losses) / _MOST_LOSSES), figures.started.workers)
    groups = [losses[start : start + size] for start in range(0, len(losses), size)]
    curve = [(group[-1][0], group[-1][1], sum(loss for _, _, loss in group) / len(group)) for group in groups]
    return figures, Summary(known=facts(figures), outcome=outcome, tests=tests, losses=curve)


def write_summary(folder: Path, log: Sequence[Any], summary: Summary, claim: Unclaimed = UNCLAIMED) -> None:
    """Write the summary of a run next to its log, atomically.

    Args:
        folder: folder of the run.
        log: earlier result of `state_of` for the log that was read.
        summary: summary of the run.
        claim: claim to the folder.

    Raises:
        OSError: it cannot be written.
        Superseded: the folder is another's.
    """
    content = {
        "format": _FORMAT,
        "log": log,
        "known": summary.known,
        "outcome": summary.outcome,
        "tests": [{**vars(test.event), "images": test.images} for test in summary.tests],
        "losses": summary.losses,
    }
    claim.write(folder / SUMMARY_FILE, json.dumps(content) + "\n")


def read_summary(folder: Path) -> Summary:
    """Return the summary of a run, from its file if that is of the log as it is now.

    Raises:
        RequestError: the folder holds no readable run that has started.
    """
    with suppress(OSError, ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
        found = read_json_in_run(folder / SUMMARY_FILE)
        if found["format"] == _FORMAT and found["log"] == state_of(folder / LOG_FILE):
            return _read(found)
    if not exists_in_run(folder / LOG_FILE) and exists_in_run(folder / ENSEMBLE_FILE):
        return _of_ensemble(folder)
    _, summary = summarized(read_events(folder / LOG_FILE))
    if summary is None:
        raise RequestError(f"{folder} holds no run that has started: leave it out")
    return summary


def _read(found: dict[str, Any]) -> Summary:
    """Return a summary as `write_summary` wrote it.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    known = dict(found["known"])
    check_result(known)
    if any(known[name] is None for name in ("seconds", "strategy", "data", "model")):
        raise ValueError("no figures of a run")
    tests = []
    for test in found["tests"]:
        images = test.pop("images")
        event = from_json({"event": "Evaluated", **test})
        if not (isinstance(event, Evaluated) and type(images) is int):
            raise ValueError("no test")
        tests.append(Test(images=images, event=event))
    losses = [(float(time_s), int(images), float(loss)) for time_s, images, loss in found["losses"]]
    return Summary(known=known, outcome=str(found["outcome"]), tests=tests, losses=losses)


def _of_ensemble(folder: Path) -> Summary:
    """Return the summary of networks that were trained side by side; they are tested together when all have ended.

    Raises:
        RequestError: the file is damaged.
    """
    try:
        known = read_json_in_run(folder / ENSEMBLE_FILE)
        check_result(known)
        if known["seconds"] is None:
            raise ValueError("no time")
        parts = [read_summary(log.parent) for log in sorted(folder.glob(f"*/{LOG_FILE}"))]
        tests = []
        if "test_top1" in known:
            results: dict[str, Any] = {
                name: float(known[name]) for name in ("test_loss", "test_top1", "test_top5")
            }
            event = Evaluated(time_s=float(known["seconds"]), epoch=int(known["epochs"]), **results)
            tests = [Test(event=event, images=sum(part.tests[-1].images for part in parts if part.tests))]
    except RequestError:
        raise
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{folder / ENSEMBLE_FILE} is damaged ({' '.join(str(error).split())})") from None
    return Summary(known=known, outcome="done", tests=tests, losses=[])


def state_of(log: Path) -> list[Any]:
    """Return a fingerprint of a log that changes when it grows: its length, and a hash of its end.

    Raises:
        OSError: it cannot be read.
    """
    with open_in_run(log, MOST_EVENTS_BYTES) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES))
        return [size, sha256(file.read()).hexdigest()]
