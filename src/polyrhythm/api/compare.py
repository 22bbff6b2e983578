"""The same job in several ways, for the verb `compare`: every run is an ordinary run folder, new or existing.

    runs/20250101-120000-compare/
        plan.yaml                     the request; `compare --resume FOLDER` continues it
        tuning/synchronous-2w/        with --tune: the search of a row's learning rate (see `tune`)
        synchronous-2w-s0/            a run, with its own report
        …
        comparison.json  report.html  table.md  table.csv  table.tex

Simulated runs go to as many processes as there are cores, which share nothing but the folder; real runs follow each
other, since two at once would slow each other down.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import local
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from polyrhythm.api import tune as tuning
from polyrhythm.api.ddp import NAME as DDP
from polyrhythm.api.ddp import of_ours, with_rate
from polyrhythm.api.observed_run import choose_folder, finished_run
from polyrhythm.api.rehearsal import STRATEGIES
from polyrhythm.api.run_process import Judge, RunProcess
from polyrhythm.api.simulate import GRADIENTS
from polyrhythm.claim import UNCLAIMED, Claim, claim, drafted
from polyrhythm.config.assemble import OPTIMIZERS, default_optimizer
from polyrhythm.config.recipe import as_command, check_writable, configure, read_recipe
from polyrhythm.config.run_config import RunConfig, refuse_real_only
from polyrhythm.errors import RequestError, unknown
from polyrhythm.escaping import json_text
from polyrhythm.evaluation.target import Target
from polyrhythm.launch.devices import available_cores
from polyrhythm.reporting.comparison import ComparedRun, Comparison, read_run
from polyrhythm.reporting.event_log import LOG_FILE
from polyrhythm.reporting.pages.plots import Plot
from polyrhythm.reporting.pages.several_runs import comparison_plots, render_comparison
from polyrhythm.reporting.summary import ENSEMBLE_FILE
from polyrhythm.run_files import read_text_in_run
from polyrhythm.simulation.cluster import open_cluster
from polyrhythm.specs import Config, build, plainly, split_outside
from polyrhythm.user_files import parse_yaml

PLAN_FILE = "plan.yaml"
RESULT_FILE, REPORT_FILE = "comparison.json", "report.html"
TABLES = ("table.md", "table.csv", "table.tex")
OWN = ("strategy", "workers", "seed", "until")
"""Options of a run that a comparison varies by arguments of its own."""


@dataclass(frozen=True)
class Compared:
    """A finished comparison.

    Attributes:
        folder: folder of its report; None if runs were only read.
        comparison: comparison of all runs.
        interrupted: whether runs of the plan are missing because the user stopped it.
    """

    folder: Path | None
    comparison: Comparison
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a plan.

    Attributes:
        name: name of its folder.
        label: description.
        options: options of the run.
    """

    name: str
    label: str
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs to compare; plain values, written to `plan.yaml`.

    Attributes:
        strategies: specs.
        workers: numbers of workers.
        seeds: number of seeds of every combination.
        grid: values of further options, by name; `lr` is the optimizer's rate.
        options: options that all runs share.
        simulation: arguments of `simulate` (cluster, gradients, …); empty for real runs.
        until: the target, as the user wrote it; None: the best that all reach.
        cases: strategy, workers and other options of every row, instead of all combinations.
        asked: the command that made this plan, if it was not `compare`.
        tune: `lr`, or `lr=0.001..1`: every strategy gets the best learning rate of as many trials; nothing if it has
            its own or the given one.
        trials: number of trials per row.
    """

    strategies: Sequence[str]
    workers: Sequence[int]
    seeds: Sequence[int]
    grid: Mapping[str, Sequence[Any]]
    options: Mapping[str, Any]
    simulation: Mapping[str, Any]
    until: str | None
    cases: Sequence[Mapping[str, Any]] = ()
    asked: str = ""
    tune: str = ""
    trials: int = 8

    def runs(self) -> list[PlannedRun]:
        """Return all runs, seeds innermost."""
        planned = []
        for strategy, workers, varied in self.rows():
            options = {**self.options, "strategy": strategy, "workers": workers}
            options |= {"until": self.until} if self.until else {}
            for key, value in varied.items():
                options |= with_rate(options, value) if key == "lr" else {key: value}
            other = "".join(f", {key}={value}" for key, value in varied.items())
            for seed in self.seeds:
                label = f"{strategy}, {workers} worker{'s' * (workers != 1)}{other}, seed {seed}"
                planned.append(PlannedRun(name=_slug(label), label=label, options={**options, "seed": seed}))
        return planned

    def rows(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Return strategy, workers and other options of every row."""
        if self.cases:
            for case in self.cases:
                other = {key: value for key, value in case.items() if key not in ("strategy", "workers")}
                yield case["strategy"], case["workers"], other
            return
        for strategy, workers, *values in itertools.product(
            self.strategies, self.workers, *self.grid.values()
        ):
            yield strategy, workers, dict(zip(self.grid, values, strict=True))

    def command(self) -> str:
        """Return the command that makes the same comparison."""
        if self.asked:
            return self.asked
        grid = "; ".join(f"{key}={','.join(map(str, each))}" for key, each in self.grid.items())
        own = {
            "strategies": "; ".join(self.strategies),
            "workers": ",".join(map(str, self.workers)),
            "seeds": len(self.seeds),
            "grid": grid or None,
            "until": self.until or None,
            "tune": self.tune or None,
            "trials": self.trials if self.tune else None,
            "first_seed": self.seeds[0] or None,
        }
        return as_command(["compare"], {**own, **self.simulation, **self.options})


def compare(
    *what: str | Path,
    strategies: str | Sequence[str | Config] = (),
    workers: Sequence[int] = (2,),
    seeds: int = 1,
    first_seed: int = 0,
    grid: Mapping[str, Sequence[Any]] | None = None,
    until: str | None = None,
    tune: str = "",
    trials: int = 8,
    cluster: str | Path | None = None,
    gradients: str = "real",
    steps: int | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    **options: Any,
) -> Compared:
    """Train the same job in several ways and compare them, or compare runs that exist.

    Args:
        *what: folders of runs or comparisons; with `strategies`, at most one recipe.
        strategies: specs or objects, or one text with `;` between them; `ddp` is PyTorch's own, really run. None of
            them, but a cluster: ten of all families.
        workers: numbers of workers.
        seeds: number of runs of every combination.
        first_seed: seed of the first run; the others count up from it.
        grid: values of further options, by name; `lr` is the optimizer's rate.
        until: the target, as `top1=0.9` or `loss=0.3`; None: the best top-1 that all reach.
        tune: `lr` finds every strategy its own learning rate with equal effort, within a factor of ten of its default;
            `lr=0.001..1` sets the range. Needs Optuna.
        trials: number of short runs per row.
        cluster: cluster to simulate; None: the runs are real.
        gradients: see `simulate`.
        steps: see `simulate`.
        out: the folder, new or empty; None: a new one under `runs/`.
        jobs: number of concurrent runs; None: one per core if they are simulated, else one.
        **options: any field of `RunConfig` but strategy, workers and seed, as text or a number.

    Raises:
        RequestError: something of it is wrong, or the runs cannot be compared.
    """
    if not strategies and (what or cluster is None):
        return compare_runs(what, until, out)
    if len(what) > 1:
        raise RequestError("give at most one recipe: strategies make new runs")
    simulated: dict[str, Any] = {} if cluster is None else {"cluster": str(cluster)}
    simulated |= {} if gradients == "real" else {"gradients": gradients}
    simulated |= {} if steps is None else {"steps": steps}
    planned = plan(
        what[0] if what else None,
        strategies=strategies or STRATEGIES,
        workers=workers,
        seeds=seeds,
        first_seed=first_seed,
        grid=grid,
        until=until,
        tune=tune,
        trials=trials,
        simulation=simulated,
        options=options,
    )
    return carry_out(planned, out=out, jobs=jobs)


def compare_runs(
    folders: Iterable[str | Path], until: str | None = None, out: str | Path | None = None
) -> Compared:
    """Compare runs that exist.

    Args:
        folders: folders of runs, or of comparisons, which stand for all of their runs.
        until: the target, as `top1=0.9`; None: the best that all reach.
        out: a folder for the report and the tables, new or empty; None: they are not written.

    Raises:
        RequestError: a folder holds no run, or the runs cannot be compared.
    """
    target = Target.parse(until) if until is not None else None
    found = [run for folder in map(Path, folders) for run in _runs_in(folder)]
    places = [run.folder.resolve() for run in found]
    if doubled := [run.folder for run in found if places.count(run.folder.resolve()) > 1]:
        raise RequestError(f"{doubled[0]} is given twice, and would count as two runs: name it once")
    if len(found) < 2:
        raise RequestError("name at least two runs to compare")
    comparison = Comparison.of(found, target)
    if out is None:
        return Compared(None, comparison)
    folder = Path(out)
    names = {*TABLES, RESULT_FILE, REPORT_FILE}
    left = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not left or any(
        name not in names and drafted(name) not in names for name in left
    ):  # else of one that was killed while it wrote
        folder = choose_folder(out, "compare")
    folder.mkdir(parents=True, exist_ok=True)
    write(comparison, folder, "")
    return Compared(folder, comparison)


def plots_of_comparison(folder: Path) -> list[Plot]:
    """Return every plot of a comparison's report.

    Raises:
        RequestError: the folder is none's, or too few of its runs can be read.
    """
    until = read_plan(folder).until
    found = _runs_in(folder)
    if not found:
        raise RequestError(f"{folder} holds no run of its comparison yet")
    return comparison_plots(Comparison.of(found, Target.parse(until) if until else None))


def _runs_in(folder: Path) -> list[ComparedRun]:
    if (folder / PLAN_FILE).is_file():
        logs = [*folder.glob(f"*/{LOG_FILE}"), *folder.glob(f"*/{ENSEMBLE_FILE}")]
        return [read_run(log.parent) for log in sorted(logs)]
    return [read_run(folder)]


def plan(
    recipe: str | Path | None = None,
    *,
    strategies: str | Sequence[str | Config],
    workers: Sequence[int] = (2,),
    seeds: int = 1,
    first_seed: int = 0,
    grid: Mapping[str, Sequence[Any]] | None = None,
    until: str | None = None,
    tune: str = "",
    trials: int = 8,
    simulation: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Check the request, as far as possible without data, and return the plan.

    Args:
        recipe: a YAML file of options that all runs have.
        strategies: specs or objects, or one text with `;` between them.
        workers: numbers of workers.
        seeds: number of runs of every combination.
        first_seed: seed of the first run; the others count up from it.
        grid: values of further options, by name; `lr` is the optimizer's rate.
        until: the target.
        tune: see `compare`.
        trials: see `compare`.
        simulation: arguments of `simulate`; None or without a cluster: runs are real.
        options: options of `train` or `simulate` for all runs.

    Raises:
        RequestError: something of it is wrong.
    """
    names = split_outside(strategies, ";,") if isinstance(strategies, str) else list(map(str, strategies))
    if seeds < 1:
        raise RequestError(f"seeds must be at least 1 (given {seeds})")
    check_writable("compare", options or {})
    common = {**(read_recipe(Path(recipe)) if recipe is not None else {}), **(options or {})}
    made = Plan(
        strategies=names,
        workers=list(workers),
        seeds=list(range(first_seed, first_seed + seeds)),
        grid={key: list(each) for key, each in (grid or {}).items()},
        options={key: value for key, value in common.items() if key not in OWN},
        simulation=dict(simulation or {}),
        until=until,
        tune=tune,
        trials=trials,
    )
    _check(made)
    return made


def _check(made: Plan) -> None:
    """Raise `RequestError` where something of a plan is wrong, as far as it can be seen without data."""
    names = [case["strategy"] for case in made.cases] or made.strategies
    workers = [case["workers"] for case in made.cases] or made.workers
    if not names:
        raise RequestError('name what to compare: --strategies "synchronous; local_sgd(steps=16)"')
    if doubled := [name for name in made.strategies if made.strategies.count(name) > 1]:
        raise RequestError(f"strategies: {doubled[0]} is given twice")
    if not workers or min(workers) < 1:
        raise RequestError(f"workers must be numbers from 1, as in 1,2,4 (given {list(workers)})")
    for key in made.grid:
        if key in ("rate", "learning_rate"):
            raise RequestError(f"--grid: the optimizer's learning rate is called lr (given {key})")
        if key != "lr" and (key not in RunConfig.model_fields or key in OWN):
            raise unknown(
                "option of --grid", key, ["lr", *(each for each in RunConfig.model_fields if each not in OWN)]
            )
    for rate in made.grid.get("lr", ()):
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
            raise RequestError(f"--grid: lr must be numbers above 0, as in lr=0.01,0.05 (given {rate!r:.40})")
    _check_simulation(made.simulation, made.options)
    if made.until is not None:
        Target.parse(made.until)
        if made.simulation.get("gradients") == "none":
            raise RequestError("--until needs training: a dry run (--gradients none) reaches nothing")
    if made.tune:
        _check_tuning(made)
    for name in names:
        of_ours(name)
        if name == DDP and made.simulation:
            raise RequestError("ddp is PyTorch's own and runs for real: leave --cluster or ddp out")
    for run in made.runs():
        configure(run.options)


def _check_tuning(made: Plan) -> None:
    if made.trials < 2:
        raise RequestError(f"--trials must be at least 2, to choose among (given {made.trials})")
    if "lr" in made.grid:
        raise RequestError("--tune lr finds the learning rates that --grid lr gives: leave one of them out")
    if made.simulation.get("gradients") == "none":
        raise RequestError("--tune needs training: leave --gradients none out")
    for strategy, workers, _ in made.rows():
        _search(made, strategy, workers, {})


def _search(made: Plan, strategy: str, workers: int, varied: Mapping[str, Any]) -> tuning.SearchPlan:
    """Return the search of a row's learning rate: as many trials for every row, of the length of its runs.

    Raises:
        RequestError: it cannot be made.
    """
    options = {**made.options, **varied, "strategy": strategy, "workers": workers}
    found = re.fullmatch(r"lr(?:=([0-9.e-]+)\.\.([0-9.e-]+))?", made.tune.replace(" ", ""))
    if found is None:
        raise RequestError(f"cannot read --tune {made.tune!r:.40}: write lr, or lr=0.001..1")
    if found[1] is None:
        usual = options.get("optimizer") or str(default_optimizer(of_ours(strategy), workers))
        rate = build("optimizer", str(usual), *OPTIMIZERS).lr  # type: ignore[attr-defined]
        low, high = rate / 10, rate * 10
    else:
        try:
            low, high = float(found[1]), float(found[2])
        except ValueError:
            raise RequestError(f"cannot read --tune {made.tune!r:.40}: write lr, or lr=0.001..1") from None
    return tuning.plan(
        {"lr": {"from": low, "to": high, "log": True}},
        method="tpe",
        budget=f"{made.trials} trials",
        goal=Target.parse(made.until).metric if made.until else "top1",
        prune="halving",
        seed=made.seeds[0],
        simulation=made.simulation,
        options=options,
    )


def _report_for(label: str, notify: Callable[[str], None], text: str) -> None:
    notify(f"{label}: {text}")


TUNING = "tuning"
"""The folder of the searches for learning rates, in that of a comparison."""


def _tuned(
    made: Plan, folder: Path, jobs: int, refused: dict[str, str], notify: Callable[[str], None]
) -> tuple[Plan, list[str]]:
    """Find every row's learning rate; return the plan of these rows, and messages about it.

    Raises:
        KeyboardInterrupt: the user has stopped it; what was tried stays.
    """
    cases: list[dict[str, Any]] = []
    shown = []
    for strategy, workers, varied in made.rows():
        other = "".join(f", {key}={value}" for key, value in varied.items())
        label = f"{strategy}, {workers} worker{'s' * (workers != 1)}{other}"
        where = folder / TUNING / _slug(label)
        begun = (where / tuning.SEARCH_FILE).is_file()
        try:
            done = tuning.carry_out(
                _search(made, strategy, workers, varied),
                out=None if begun else where,
                resume=where if begun else None,
                jobs=jobs,
                notify=partial(_report_for, label, notify),
            )
        except RequestError as error:
            refused[label] = str(error)
            continue
        if done.interrupted:
            notify(f"interrupted; continue with: polyrhythm compare --resume {folder}")
            raise KeyboardInterrupt
        best = done.search.best()
        if best is None:
            refused[label] = f"none of {made.trials} trials finished"
            continue
        rate = float(f"{best.parameters['lr']:.4g}")
        cases.append({"strategy": strategy, "workers": workers, **varied, "lr": rate})
        shown.append(f"{label}: {rate:g}")
    if not cases:
        raise RequestError(next(iter(refused.values())))
    note = (
        f"Every row has its own learning rate, the best of {made.trials} trials of its job with seed {made.seeds[0]} "
        f"(TPE; successive halving ends what falls behind): {'; '.join(shown)}."
    )
    return replace(made, cases=cases), [note]


def _check_simulation(simulation: Mapping[str, Any], common: Mapping[str, Any]) -> None:
    if "cluster" not in simulation:
        if simulation:
            raise RequestError(f"--{next(iter(simulation)).replace('_', '-')} needs a simulated --cluster")
        return
    refuse_real_only(common)
    if simulation.get("gradients", "real") not in GRADIENTS:
        raise unknown("gradients", simulation["gradients"], GRADIENTS)
    open_cluster(simulation["cluster"])


def read_plan(folder: Path) -> Plan:
    """Read the plan of a folder, and check it as if it had been asked for now.

    Raises:
        RequestError: there is none, or it is damaged.
    """
    path = folder / PLAN_FILE
    read = parse_yaml(read_text_in_run(path, "the plan of a comparison"), str(path))
    try:
        found = TypeAdapter(Plan).validate_python(read)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise RequestError(f"{path} is no plan of a comparison: {where} {plainly(first['msg'])}") from None
    if not found.seeds or list(found.seeds) != list(range(found.seeds[0], found.seeds[0] + len(found.seeds))):
        raise RequestError(
            f"{path} is no plan of a comparison: seeds should be numbers that follow each other"
        )
    for case in found.cases:
        if not isinstance(case.get("strategy"), str) or not isinstance(case.get("workers"), int):
            raise RequestError(f"{path} is no plan of a comparison: a case lacks its strategy or its workers")
    _check(found)
    return replace(found, cases=tuple(found.cases))


def carry_out(
    what: Plan,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    jobs: int | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> Compared:
    """Execute the missing runs of a plan, and compare all of its runs.

    Args:
        what: the plan.
        out: folder, new or empty, or of the same plan, which is then continued; None: a new one under `runs/`.
        resume: folder of a comparison to continue; `out` is then None.
        jobs: number of concurrent runs; None: one per core if they are simulated, else one.
        notify: receiver of a line about every finished run.

    Raises:
        RequestError: the request is wrong, no run of it is possible, or the folder to continue holds a plan of `plan`.
    """
    if jobs is not None and jobs < 1:
        raise RequestError(f"jobs must be at least 1 (given {jobs})")
    if resume is None and out is not None and (Path(out) / PLAN_FILE).is_file():
        if _as_yaml(read_plan(Path(out))) != _as_yaml(what):
            raise RequestError(
                f"{out} holds another comparison: name another folder with --out, or continue it with --resume {out}"
            )
        resume = out
    if resume is not None and what.asked:
        raise RequestError(
            f"{resume} holds a plan, and a comparison would overwrite its report: repeat it with {what.asked}"
        )
    folder = Path(resume) if resume is not None else choose_folder(out, "compare")
    with claimed(folder) as holder:
        holder.write(folder / PLAN_FILE, _as_yaml(what))
        refused: dict[str, str] = {}
        count = jobs or (available_cores() if what.simulation else 1)
        tuned, notes = _tuned(what, folder, count, refused, notify) if what.tune else (what, [])
        planned = tuned.runs()
        interrupted = make_runs(planned, what, folder, min(count, len(planned)), refused, notify)
        found = [read_run(folder / run.name) for run in planned if _started(folder / run.name)]
        if not found:
            if interrupted:
                raise KeyboardInterrupt
            raise RequestError(next(iter(refused.values())))
        target = Target.parse(what.until) if what.until else None
        comparison = replace(Comparison.of(found, target, refused), notes=notes)
        write(comparison, folder, what.command())
        return Compared(folder, comparison, interrupted)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[Claim]:
    """Hold a folder for runs; a new one is removed if it fails before one of them has begun.

    Raises:
        RequestError: the folder cannot be written.
    """
    existed = folder.exists()
    try:
        holder = claim(folder, [])
    except OSError as error:
        raise RequestError(f"cannot write into {folder}: {error.strerror}; name another with --out") from None
    try:
        yield holder
    except (RequestError, KeyboardInterrupt):
        tried = (folder / TUNING).is_dir()
        if not existed and not tried and not any(_started(path) for path in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        holder.release()


def _as_yaml(what: Plan) -> str:
    return yaml.safe_dump(vars(what), sort_keys=False)


def write(comparison: Comparison, folder: Path, command: str) -> None:
    """Write the report and the tables of a comparison into a folder, each whole or not at all."""
    files = {
        RESULT_FILE: json_text(comparison.to_json(), indent=2) + "\n",
        **dict(zip(TABLES, (comparison.markdown(), comparison.csv(), comparison.latex()), strict=True)),
        REPORT_FILE: render_comparison(comparison, folder, command),
    }
    for name, text in files.items():
        UNCLAIMED.write(folder / name, text)


def make_runs(
    planned: Sequence[PlannedRun],
    what: Plan,
    folder: Path,
    jobs: int,
    refused: dict[str, str],
    notify: Callable[[str], None],
    judge_of: Callable[[PlannedRun], Judge] | None = None,
    idle: list[RunProcess] | None = None,
) -> bool:
    """Make the runs that are missing.

    Args:
        planned: the runs.
        what: the plan that they belong to.
        folder: parent folder of their run folders.
        jobs: runs at a time.
        refused: receiver of the reason of every row that cannot be run, by its label.
        notify: receiver of a line about every finished run.
        judge_of: returns what decides after every test of a run whether it continues; None: all run to their end.
        idle: processes to make runs in, for the caller to close; None: new ones, which end with the runs.

    Returns:
        Whether the user has interrupted it.
    """
    left = [run for run in planned if not _done(folder / run.name)]
    if len(left) < len(planned):
        notify(f"{len(planned) - len(left)} of {len(planned)} runs are complete")
    began_s, ended = time.monotonic(), 0
    helpers: list[RunProcess] = [] if idle is None else idle
    free = list(helpers)
    mine = local()

    def make(run: PlannedRun) -> dict[str, Any]:
        if not hasattr(mine, "helper"):
            mine.helper = free.pop() if free else RunProcess()
            if mine.helper not in helpers:
                helpers.append(mine.helper)
        helper: RunProcess = mine.helper
        judge = None if judge_of is None else judge_of(run)
        return helper.make(_task(run, what, folder / run.name), judge)

    pool = ThreadPoolExecutor(jobs)
    try:
        pending = {pool.submit(make, run): run for run in left}
        for future in as_completed(pending):
            run, answer = pending[future], future.result()
            ended += 1
            if answer["outcome"] == "interrupted":
                return True
            never_began = answer["outcome"] == "failed" and not _started(folder / run.name)
            if answer["outcome"] == "refused" or never_began:
                refused[run.label.rpartition(", seed")[0]] = answer["error"]
            elapsed_s = time.monotonic() - began_s
            left_s = elapsed_s / ended * (len(left) - ended)
            notify(
                f"[{len(planned) - len(left) + ended}/{len(planned)}] {run.label}: "
                f"{_outcome_text(answer, virtual=bool(what.simulation))}{_left(left_s)}"
            )
    except KeyboardInterrupt:
        return True
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for helper in helpers if idle is None else ():
            helper.close()
    return False


def _task(run: PlannedRun, what: Plan, folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "options": dict(run.options), "simulation": dict(what.simulation)}


def _outcome_text(answer: Mapping[str, Any], *, virtual: bool) -> str:
    from polyrhythm.reporting.quantities import duration, percent, whole

    if answer["outcome"] in {"refused", "failed"}:
        return f"{'left out' if answer['outcome'] == 'refused' else 'failed'}: {answer['error']}"
    top1 = answer.get("test_top1")
    learned = f"top-1 {percent(top1)}, " if top1 is not None else ""
    time = duration(answer["seconds"]) + " of virtual time" * virtual
    return f"{learned}{whole(answer['images_per_s'])} images/s, {time}"


def _left(seconds: float) -> str:
    from polyrhythm.reporting.quantities import duration

    return f"  (about {duration(seconds)} left)" if seconds > 1 else ""


def _started(folder: Path) -> bool:
    return (folder / LOG_FILE).is_file() or (folder / ENSEMBLE_FILE).is_file()


def _done(folder: Path) -> bool:
    return (folder / ENSEMBLE_FILE).is_file() or (_started(folder) and finished_run(folder) is not None)


def _slug(label: str) -> str:
    """Return a folder's name for a label: readable, short, and different for different labels."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", label.replace(" workers", "w").replace(" worker", "w")).strip("-")
    return words if len(words) <= 60 else f"{words[:50]}-{sha256(label.encode()).hexdigest()[:8]}"
