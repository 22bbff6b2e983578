"""The trials of a search: ranking, importance of options, and progress over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyrhythm.reporting.quantities import UNKNOWN, counted, duration, percent

CHOSEN_BY_TEST = "It was selected on the test images, so its figure is optimistic."


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A trial.

    Attributes:
        number: index of the trial, from 0.
        folder: folder of its run, inside the search's.
        parameters: values chosen for it.
        options: options of the run that follow from them, with all names in braces filled in.
        value: value of the goal; None while it runs, if it failed, or if the goal was not reached.
        state: `done`, `stopped` (before its end, since others did better), `failed` or `running`.
        curve: (epochs, value) of its tests.
        seconds: training time, virtual if it was simulated.
        price: price of that time; None if unknown.
        took_s: wall-clock time, including start and end.
        error: reason of the failure; None: it did not fail.
        parent: folder of the trial that it continued from.
    """

    number: int
    folder: str
    parameters: Mapping[str, Any]
    options: Mapping[str, Any]
    value: float | None
    state: str
    curve: Sequence[tuple[int, float]] = ()
    seconds: float | None = None
    price: float | None = None
    took_s: float | None = None
    error: str | None = None
    parent: str | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """Chosen value of each option, as in the options of the run."""
        return {**self.parameters, **self.options}


@dataclass(frozen=True, kw_only=True)
class Search:
    """All trials of a search.

    Attributes:
        method: search method.
        goal: objective; the values of trials are those of it.
        budget: budget as the user wrote it.
        maximize: whether more is better.
        simulated: whether their seconds are virtual ones.
        trials: trials in order.
        importance: share of the values' variance that each option explains (fANOVA); empty where it is not known.
    """

    method: str
    goal: str
    budget: str
    maximize: bool
    simulated: bool
    trials: Sequence[Tried]
    importance: Mapping[str, float]

    def ranked(self) -> list[Tried]:
        """Return the finished trials with a value, best first."""
        done = [trial for trial in self.trials if trial.state == "done" and trial.value is not None]
        return sorted(done, key=lambda trial: self._order(trial.value))

    def best(self) -> Tried | None:
        """Return the best trial; None if none has finished with a value."""
        ranked = self.ranked()
        return ranked[0] if ranked else None

    def best_so_far(self) -> list[tuple[int, float]]:
        """Return (number of trials that have ended, best value among them), where it changes and at the end."""
        found: list[tuple[int, float]] = []
        best = math.inf
        ended = 0
        for trial in self.trials:
            if trial.state == "running":
                continue
            ended += 1
            if trial.state == "done" and trial.value is not None and self._order(trial.value) < best:
                best = self._order(trial.value)
                found.append((ended, trial.value))
        if found and found[-1][0] < ended:
            found.append((ended, found[-1][1]))
        return found

    def verdict(self) -> list[str]:
        """Return the result in sentences."""
        states = {
            state: sum(trial.state == state for trial in self.trials)
            for state in ("done", "stopped", "failed")
        }
        early = f", {states['stopped']} ended early" if states["stopped"] else ""
        failed = f", {states['failed']} failed" if states["failed"] else ""
        texts = [f"{counted(len(self.trials), 'trial')} by {self.method}{early}{failed}."]
        best = self.best()
        if best is None:
            return [*texts, f"No trial has ended with a {self.goal}."]
        chosen = ", ".join(f"{key} {_text(value)}" for key, value in best.options.items())
        texts.append(
            f"The best {self.goal} is {shown(self.goal, best.value)}, of trial {best.number}: {chosen}."
        )
        if self.importance:
            name, share = max(self.importance.items(), key=lambda each: each[1])
            texts.append(
                f"The most important option is {name}: {percent(share)} of the variance between trials."
            )
        if self.goal in {"top1", "top5", "loss"}:
            texts.append(CHOSEN_BY_TEST)
        return texts

    def table(self, most: int | None = None) -> tuple[list[str], list[list[str]]]:
        """Return headings and rows of the trials, best first, then unfinished ones.

        Args:
            most: rows at most; None: all.
        """
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.shown))
        ranked = self.ranked()
        others = [trial for trial in self.trials if trial not in ranked]
        heads = ["trial", self.goal, *names, "virtual time" if self.simulated else "time", "price"]
        priced = any(trial.price for trial in self.trials)
        rows = []
        for trial in [*ranked, *others][:most]:
            value = shown(self.goal, trial.value) if trial.value is not None else UNKNOWN
            remark = (
                ""
                if trial.state == "done"
                else f" ({'ended early' if trial.state == 'stopped' else trial.state})"
            )
            rows.append(
                [
                    str(trial.number),
                    value + remark,
                    *(_text(trial.shown[name]) if name in trial.shown else "" for name in names),
                    duration(trial.seconds) if trial.seconds is not None else UNKNOWN,
                    *([f"{trial.price:.4g}" if trial.price is not None else UNKNOWN] if priced else []),
                ]
            )
        return heads if priced else heads[:-1], rows

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of `tune --json`."""
        best = self.best()
        return {
            "method": self.method,
            "goal": self.goal,
            "budget": self.budget,
            "simulated": self.simulated,
            "best": asdict(best) if best is not None else None,
            "importance": dict(self.importance),
            "trials": [asdict(trial) for trial in self.trials],
        }

    def _order(self, value: float | None) -> float:
        assert value is not None
        return -value if self.maximize else value


def shown(goal: str, value: float | None) -> str:
    """Return a value of a goal as people read it."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if goal in {"top1", "top5"}:
        return percent(value)
    return duration(value) if goal == "seconds" else f"{value:.4g}"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
