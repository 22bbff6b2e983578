"""A race of candidates to a target, in simulated runs with real gradients, for the verb `plan`.

    length    the job's epochs ──▶ the most epochs        each is a whole run with its own schedule
    seed 0    the first candidates, then those that did not reach the target
    more      of strategies that lead, candidates with fewer workers, the most promising first
    seeds 1…  those that may be the best, at the length at which they reached the target

A trial ends when it reaches the target, when its epochs are over, when it is over budget or deadline, or when
another candidate reached the target in `_SURELY` times less time and for as much less money. Nothing is
extrapolated: a time to the target is that of a run that reached it. Seeds are added one at a time, to
candidates that may still be the best: at first those within `_NEAR`, then those that the seeds so far do not
distinguish from it. After L. Li et al., "Hyperband", JMLR 2018, with dominance in virtual time instead of a
share that is dropped, since the clock of every trial is known.

    time of an untried candidate  =  T · (r / w) / (r' / w')

T, r, w: seconds to the target, images/s and workers of the nearest candidate of its strategy; r', w': its own. It is
optimistic (as many steps of fewer workers, each of fewer images), and decides only in which order candidates are tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from polyrhythm.api.compare import Plan as Trials
from polyrhythm.api.compare import PlannedRun, make_runs
from polyrhythm.api.rehearsal import Candidate
from polyrhythm.api.run_process import Judge, RunProcess
from polyrhythm.evaluation.target import Target
from polyrhythm.planning.intervals import Noise, noise_of
from polyrhythm.reporting.comparison import ComparedRun, read_run
from polyrhythm.reporting.event_log import LOG_FILE
from polyrhythm.reporting.quantities import counted, duration

LONGEST = 8
"""Largest length of a trial, as a multiple of the job's epochs, by default."""
_SURELY = 3.0
"""Times the best, beyond which no further seed makes a candidate the better one."""
_NEAR = 1.5
"""Times the best, within which a candidate of one seed may be the better one."""
_ANOTHER = ", and another was after"


@dataclass(frozen=True)
class Limits:
    """Limits of a candidate.

    Attributes:
        target: target that is to be reached.
        trials: number of candidates.
        for_money: whether the cheapest is the best; else the fastest.
        epochs: epochs of the job; the first length.
        most_epochs: the last length.
        seeds: number of seeds of those within reach of the best.
        budget: budget in the currency of the prices; None: any.
        deadline_s: seconds; None: any.
        images_alone: whether candidates are also judged on other machines, so that no trial is dropped
            because of its time.
    """

    target: Target
    trials: int
    for_money: bool
    epochs: int
    most_epochs: int
    seeds: int
    budget: float | None = None
    deadline_s: float | None = None
    images_alone: bool = False

    def lengths(self) -> list[int]:
        """Return the epochs of trials, in order."""
        return sorted({min(self.epochs, self.most_epochs), self.most_epochs})


@dataclass
class Entrant:
    """A candidate in the race.

    Attributes:
        candidate: the way to run the job.
        epochs: epochs of its longest trials so far.
        runs: runs that reached the target, by seed.
        missed_s: length of trials of further seeds that did not reach it, by seed.
        short: the trial of the first seed that did not reach it, the longest; None before.
        left_behind: why its trials ended before the target and their epochs; empty where they did not.
        refused: why no trial of it can be made; empty where one can.
    """

    candidate: Candidate
    epochs: int = 0
    runs: dict[int, ComparedRun] = field(default_factory=dict)
    missed_s: dict[int, float] = field(default_factory=dict)
    short: ComparedRun | None = None
    left_behind: str = ""
    refused: str = ""

    def seconds(self, target: Target) -> list[float]:
        """Return the time to the target of every seed; of one that did not reach it, the length of its trial."""
        tests = [self.runs[seed].test_at(target) for seed in sorted(self.runs)]
        return [*(test.event.time_s for test in tests if test is not None), *self.missed_s.values()]

    def rounding(self, target: Target) -> list[float]:
        """Return the logarithm of each seed's time to the target over the time of the test before, at most ln 2."""
        found = []
        for run in self.runs.values():
            times = [0.0, *(test.event.time_s for test in run.tests)]
            place = next(place for place, test in enumerate(run.tests) if test is run.test_at(target))
            found.append(math.log(times[place + 1] / max(times[place], times[place + 1] / 2)))
        return found

    def cost(self, target: Target, *, for_money: bool) -> float:
        """Return the mean time to the target, or its price; infinite where it was not reached or has no price."""
        hourly = self.candidate.price_per_hour
        if not self.runs or (for_money and hourly is None):
            return math.inf
        mean_s = statistics.fmean(self.seconds(target))
        return mean_s / 3600 * hourly if for_money and hourly is not None else mean_s

    def best(self, target: Target) -> float:
        """Return the best result of its longest trial, more being better; minus infinity without one."""
        tests = self.short.tests if self.short is not None else ()
        sign = -1 if target.metric == "loss" else 1
        return max(
            (sign * float(getattr(test.event, f"test_{target.metric}")) for test in tests), default=-math.inf
        )


class Race:
    """Trials of candidates in a folder.

    Args:
        folder: parent folder of every trial's run folder.
        trials: common settings of all trials.
        limits: limits of the race.
        jobs: trials at a time.
        notify: receiver of a line about each action.

    Attributes:
        entrants: entrants in the order in which they entered.
        interrupted: whether the user ended it.
    """

    def __init__(
        self, folder: Path, trials: Trials, limits: Limits, jobs: int, notify: Callable[[str], None]
    ) -> None:
        self.entrants: list[Entrant] = []
        self.interrupted = False
        self._folder = folder
        self._trials = trials
        self._limits = limits
        self._jobs = jobs
        self._notify = notify
        self._lock = Lock()
        self._reached: list[tuple[float, float | None]] = []  # seconds and hourly price of first seeds
        self._best_s = math.inf
        self._idle: list[RunProcess] = []

    def run(self, first: Sequence[Candidate], rest: Sequence[Candidate]) -> None:
        """Race to the end, or until the user interrupts it.

        Args:
            first: candidates that are tried.
            rest: others, the highest throughput first; the most promising of them are tried.
        """
        try:
            self._enter(first)
            untried = list(rest)
            while not self.interrupted:
                for epochs in self._limits.lengths():
                    self._length(epochs)
                chosen = self._promising(untried)
                if not chosen:
                    break
                untried = [each for each in untried if each not in chosen]
                self._enter(chosen)
            self._seeds()
        finally:
            for helper in self._idle:
                helper.close()

    def ranked(self) -> list[Entrant]:
        """Return the entrants: first those that reached the target, the best first, then the closest."""
        target = self._limits.target

        def place(entrant: Entrant) -> tuple[float, float]:
            return (entrant.cost(target, for_money=self._limits.for_money), -entrant.best(target))

        return sorted((each for each in self.entrants if not each.refused), key=place)

    def _enter(self, candidates: Iterable[Candidate]) -> None:
        known = {each.candidate.name for each in self.entrants}
        self.entrants += [Entrant(each) for each in candidates if each.name not in known]

    def _promising(self, untried: Sequence[Candidate]) -> list[Candidate]:
        """Return the next candidates to try, one a job; none where trials are spent or none can be near the best."""
        count = min(self._jobs, self._limits.trials - len(self.entrants))
        ranked = self.ranked()
        best = ranked[0].cost(self._limits.target, for_money=self._limits.for_money) if ranked else math.inf
        guesses = [(self._guess(each), place, each) for place, each in enumerate(untried)]
        near = sorted(guess for guess in guesses if not guess[0] > _NEAR * best)
        return [each for *_, each in near[: max(0, count)]]

    def _guess(self, candidate: Candidate) -> float:
        """Return an optimistic cost of a candidate, from the nearest of its strategy; infinite where none got there."""
        alike = [each for each in self.entrants if each.candidate.family == candidate.family and each.runs]
        if not alike or not candidate.images_per_s > 0:
            return math.inf

        def distance(entrant: Entrant) -> float:
            return abs(math.log(entrant.candidate.workers / candidate.workers))

        nearest = min(alike, key=distance)
        tried, for_money = nearest.candidate, self._limits.for_money
        steps = (tried.images_per_s / tried.workers) / (candidate.images_per_s / candidate.workers)
        prices = candidate.price_per_hour or math.inf, tried.price_per_hour or math.inf
        price = prices[0] / prices[1] if for_money else 1.0
        return nearest.cost(self._limits.target, for_money=for_money) * steps * price

    def _length(self, epochs: int) -> None:
        """Make the trials of one length, of the first seed, that may still matter."""
        racing = [
            each
            for each in self.entrants
            if not (each.runs or each.refused or each.left_behind or self._is_behind(each))
            and each.epochs < epochs
        ]
        # The sooner one reaches the target, the sooner the others are dropped.
        racing.sort(key=lambda each: each.candidate.images_per_s, reverse=True)
        self._make([(each, 0, epochs) for each in racing])

    def _seeds(self) -> None:
        """Make the trials of further seeds, of those that may be the best."""
        for last in range(1, self._limits.seeds):
            near = self._near_best()
            for epochs in self._limits.lengths():  # a seed that needs longer than the first one gets longer
                self._make(
                    [
                        (each, seed, epochs)
                        for seed in range(1, last + 1)
                        for each in near
                        if each.epochs <= epochs and seed not in each.runs
                    ]
                )

    def _near_best(self) -> list[Entrant]:
        """Return the candidates that may be the best, or the cheapest of those that are."""
        target, for_money = self._limits.target, self._limits.for_money
        reached = [each for each in self.ranked() if each.runs and not self.dominated(each)]
        if self._limits.images_alone or not reached:
            return reached
        noise, best = noise_among(reached, target), reached[0]

        def near(entrant: Entrant) -> bool:
            costs = best.cost(target, for_money=for_money), entrant.cost(target, for_money=for_money)
            if not math.isfinite(costs[1]):
                return False
            if noise.freedom < 1:
                return costs[1] <= _NEAR * costs[0]
            seeds = len(best.seconds(target)), len(entrant.seconds(target))
            return noise.alike(*costs, seeds)

        return [each for each in reached if near(each)]

    def dominated(self, entrant: Entrant) -> str:
        """Return why a candidate that reached the target can be no choice; empty if it can."""
        seconds = entrant.seconds(self._limits.target)
        other_s = self._dominant_s(entrant, min(seconds)) if seconds else None
        return (
            "" if other_s is None else f"there after {duration(min(seconds))}{_ANOTHER} {duration(other_s)}"
        )

    def _is_behind(self, entrant: Entrant) -> bool:
        """Drop a candidate if its trial has ended without the target and others are already better."""
        tests = entrant.short.tests if entrant.short is not None else ()
        if tests:
            entrant.left_behind = self._behind(entrant, tests[-1].event.time_s)
        return bool(entrant.left_behind)

    def _behind(self, entrant: Entrant, time_s: float) -> str:
        """Return why a candidate that is not there yet at a time can be no choice; empty if it still can."""
        hourly, limits = entrant.candidate.price_per_hour, self._limits
        if limits.images_alone:
            return ""
        if limits.deadline_s is not None and time_s > limits.deadline_s:
            return f"over {duration(limits.deadline_s)}"
        if limits.budget is not None and hourly is not None and time_s / 3600 * hourly > limits.budget:
            return f"over the budget after {duration(time_s)}"
        other_s = self._dominant_s(entrant, time_s)
        return "" if other_s is None else f"not there after {duration(time_s)}{_ANOTHER} {duration(other_s)}"

    def _dominant_s(self, entrant: Entrant, time_s: float) -> float | None:
        """Return the time of a candidate that dominates one of this time; None where none does."""
        hourly = entrant.candidate.price_per_hour
        with self._lock:
            others = list(self._reached)
        for seconds, price in others:
            cheaper = price is None or hourly is None or _SURELY * seconds * price < time_s * hourly
            if _SURELY * seconds < time_s and cheaper and not self._limits.images_alone:
                return seconds
        return None

    def _make(self, wanted: Sequence[tuple[Entrant, int, int]]) -> None:
        """Make trials (entrant, seed, epochs), and store their results."""
        if self.interrupted or not wanted:
            return
        of_run: dict[str, tuple[Entrant, int, int]] = {}
        planned: list[PlannedRun] = []
        for entrant, seed, epochs in wanted:
            (run,) = replace(self._trials, cases=[self.case(entrant.candidate, epochs)], seeds=[seed]).runs()
            of_run[run.name] = (entrant, seed, epochs)
            planned.append(run)

        def judge_of(run: PlannedRun) -> Judge:
            entrant, seed, _ = of_run[run.name]
            return lambda epoch, tested: self._judge(entrant, seed, tested)

        refused: dict[str, str] = {}
        self.interrupted = make_runs(
            planned,
            self._trials,
            self._folder,
            min(self._jobs, len(planned)),
            refused,
            self._notify,
            judge_of,
            self._idle,
        )
        for run in planned:
            entrant, seed, epochs = of_run[run.name]
            label = run.label.rpartition(", seed")[0]
            if label in refused:
                entrant.refused = refused[label]
            elif (self._folder / run.name / LOG_FILE).is_file():
                self._note(entrant, seed, epochs, read_run(self._folder / run.name))

    def case(self, candidate: Candidate, epochs: int) -> dict[str, Any]:
        """Return the row of a comparison that a candidate's trials of one length are."""
        length = {} if "updates" in self._trials.options else {"epochs": epochs}
        return {"strategy": candidate.strategy, "workers": candidate.workers, **candidate.options, **length}

    def _note(self, entrant: Entrant, seed: int, epochs: int, run: ComparedRun) -> None:
        reached = run.test_at(self._limits.target) is not None
        cut_short = run.outcome != "done" and not reached
        if cut_short and seed == 0 and run.tests:
            entrant.left_behind = self._behind(entrant, run.tests[-1].event.time_s)
        if cut_short and not entrant.left_behind:
            return  # stopped by the user: it gives no new information
        entrant.epochs = max(entrant.epochs, epochs)
        if reached:
            entrant.runs[seed] = run
            entrant.missed_s.pop(seed, None)
        elif seed == 0:
            entrant.short = run
        elif run.tests:
            entrant.missed_s[seed] = run.tests[-1].event.time_s

    def _judge(self, entrant: Entrant, seed: int, tested: Mapping[str, float]) -> bool:
        time_s = tested["time_s"]
        if self._limits.target.reached(loss=tested["loss"], top1=tested["top1"], top5=tested["top5"]):
            with self._lock:
                if seed == 0:
                    self._reached.append((time_s, entrant.candidate.price_per_hour))
                if time_s < self._best_s:
                    self._best_s = time_s
                    self._notify(
                        f"best so far: {entrant.candidate.name}, {duration(time_s)} of virtual time to the target"
                    )
            return True
        return not (seed == 0 and self._behind(entrant, time_s))


def noise_among(entrants: Sequence[Entrant], target: Target) -> Noise:
    """Return the noise of the seeds of candidates."""
    rounding = [each for entrant in entrants for each in entrant.rounding(target)]
    return noise_of([entrant.seconds(target) for entrant in entrants], rounding)


def not_known(entrant: Entrant, target: Target) -> str:
    """Return why a candidate has no time to the target."""
    if entrant.left_behind:
        return entrant.left_behind
    best = entrant.best(target)
    if not math.isfinite(best):
        return "its trial was not finished"
    shown = f"loss {-best:.3g}" if target.metric == "loss" else f"{target.metric} {100 * best:.1f} %"
    return f"not known within {counted(entrant.epochs, 'epoch')}: the best was {shown}"
