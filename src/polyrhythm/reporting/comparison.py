"""Figures of several runs side by side: what each costs until a target, and whether differences exceed noise.

Runs that differ in their seed alone are one row. Means are over its seeds, ± is their sample standard deviation.

    time to a target       of the first test at or above it; seconds of the run's own clock
    speed-up               images/s over those of one worker (of the same row at its fewest workers if none ran alone)
    efficiency             speed-up over the number of workers
    difference             paired over common seeds: |mean| / (deviation / sqrt(n)) against Student's t at 95 %

Sources of the figures: Campos et al. 2017, Tables 1 to 3; Wu et al. 2015, Figure 4.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from polyrhythm.errors import RequestError
from polyrhythm.escaping import csv_cell
from polyrhythm.evaluation.target import Target
from polyrhythm.reporting.quantities import MINUTE_S, UNKNOWN, counted, duration, percent, whole
from polyrhythm.reporting.summary import Test, read_summary
from polyrhythm.run_files import read_text_in_run
from polyrhythm.user_files import parse_yaml

CONFIG_FILE, CLUSTER_FILE = "config.yaml", "cluster.yaml"
STUDENT_T = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)
"""Two-sided 95 % quantiles for 1 to 30 degrees of freedom; beyond that 1.96 is taken."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Facts of one run folder.

    Attributes:
        folder: folder of the run.
        config: recipe of the run.
        known: figures by the names of `train --json`.
        outcome: `done`, `interrupted`, `failed`, or `unfinished` where there is no end.
        tests: tests of the model, in order.
        losses: (seconds, images of all workers, mean training loss), of a few reports together.
        simulated: whether its seconds are virtual ones.
        price_per_s: price per second of its hosts; None if unknown.
    """

    folder: Path
    config: Mapping[str, Any]
    known: Mapping[str, Any]
    outcome: str
    tests: Sequence[Test]
    losses: Sequence[tuple[float, int, float]]
    simulated: bool
    price_per_s: float | None

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config.get("seed", 0))

    @property
    def workers(self) -> int:
        """How many workers trained."""
        return int(self.known.get("workers", self.config.get("workers", 1)))

    def test_at(self, target: Target) -> Test | None:
        """Return the first test that reaches a target; None if none does."""
        return next((test for test in self.tests if target.reached_by(test.event)), None)

    def best(self) -> float:
        """Return the best top-1 accuracy of all tests; not a number without tests."""
        return max((test.event.test_top1 for test in self.tests), default=math.nan)


def read_run(folder: Path) -> ComparedRun:
    """Read a run folder.

    Raises:
        RequestError: it holds no readable run.
    """
    summary = read_summary(folder)
    try:
        config = parse_yaml(read_text_in_run(folder / CONFIG_FILE, "the recipe"), str(folder / CONFIG_FILE))
    except RequestError as error:
        raise RequestError(f"{error}: give the folder of a run") from None
    known = summary.known
    seconds = known["seconds"]
    price = known.get("price")
    return ComparedRun(
        folder=folder,
        config=config if isinstance(config, dict) else {},
        known=known,
        outcome=summary.outcome,
        tests=summary.tests,
        losses=summary.losses,
        simulated="cluster" in known
        or (folder / CLUSTER_FILE).is_file(),  # a run that was cut short has the file only
        price_per_s=price / seconds if price and seconds > 0 else None,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """Runs that differ in their seed alone.

    Attributes:
        strategy: spec of the strategy.
        workers: number of workers.
        options: other options that differ between rows, by name.
        runs: runs in the order of their seeds.
    """

    strategy: str
    workers: int
    options: Mapping[str, str]
    runs: Sequence[ComparedRun]

    @property
    def name(self) -> str:
        """The row in words."""
        other = "".join(f", {key}={value}" for key, value in self.options.items())
        return f"{self.strategy}, {self.workers} worker{'s' * (self.workers != 1)}{other}"

    def values(self, of: Callable[[ComparedRun], float]) -> list[float]:
        """Return a figure of every run that has it."""
        return [value for value in map(of, self.runs) if math.isfinite(value)]

    def mean(self, of: Callable[[ComparedRun], float]) -> float:
        """Return the mean of a figure over the runs that have it; not a number if none has."""
        found = self.values(of)
        return statistics.fmean(found) if found else math.nan

    def deviation(self, of: Callable[[ComparedRun], float]) -> float:
        """Return the sample standard deviation of a figure; not a number with fewer than two runs."""
        found = self.values(of)
        return statistics.stdev(found) if len(found) > 1 else math.nan


def throughput(run: ComparedRun) -> float:
    """Return images a second of all workers."""
    return float(run.known.get("images_per_s", math.nan))


def seconds(run: ComparedRun) -> float:
    """Return how long a run took, on its own clock."""
    return float(run.known["seconds"])


def staleness(run: ComparedRun) -> float:
    """Return the mean staleness of gradients; not a number where the strategy has none."""
    return float(run.known.get("staleness", {}).get("mean", math.nan))


def bytes_per_step(run: ComparedRun) -> float:
    """Return bytes that a worker sends a step."""
    return float(run.known.get("bytes_sent_per_step", math.nan))


def waiting(run: ComparedRun) -> float:
    """Return the share of workers' time spent waiting."""
    return float(run.known.get("waiting_share", math.nan))


def time_to(target: Target) -> Callable[[ComparedRun], float]:
    """Return a figure: seconds to a target; infinite where it is not reached."""

    def of(run: ComparedRun) -> float:
        test = run.test_at(target)
        return test.event.time_s if test else math.inf

    return of


def images_to(target: Target) -> Callable[[ComparedRun], float]:
    """Return a figure: training images to a target; infinite where it is not reached."""

    def of(run: ComparedRun) -> float:
        test = run.test_at(target)
        return test.images if test else math.inf

    return of


def price_to(target: Target) -> Callable[[ComparedRun], float]:
    """Return a figure: price to a target; not a number where no price is known, infinite where it is not reached."""

    def of(run: ComparedRun) -> float:
        return math.nan if run.price_per_s is None else run.price_per_s * time_to(target)(run)

    return of


def differ(first: Sequence[float | None], second: Sequence[float | None]) -> bool | None:
    """Return whether two rows differ by more than their seeds do.

    Args:
        first: a figure by seed; None where a seed is missing.
        second: figures of the other row, for the same seeds.

    Returns:
        Result of a paired Student's t test at 95 %; None with fewer than two pairs.
    """
    gaps = [a - b for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    gaps = [gap for gap in gaps if math.isfinite(gap)]
    if len(gaps) < 2:
        return None
    spread = statistics.stdev(gaps) / math.sqrt(len(gaps))
    limit = STUDENT_T[len(gaps) - 2] if len(gaps) - 2 < len(STUDENT_T) else 1.96
    mean = abs(statistics.fmean(gaps))
    return mean > limit * spread if spread > 0 else mean > 0


RANK = "rank"
"""Head of the column that marks the best rows with 1."""
_NAMED = 3
"""Rows that a sentence names at most."""
SECONDARY = frozenset(
    {"efficiency", "images", "time", "virtual time", "waiting", "staleness", "kB a step", "seeds"}
)
"""Heads of columns that do not decide."""

NOT_THE_JOB = frozenset(
    {
        "seed",
        "strategy",
        "workers",
        "until",
        "out",
        "port",
        "tensorboard",
        "timings",
        "keep_checkpoints",
        "checkpoint_every",
        "checkpoint_mirror",
        "keep_best",
    }
)
"""Options that do not distinguish rows, or have a column of their own."""

SAME_TASK = ("data", "image_size", "scale", "pixels", "skip_unreadable")
"""Options that decide what is tested: runs that differ in them cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs of one job.

    Attributes:
        rows: rows in the order of the plan, or of the folders.
        target: target to be reached; None if nothing was tested.
        chosen: whether the target is the user's own; otherwise it is the best that all rows have reached.
        warnings: notes for the reader of the comparison.
        refused: combinations that cannot be run, with the reason.
        notes: sentences on how the runs were made, after the verdict.
    """

    rows: Sequence[Row]
    target: Target | None
    chosen: bool
    warnings: Sequence[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        runs: Sequence[ComparedRun],
        target: Target | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> Comparison:
        """Group runs into rows.

        Args:
            runs: runs; at least one.
            target: target to be reached; None: the best accuracy, in whole per cent, that all
                finished runs have reached.
            refused: combinations that cannot be run, with the reason.

        Raises:
            RequestError: the runs are of different data, or tested differently.
        """
        _refuse_other_tasks(runs)
        varying = [key for key in _options(runs) if key not in NOT_THE_JOB]
        groups: dict[tuple[Any, ...], list[ComparedRun]] = {}
        for run in runs:
            options = {key: str(run.config.get(key)) for key in varying}
            key = (str(run.config.get("strategy")), run.workers, tuple(options.items()))
            groups.setdefault(key, []).append(run)
        rows = [
            Row(
                strategy=strategy,
                workers=workers,
                options=_own(dict(options), groups, strategy, workers),
                runs=sorted(members, key=lambda run: run.seed),
            )
            for (strategy, workers, options), members in groups.items()
        ]
        chosen = target is not None
        target = target or _reached_by_all(rows)
        return cls(
            rows=rows,
            target=target,
            chosen=chosen,
            warnings=list(_warnings(runs, rows)),
            refused=refused or {},
        )

    def speed_up(self, row: Row) -> float:
        """Return a row's images/s over those of one worker, or of the same strategy at its fewest workers."""
        return row.mean(throughput) / self.baseline(row).mean(throughput)

    def baseline(self, row: Row) -> Row:
        """Return the row that a row's speed-up is relative to."""
        alike = [each for each in self.rows if dict(each.options) == dict(row.options)] or list(self.rows)
        own = [each for each in alike if each.strategy == row.strategy]
        alone = [each for each in own if each.workers == 1] or [each for each in alike if each.workers == 1]
        return alone[0] if alone else min(own, key=lambda each: each.workers)

    def efficiency(self, row: Row) -> float:
        """Return a row's speed-up over how many times as many workers it has as its baseline."""
        return self.speed_up(row) * self.baseline(row).workers / row.workers

    def fastest(self) -> Row | None:
        """Return the row that reaches the target first with all its seeds; None if none does."""
        return next(iter(self.through()), None)

    def through(self) -> list[Row]:
        """Return the rows that reach the target with all their seeds, the fastest first."""
        if self.target is None:
            return []
        reach = time_to(self.target)
        rows = [row for row in self.rows if all(math.isfinite(reach(run)) for run in row.runs)]
        return sorted(rows, key=lambda row: row.mean(reach))

    def most_accurate(self) -> Row | None:
        """Return the row with the best mean of its last tests; None without tests."""
        return next(iter(self._by_accuracy()), None)

    @property
    def virtual(self) -> bool:
        """Whether all seconds are virtual ones."""
        return all(run.simulated for row in self.rows for run in row.runs)

    def ranking(self) -> list[tuple[int, Row]]:
        """Return the rows with their ranks, best first: by time to the target, else by accuracy, else by images/s.

        Rows share a rank that do not differ from its first row by more than their seeds. Rows that miss the target, or
        have no figure, follow with rank 0.
        """
        if self.through() and self.target is not None:
            ordered, of = self.through(), time_to(self.target)
        elif self._by_accuracy():
            ordered, of = self._by_accuracy(), last_top1
        else:
            ordered, of = self._by_speed(), throughput
        ranked: list[tuple[int, Row]] = []
        first: Row | None = None
        for place, row in enumerate(ordered, 1):
            shared = first is not None and _equal(first, row, of)
            first = first if shared else row
            ranked.append((ranked[-1][0] if shared else place, row))
        others = [row for row in self._by_accuracy() if row not in ordered]
        others += [row for row in self.rows if row not in ordered and row not in others]
        return [*ranked, *((0, row) for row in others)]

    def verdict(self) -> list[str]:
        """Return the result of the comparison in sentences."""
        parts = []
        if self.target is not None:
            parts.append(self._about_time())
        if accurate := self._by_accuracy():
            parts.append(_best("Most accurate in the end", accurate, last_top1, percent))
        if quick := self._by_speed():
            base = self.baseline(quick[0])
            against = (
                "" if base is quick[0] else f" {self.speed_up(quick[0]):.2f}× the images/s of {base.name}."
            )
            parts.append(_best("Most images/s", quick, throughput, whole) + against)
        return [*parts, *self.notes]

    def _by_accuracy(self) -> list[Row]:
        tested = [row for row in self.rows if row.values(last_top1)]
        return sorted(tested, key=lambda row: -row.mean(last_top1))

    def _by_speed(self) -> list[Row]:
        timed = [row for row in self.rows if row.values(throughput)]
        return sorted(timed, key=lambda row: -row.mean(throughput))

    def _about_time(self) -> str:
        assert self.target is not None
        if not self.through():
            best = max(
                (row for row in self.rows if row.runs), key=lambda row: row.mean(lambda run: run.best())
            )
            return (
                f"No row reached {self.target} with all its seeds: the best was "
                f"{percent(best.mean(lambda run: run.best()))} by {best.name}."
            )
        where = str(self.target) + ("" if self.chosen else " (which all have reached)")
        unit = " of virtual time" if self.virtual else ""
        return _best(
            f"Fastest to {where}",
            self.through(),
            time_to(self.target),
            lambda time_s: duration(time_s) + unit,
        )

    def table(self, *, short: bool = False) -> tuple[list[str], list[list[str]]]:
        """Return the heads and the rows of the table as texts, best first; columns that no run has are omitted.

        Args:
            short: leave out what does not decide, for a terminal.
        """
        spread = _mean if short else _spread
        ranked = self.ranking()
        rank = {id(row): str(place or UNKNOWN) for place, row in ranked}
        clock = "virtual " if self.virtual else ""

        def against(row: Row, text: str) -> str:
            return UNKNOWN if self.baseline(row) is row else text

        columns: list[tuple[str, Callable[[Row], str]]] = [
            (RANK, lambda row: rank[id(row)] if len(ranked) > 1 else ""),
            ("strategy", lambda row: row.strategy),
            ("workers", lambda row: str(row.workers)),
        ]
        for key in {name: None for row in self.rows for name in row.options}:
            columns.append((key, lambda row, key=key: str(row.options.get(key, ""))))  # type: ignore[misc]
        columns += [
            ("images/s", lambda row: spread(row, throughput, whole)),
            ("speed-up", lambda row: against(row, _number(self.speed_up(row), "{:.2f}×"))),
            ("efficiency", lambda row: against(row, percent(self.efficiency(row)))),
            ("top-1", lambda row: spread(row, last_top1, percent)),
        ]
        if self.target is not None:
            reach, images, price = time_to(self.target), images_to(self.target), price_to(self.target)
            columns += [
                (f"{clock}time to {self.target}", lambda row: _until(row, reach, duration, spread)),
                ("images", lambda row: _until(row, images, whole, spread)),
                ("price", lambda row: _until(row, price, "{:.4g}".format, spread)),
            ]
        columns += [
            (f"{clock}time", lambda row: spread(row, seconds, duration)),
            ("waiting", lambda row: percent(row.mean(waiting))),
            ("staleness", lambda row: _number(row.mean(staleness), "{:.2f}")),
            ("kB a step", lambda row: _number(row.mean(bytes_per_step) / 1000, "{:,.1f}")),
            ("seeds", lambda row: _seeds(row)),
        ]
        filled = [
            (head, cells)
            for head, write in columns
            if not (short and head in SECONDARY)
            and not {UNKNOWN, ""}.issuperset(cells := [write(row) for _, row in ranked])
        ]
        heads = [head for head, _ in filled]
        return heads, [list(cells) for cells in zip(*(cells for _, cells in filled), strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return all figures as a JSON-able dict; figures that are not known are None."""
        ranks = {id(row): place or None for place, row in self.ranking()}
        return {
            "target": None
            if self.target is None
            else {"metric": self.target.metric, "value": self.target.value},
            "target_chosen": self.chosen,
            "verdict": self.verdict(),
            "warnings": list(self.warnings),
            "refused": dict(self.refused),
            "virtual": self.virtual,
            "rows": [self._row_json(row) | {"rank": ranks[id(row)]} for row in self.rows],
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        figures: dict[str, Callable[[ComparedRun], float]] = {
            "images_per_s": throughput,
            "seconds": seconds,
            "test_top1": last_top1,
            "best_top1": lambda run: run.best(),
            "waiting_share": waiting,
            "staleness": staleness,
            "bytes_sent_per_step": bytes_per_step,
        }
        if self.target is not None:
            figures |= {
                "seconds_to_target": time_to(self.target),
                "images_to_target": images_to(self.target),
                "price_to_target": price_to(self.target),
            }
        return {
            "strategy": row.strategy,
            "workers": row.workers,
            "options": dict(row.options),
            "seeds": [run.seed for run in row.runs],
            "runs": [str(run.folder) for run in row.runs],
            "outcomes": [run.outcome for run in row.runs],
            "speed_up": _known(self.speed_up(row)),
            "efficiency": _known(self.efficiency(row)),
            **{
                name: {
                    "mean": _known(row.mean(of)),
                    "deviation": _known(row.deviation(of)),
                    "of_each": [_known(of(run)) for run in row.runs],
                }
                for name, of in figures.items()
            },
        }

    def markdown(self) -> str:
        """Return the table as Markdown, with the verdict below it."""
        heads, rows = self.table()
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join([*lines, "", *self.verdict(), *(f"Note: {text}" for text in self.warnings)]) + "\n"

    def csv(self) -> str:
        """Return one line a run, with plain numbers, for a spreadsheet."""
        written = io.StringIO()
        rows = [
            {
                "strategy": row.strategy,
                "workers": row.workers,
                **row.options,
                "seed": run.seed,
                "outcome": run.outcome,
                "images_per_s": _known(throughput(run)),
                "seconds": seconds(run),
                "test_top1": _known(last_top1(run)),
                "best_top1": _known(run.best()),
                "seconds_to_target": _known(time_to(self.target)(run)) if self.target else None,
                "images_to_target": _known(images_to(self.target)(run)) if self.target else None,
                "price_to_target": _known(price_to(self.target)(run)) if self.target else None,
                "waiting_share": _known(waiting(run)),
                "staleness": _known(staleness(run)),
                "bytes_sent_per_step": _known(bytes_per_step(run)),
                "run": str(run.folder),
            }
            for row in self.rows
            for run in row.runs
        ]
        names = list({name: None for row in rows for name in row})
        writer = csv.DictWriter(written, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: csv_cell(value) if isinstance(value, str) else value for name, value in row.items()}
            for row in rows
        )
        return written.getvalue()

    def latex(self) -> str:
        """Return the table as a LaTeX tabular."""
        heads, rows = self.table()
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in (heads, *rows)]
        columns = "l" + "r" * (len(heads) - 1)
        body = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", lines[0], r"\hline", *lines[1:], r"\hline"]
        return "\n".join([*body, r"\end{tabular}"]) + "\n"


def last_top1(run: ComparedRun) -> float:
    """Return the top-1 accuracy of a run's last test; not a number without tests."""
    return run.tests[-1].event.test_top1 if run.tests else math.nan


def _options(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the names of options in which runs differ."""
    names = {key: None for run in runs for key in run.config}
    return [key for key in names if len({str(run.config.get(key)) for run in runs}) > 1]


def _own(
    options: dict[str, str], groups: Mapping[tuple[Any, ...], Any], strategy: str, workers: int
) -> dict[str, str]:
    """Return the options of a row without those that follow from its strategy and workers, as a default rate does."""
    members = [dict(key[2]) for key in groups if key[:2] == (strategy, workers)]
    return {key: value for key, value in options.items() if len({each[key] for each in members}) > 1}


def _refuse_other_tasks(runs: Sequence[ComparedRun]) -> None:
    for key in SAME_TASK:
        found = {str(run.config.get(key)): run.folder for run in runs}
        if len(found) > 1:
            (one, first), (other, second), *_ = found.items()
            raise RequestError(
                f"these runs cannot be compared: {first} has {key} {one} and {second} has {other}"
            )


def _reached_by_all(rows: Sequence[Row]) -> Target | None:
    runs = [run for row in rows for run in row.runs]
    finished = [run for run in runs if run.outcome == "done"]
    bests = [best for run in finished or runs if math.isfinite(best := run.best())]
    common = math.floor(100 * min(bests, default=0.0)) / 100
    return Target("top1", common) if common > 0 else None


def _warnings(runs: Sequence[ComparedRun], rows: Sequence[Row]) -> list[str]:
    parts = []
    models = {str(run.config.get("model")) for run in runs}
    if len(models) > 1:
        parts.append(f"different networks are compared: {', '.join(sorted(models))}")
    if len({run.simulated for run in runs}) > 1:
        parts.append("some runs are simulated and some are real: their seconds are not of one clock")
    for run in runs:
        if run.outcome != "done":
            parts.append(f"{run.folder} was cut short ({run.outcome}): its figures are incomplete")
    few = [row for row in rows if len(row.runs) < 2]
    if few and len(rows) > 1:
        parts.append(
            "rows with one seed have no estimate of noise and may differ by chance: take --seeds 3 or more"
        )
    rates = {str(run.config.get("optimizer")) for run in runs}
    if len(rows) > 1 and len({row.strategy for row in rows}) > 1 and len(rates) == 1:
        parts.append("all strategies had the same learning rate, which may suit some better than others")
    return parts


def _by_seed(
    first: Row, second: Row, of: Callable[[ComparedRun], float]
) -> tuple[list[float | None], list[float | None]]:
    seeds = sorted({run.seed for row in (first, second) for run in row.runs})
    found = [{run.seed: of(run) for run in row.runs} for row in (first, second)]
    return [found[0].get(seed) for seed in seeds], [found[1].get(seed) for seed in seeds]


def _equal(first: Row, second: Row, of: Callable[[ComparedRun], float]) -> bool:
    """Return whether two rows do not differ by more than their seeds; with one seed only equal figures are equal."""
    different = differ(*_by_seed(first, second, of))
    return first.mean(of) == second.mean(of) if different is None else not different


def _best(
    what: str,
    ordered: Sequence[Row],
    of: Callable[[ComparedRun], float],
    write: Callable[[float], str],
) -> str:
    """Return a sentence on which rows are best; those that do not differ are named together.

    Args:
        what: criterion.
        ordered: rows, best first.
        of: function that returns the compared figure of a run.
        write: function that formats the figure.
    """
    first, *others = ordered
    listed = [f"{row.name} ({write(row.mean(of))})" for row in ordered]
    equal = list(takewhile(lambda row: _equal(first, row, of), others))  # as `ranking` has them
    if equal:
        named = listed[: 1 + len(equal)][:_NAMED]
        left = 1 + len(equal) - len(named)
        names = [*named, counted(left, "other")] if left else named
        between = " and ".join(names) if len(names) == 2 else "; ".join(names)
        return f"{what}: no difference beyond that of seeds between {between}."
    text = f"{what}: {listed[0]}"
    if others:
        unsure = differ(*_by_seed(first, others[0], of)) is None
        text += f"; next {listed[1]}" + (", with too few seeds to separate them" if unsure else "")
    return text + "."


def _spread(row: Row, of: Callable[[ComparedRun], float], write: Callable[[float], str]) -> str:
    mean, deviation = row.mean(of), row.deviation(of)
    if math.isnan(deviation):
        return write(mean)
    if write is duration and 0.1 < mean < MINUTE_S:
        digits = 2 if mean < 10 else 1
        return f"{mean:.{digits}f} ± {deviation:.{digits}f} s"
    if write is percent:
        return f"{percent(mean).removesuffix(' %')} ± {percent(deviation)}"
    return f"{write(mean)} ± {write(deviation)}"


def _mean(row: Row, of: Callable[[ComparedRun], float], write: Callable[[float], str]) -> str:
    return write(row.mean(of))


def _until(
    row: Row,
    of: Callable[[ComparedRun], float],
    write: Callable[[float], str],
    spread: Callable[[Row, Callable[[ComparedRun], float], Callable[[float], str]], str],
) -> str:
    """Return the cost of reaching a target as text; `of` is infinite for runs without it, NaN where it is unknown."""
    found = [of(run) for run in row.runs]
    reached = [value for value in found if math.isfinite(value)]
    if all(math.isnan(value) for value in found):
        return UNKNOWN
    if not reached:
        return "not reached"
    text = spread(row, of, write)
    return text if len(reached) == len(found) else f"{text} ({len(reached)} of {len(found)})"


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else UNKNOWN


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _seeds(row: Row) -> str:
    done = sum(run.outcome == "done" for run in row.runs)
    return str(done) if done == len(row.runs) else f"{done} of {len(row.runs)}"


def _latex(text: str) -> str:
    for plain, written in (
        ("\\", r"\textbackslash "),
        ("%", r"\%"),
        ("_", r"\_"),
        ("&", r"\&"),
        ("#", r"\#"),
    ):
        text = text.replace(plain, written)
    return text.replace("±", r"$\pm$").replace("–", "--")
