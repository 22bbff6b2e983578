"""The best options for a job, for the verb `tune`: many runs, each an ordinary run folder.

    runs/20250101-120000-tune/
        search.yaml               the plan; `tune --resume FOLDER` continues it, or helps other processes with it
        study.db                  every trial, as Optuna keeps it
        trial-0000/               a run, with its own report; of PBT member-00-interval-00/ and so on
        …
        search.json  report.html  best.yaml: a recipe

Optuna samples, prunes and stores; the methods that it lacks are in `search/space.py`. Several processes, on
several hosts if they share the folder, may work at one study: a free process takes the next trial.

    process 1   ── trial 0 ────────┬─ trial 2 …
    process 2   ── trial 1 ──── ✗  │                    (killed)
    process 1                      └─ finds 1's owner gone: marks it failed, and puts its parameters in line again;
                                      the run continues in the same folder, from its last checkpoint
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import yaml

from polyrhythm.api.ddp import of_ours, with_rate
from polyrhythm.api.observed_run import choose_folder
from polyrhythm.api.rehearsal import Candidate, rehearse
from polyrhythm.api.run_process import RunProcess
from polyrhythm.api.simulate import GRADIENTS
from polyrhythm.api.train import measured_time
from polyrhythm.claim import UNCLAIMED, open_new
from polyrhythm.config.assemble import OPTIMIZERS, assemble, data_of
from polyrhythm.config.recipe import CONFIG_FILE, as_command, check_writable, configure, read_recipe
from polyrhythm.config.run_config import refuse_real_only
from polyrhythm.errors import RequestError, unknown
from polyrhythm.escaping import json_text
from polyrhythm.evaluation.target import Target
from polyrhythm.launch.devices import available_cores
from polyrhythm.planning.learning_curve import hopeless
from polyrhythm.reporting.pages.several_runs import render_search
from polyrhythm.reporting.quantities import duration
from polyrhythm.reporting.search import Search, Tried, shown
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.run_files import read_in_run, read_text_in_run
from polyrhythm.search.space import (
    METHODS,
    PRUNERS,
    RATE,
    Domain,
    Parent,
    Range,
    Space,
    Values,
    evolved,
    succeeded,
)
from polyrhythm.simulation.cluster import open_cluster
from polyrhythm.specs import build
from polyrhythm.user_files import parse_yaml, read_text

SEARCH_FILE, STUDY_FILE, RESULT_FILE = "search.yaml", "study.db", "search.json"
BEST_FILE, REPORT_FILE = "best.yaml", "report.html"
EDGES_FILE = "edges.json"
"""File of the result of a search by gradients."""
GOALS = {
    "top1": "maximize",
    "top5": "maximize",
    "loss": "minimize",
    "seconds": "minimize",
    "price": "minimize",
}
_KEPT = ("seconds", "price", "images_per_s", "epochs", "error")
_STATES = {"COMPLETE": "done", "PRUNED": "stopped", "RUNNING": "running"}
_TRIES = 3
"""Attempts to make a trial if its process dies."""
_FRUITLESS = 20
"""Number of failed trials without a success that ends a search by time or money."""
_BEAT_S, _SILENT_S = 15.0, 120.0
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True)
class Budget:
    """Limit of a search; no trial begins once it is spent.

    Attributes:
        kind: `trials`, `seconds` or `USD`.
        amount: amount in that unit.
    """

    kind: str
    amount: float


def budget_of(text: str) -> Budget:
    """Read a budget: `60 trials`, `2h`, `90s` or `20USD`.

    Raises:
        RequestError: the text is none of these, or not above 0.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", text)
    kind = found[2].lower() if found else ""
    amount = float(found[1]) if found else 0.0
    if kind in {"trial", "trials"} and amount == int(amount) and amount >= 1:
        return Budget("trials", amount)
    if kind == "usd" and amount > 0:
        return Budget("USD", amount)
    if kind in _UNITS and amount > 0:
        return Budget("seconds", amount * _UNITS[kind])
    raise RequestError(f"cannot read the budget {text!r:.50}: write 60 trials, 2h, 30m or 20USD")


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Settings of a search; plain values, written to `search.yaml`.

    Attributes:
        space: search space, as in its file.
        method: one of `METHODS`.
        budget: budget as the user wrote it.
        goal: one of `GOALS`.
        prune: one of `PRUNERS`.
        seed: seed of the search, and of every trial.
        population: population of evolution and PBT.
        interval: epochs between two looks of PBT.
        options: options that all runs have.
        simulation: arguments of `simulate`; empty for real runs.
        storage: storage of the study, as an URL for SQLAlchemy; None: a file in the folder.
    """

    space: Mapping[str, Any]
    method: str
    budget: str
    goal: str
    prune: str
    seed: int
    population: int
    interval: int
    options: Mapping[str, Any]
    simulation: Mapping[str, Any]
    storage: str | None = None


@dataclass(frozen=True)
class Tuned:
    """A search that is over, or was interrupted.

    Attributes:
        folder: folder of the search.
        search: trials of the search.
        interrupted: whether the user stopped it.
    """

    folder: Path
    search: Search
    interrupted: bool = False


def tune(
    space: str | Path | Mapping[str, Any],
    *,
    method: str = "tpe",
    budget: str = "20 trials",
    goal: str = "top1",
    prune: str = "none",
    seed: int = 0,
    population: int | None = None,
    interval: int = 1,
    recipe: str | Path | None = None,
    cluster: str | Path | None = None,
    storage: str | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    **options: Any,
) -> Tuned:
    """Search the options of a run for the best ones.

    Args:
        space: a YAML file, or a mapping as in one; see `search/space.py`.
        method: grid, random, tpe, hyperband, evolution, pbt or darts.
        budget: `60 trials`, `2h` (on the clock; virtual where runs are simulated) or `20USD`.
        goal: criterion of the best: top1, top5 or loss of the last test; seconds or price until `until` is
            reached.
        prune: rule that ends trials early: none, median, halving or curve (extrapolated); hyperband has its
            own.
        seed: seed of the search and of every run in it.
        population: population of evolution (default 10) and pbt (default 8).
        interval: interval of pbt: epochs between two looks at the others.
        recipe: a YAML file of options that all runs have.
        cluster: simulate on it; None: the runs are real.
        storage: a database of Optuna's for the study; None: SQLite in the folder.
        out: the folder, new or empty; None: a new one under `runs/`.
        jobs: number of concurrent runs; None: one per core if they are simulated, else one.
        **options: any field of `RunConfig` that all runs have.

    Returns:
        The folder and all trials.

    Raises:
        RequestError: something of it is wrong, or every trial was refused.
    """
    where = (
        parse_yaml(read_text(Path(space), "the space"), f"the space {space}")
        if isinstance(space, str | Path)
        else space
    )
    planned = plan(
        where,
        method=method,
        budget=budget,
        goal=goal,
        prune=prune,
        seed=seed,
        population=population,
        interval=interval,
        recipe=recipe,
        simulation={} if cluster is None else {"cluster": str(cluster)},
        storage=storage,
        options=options,
    )
    return carry_out(planned, out=out, jobs=jobs)


def plan(
    space: Any,
    *,
    method: str,
    budget: str,
    goal: str = "top1",
    prune: str = "none",
    seed: int = 0,
    population: int | None = None,
    interval: int = 1,
    recipe: str | Path | None = None,
    simulation: Mapping[str, Any] | None = None,
    storage: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> SearchPlan:
    """Check the arguments as far as possible without data, and return the plan; see `tune`.

    Raises:
        RequestError: something of it is wrong.
    """
    _optuna()
    check_writable("tune", options or {})
    for what, given, known in (
        ("method", method, METHODS),
        ("rule of --prune", prune, PRUNERS),
        ("goal", goal, GOALS),
    ):
        if given not in known:
            raise unknown(what, given, known)
    simulated = dict(simulation or {})
    found = Space.of(space)
    limit = budget_of(budget)
    common = {**(read_recipe(Path(recipe)) if recipe is not None else {}), **(options or {})}
    common = {key: value for key, value in common.items() if key not in {*found.options, "seed"}}
    _check_goal(goal, prune, method, common)
    if simulated:
        refuse_real_only({**common, **found.options})
        if simulated.get("gradients", "real") not in GRADIENTS:
            raise unknown("gradients", simulated["gradients"], GRADIENTS)
        open_cluster(simulated["cluster"])
    _check_prices(limit, goal, simulated)
    if method == "grid":
        found.every()
    if method == "pbt":
        _check_pbt(found, simulated, interval)
        common.setdefault("schedule", "constant")
    if method == "darts":
        from polyrhythm.search.differentiable import Choice  # no other search pays for it

        Choice.of(found)
        if simulated.get("gradients") == "none":
            raise RequestError("darts learns from gradients: leave --gradients none out")
    if not any(found.varies(name) for name in (*found.options, *found.inner)):
        raise RequestError(
            "the space has one value for everything, which leaves nothing to search: give lists of values or ranges"
        )
    many = population if population is not None else (8 if method == "pbt" else 10)
    if many < 2:
        raise RequestError(f"a population has at least 2 members (given {many})")
    example = found.draw(lambda name, domain: domain.draw(Random(seed)))
    made = SearchPlan(
        space=dict(space),
        method=method,
        budget=budget,
        goal=goal,
        prune=prune,
        seed=seed,
        population=many,
        interval=interval,
        options=common,
        simulation=simulated,
        storage=storage,
    )
    for parameters in found.samples(example):
        options = _options(made, found, parameters)
        configure(options)
        of_ours(str(options["strategy"]))
        if options.get("optimizer") is not None:
            build("optimizer", str(options["optimizer"]), *OPTIMIZERS)
    return made


def _check_goal(goal: str, prune: str, method: str, common: Mapping[str, Any]) -> None:
    if goal in {"seconds", "price"}:
        if common.get("until") is None:
            raise RequestError(f"--goal {goal} needs what is to be reached: give --until top1=0.9")
        if prune != "none" or method in {"hyperband", "pbt"}:
            what = method if method in {"hyperband", "pbt"} else f"--prune {prune}"
            raise RequestError(f"{what} compares tests on the way: take --goal top1, top5 or loss with it")
    if common.get("until") is not None:
        Target.parse(str(common["until"]))
    if method in {"hyperband", "pbt"} and prune != "none":
        raise RequestError(f"{method} decides by itself which trials continue: leave --prune {prune} out")


def _check_prices(limit: Budget, goal: str, simulation: Mapping[str, Any]) -> None:
    """Refuse a search by money where no price is known: it would never end, or never know."""
    if limit.kind != "USD" and goal != "price":
        return
    what = "a budget in USD" if limit.kind == "USD" else "--goal price"
    if not simulation:
        raise RequestError(
            f"{what} needs prices: simulate on a --cluster that has some, or give trials or hours"
        )
    where = open_cluster(simulation["cluster"])
    if any(kind.price_per_hour is None for kind in where.hosts):
        raise RequestError(
            f"{what} needs prices, and not all hosts of cluster {where.name} have one: give them a price_per_hour, or "
            "give trials or hours"
        )
    if limit.kind == "USD" and where.currency not in ("", "USD"):
        raise RequestError(
            f"cluster {where.name} has prices in {where.currency}, and the budget is in USD: give trials or hours"
        )


def _check_pbt(space: Space, simulation: Mapping[str, Any], interval: int) -> None:
    if simulation:
        raise RequestError(
            "pbt continues from checkpoints of real runs: leave --cluster out, or take another method"
        )
    if interval < 1:
        raise RequestError(f"--interval is at least 1 epoch (given {interval})")
    for name in (
        "strategy",
        "model",
        "data",
        "workers",
        "epochs",
        "batch_size",
        "batch_schedule",
        "optimizer",
    ):
        if name in space.options:
            raise RequestError(
                f"pbt changes runs on their way, and {name} cannot change then: take it out of the space"
            )


def read_plan(folder: Path) -> SearchPlan:
    """Read the plan of a folder.

    Raises:
        RequestError: there is none.
    """
    path = folder / SEARCH_FILE
    if not path.is_file():
        raise RequestError(f"{folder} is not a search (it has no {SEARCH_FILE}): name the folder of one")
    try:
        return SearchPlan(**parse_yaml(read_text_in_run(path, "the search"), str(path)))
    except (TypeError, ValueError) as error:
        raise RequestError(f"{path} is damaged ({' '.join(str(error).split())})") from None


def carry_out(
    what: SearchPlan,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    jobs: int | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Make the remaining trials of a search, concurrently with other processes that do the same.

    Args:
        what: the plan.
        out: the folder: new, empty, or of the same search, which is then helped; None: a new one under `runs/`.
        resume: the folder of a search to continue; `out` is then None.
        jobs: number of concurrent runs; None: one per core if they are simulated, else one.
        notify: receiver of a line about every finished trial.

    Raises:
        RequestError: the request is wrong, or every trial was refused.
    """
    if jobs is not None and jobs < 1:
        raise RequestError(f"jobs must be at least 1 (given {jobs})")
    if resume is None:
        _check_affordable(what)
    folder = Path(resume) if resume is not None else _chosen_folder(what, out)
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SEARCH_FILE).exists():
            # A process that finds any file in the folder also finds the plan: drafts of it are elsewhere.
            _publish(folder / SEARCH_FILE, _text(what), folder.parent)
    except OSError as error:
        raise RequestError(f"cannot write into {folder}: {error.strerror}; name another with --out") from None
    with _lent(jobs or (available_cores() if what.simulation else 1)) as processes:
        study = _Study(what, folder, notify)  # they import in the meantime
        interrupted = _work(study, processes)
    search = study.search(whole=True)
    if not interrupted and search.trials and all(trial.error for trial in search.trials):
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise RequestError(f"every trial was refused; the first: {search.trials[0].error}")
    write(search, folder, _command(what))
    return Tuned(folder, search, interrupted)


def _check_affordable(what: SearchPlan) -> None:
    """Reject a budget that no trial fits into, as far as its time and price can be predicted.

    Simulated trials are predicted by dry runs. For real ones a step is measured, where images are many or
    large; a busy machine may take twice as long for it.

    Raises:
        RequestError: even the shortest trial costs more.
    """
    budget = budget_of(what.budget)
    if budget.kind == "trials":
        if what.method == "pbt" and budget.amount < what.population:
            raise RequestError(
                f"a population of {what.population} takes {what.population} trials to begin with, and the budget is "
                f"{what.budget}: give more, or a smaller --population"
            )
        return
    space = Space.of(what.space)
    example = space.draw(lambda name, domain: domain.draw(Random(what.seed)))
    least, place = math.inf, "this machine"
    for options in [_options(what, space, each) for each in space.samples(example)[:_FORESEEN]]:
        ends_early = what.method in {"hyperband", "pbt"} or what.prune != "none" or "until" in options
        if ends_early:
            options["epochs"] = what.interval if what.method == "pbt" else 1
        with contextlib.suppress(RequestError):  # the trial itself will report it
            if what.simulation:
                place = str(what.simulation["cluster"])
                seconds, price = _rehearsed(what.simulation, options)
                least = min(least, price if budget.kind == "USD" else seconds)
            else:
                job = assemble(configure(options), CheckpointConfig())
                least = (measured_time(job, "spawn") or 0.0) / 2
                break
    if math.isfinite(least) and least > budget.amount:
        cost = f"{least:.2g} USD" if budget.kind == "USD" else duration(least)
        raise RequestError(
            f"a trial takes at least {cost} on {place}, and the budget is {what.budget}: give more, or fewer --epochs"
        )


_FORESEEN = 8
"""Largest number of trials that are predicted."""


def _rehearsed(simulation: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[float, float]:
    """Return about how many virtual seconds a trial takes, and its price, 0 where that is not known."""
    shared = {key: value for key, value in options.items() if key not in ("strategy", "workers")}
    strategy = str(options["strategy"])
    asked = Candidate(strategy=strategy, family=strategy, workers=int(options["workers"]), options={})
    found = rehearse(open_cluster(simulation["cluster"]), [asked], shared, {})
    if not found:
        raise RequestError(f"{strategy} cannot be simulated")
    dataset = data_of(configure(options))
    images = int(options.get("epochs") or dataset.default_epochs) * len(dataset.train)
    seconds = images / found[0].images_per_s
    return seconds, seconds / 3600 * (found[0].price_per_hour or 0.0)


def _command(what: SearchPlan) -> str:
    """Return the command that makes the same search, given the space as a file."""
    own = {
        "method": what.method,
        "budget": what.budget,
        "goal": None if what.goal == "top1" else what.goal,
        "prune": None if what.prune == "none" else what.prune,
        "seed": what.seed or None,
    }
    return as_command(["tune", "SPACE.yaml"], {**own, **what.simulation, **what.options})


def _text(what: SearchPlan) -> str:
    return yaml.safe_dump(vars(what), sort_keys=False)


def _chosen_folder(what: SearchPlan, out: str | Path | None) -> Path:
    """Return the folder of a search; the jobs of an array have the same one, and the first one makes it."""
    try:
        return choose_folder(out, "tune")
    except RequestError:
        if out is not None and (path := Path(out) / SEARCH_FILE).is_file():
            if read_text_in_run(path, "the search") == _text(what):
                return Path(out)
            raise RequestError(
                f"{out} holds another search: name another with --out, or continue it with --resume {out}"
            ) from None
        raise


def write(search: Search, folder: Path, command: str) -> None:
    """Write the results of a search into its folder, each file whole or not at all."""
    _publish(folder / RESULT_FILE, json_text(search.to_json(), indent=2) + "\n")
    _publish(folder / REPORT_FILE, render_search(search, folder, command))
    best = search.best()
    if best is not None and (folder / best.folder / CONFIG_FILE).is_file():
        _publish(folder / BEST_FILE, read_in_run(folder / best.folder / CONFIG_FILE).decode())


def _publish(path: Path, text: str, draft_in: Path | None = None) -> None:
    draft = UNCLAIMED.draft((draft_in or path.parent) / path.name)
    with open_new(draft) as file:
        file.write(text.encode(errors="backslashreplace"))
    draft.replace(path)


@contextlib.contextmanager
def _lent(count: int) -> Iterator[list[RunProcess]]:
    """Yield `count` processes that make runs; wait for them in the end."""
    processes = [RunProcess() for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


def _work(study: _Study, processes: Sequence[RunProcess]) -> bool:
    """Make trials in parallel processes until none remains; return whether the user has interrupted it."""
    stopping = threading.Event()

    def work(process: RunProcess) -> bool:
        while not stopping.is_set():
            assigned = study.next()
            if assigned is None:
                return False
            if isinstance(assigned, str):
                stopping.wait(0.1)
                continue
            answer = study.made_by(process, assigned)
            if answer["outcome"] == "interrupted":
                stopping.set()
                return True
            study.ended(assigned, answer)
        return False

    try:
        with ThreadPoolExecutor(len(processes)) as pool:
            futures = [pool.submit(work, process) for process in processes]
            try:
                return True in [future.result() for future in futures]
            except KeyboardInterrupt:
                stopping.set()
                return True
    finally:
        study.leave()


def trial_options(common: Mapping[str, Any], space: Space, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a trial's run.

    Args:
        common: options that all runs have.
        space: space of the search.
        parameters: drawn for this trial; `lr` becomes the rate of its optimizer.
    """
    chosen = space.run_options(parameters)
    options = {**common, **{key: value for key, value in chosen.items() if key != RATE}}
    options.setdefault("strategy", "synchronous")
    options.setdefault("workers", 2)
    return {**options, **with_rate(options, chosen[RATE])} if RATE in chosen else options


def _options(what: SearchPlan, space: Space, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return trial_options({**what.options, "seed": what.seed}, space, parameters)


@dataclass
class _Assigned:
    """A trial that this process makes.

    Attributes:
        trial: trial of Optuna.
        parameters: drawn for it.
        name: name of its folder.
        begin_from: folder of the run with the checkpoints that it continues; "" for none.
        epochs: epochs of that run and this interval together; 0: given by the options.
        curve: the goal's value after each test, by epochs done.
        began_s: start in seconds on this process's clock.
    """

    trial: Any
    parameters: dict[str, Any]
    name: str
    begin_from: str = ""
    epochs: int = 0
    curve: dict[int, float] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)


def _optuna() -> Any:
    """Import Optuna, with fewer messages than by default.

    Raises:
        RequestError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise RequestError("tune needs Optuna: pip install 'polyrhythm[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class _Study:
    """The trials of a search, shared with other processes that work at it."""

    def __init__(self, what: SearchPlan, folder: Path, notify: Callable[[str], None]) -> None:
        optuna = _optuna()
        self._optuna = optuna
        self.what, self.folder, self._notify = what, folder, notify
        self.space = Space.of(what.space)
        self._budget = budget_of(what.budget)
        self._sign = 1.0 if GOALS[what.goal] == "maximize" else -1.0
        self._began_s, self._before_s = time.monotonic(), 0.0
        self._thread_lock = threading.RLock()
        self._mine: dict[int, tuple[Any, dict[str, Any]]] = {}  # in progress in this process, by number
        self._epochs = 0
        url = what.storage or f"sqlite:///{(folder / STUDY_FILE).absolute()}"
        with self._locked(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study = optuna.create_study(
                study_name=f"polyrhythm {folder.absolute().name}",
                storage=url,
                sampler=self._sampler(0),
                pruner=self._pruner(),
                direction=GOALS[what.goal],
                load_if_exists=True,
            )
            trials = self._trials()
            self._before_s = float(self._study.user_attrs.get("elapsed_s", 0.0))
            if what.method == "grid" and not trials:
                for parameters in self._affordable(self.space.every()):
                    self._study.enqueue_trial(parameters)
        self._left = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._beating.start()

    def next(self) -> _Assigned | str | None:
        """Return the next trial to make; `wait` if that depends on one in progress; None if there is none left."""
        states = self._optuna.trial.TrialState
        with self._locked():
            trials = self._trials()
            self._take_over(trials)
            trials = self._trials()
            if not any(trial.state == states.WAITING for trial in trials):
                if self._spent(trials) or (self.what.method == "grid" and trials):
                    return None
                if self.what.method == "evolution":
                    rng = Random(f"{self.what.seed} {len(trials)}")
                    self._study.enqueue_trial(
                        evolved(
                            self._parents(trials),
                            self.space,
                            self.what.population,
                            max(2, self.what.population // 4),
                            rng,
                        )
                    )
                elif self.what.method == "darts":
                    if trials:
                        return None
                    self._study.enqueue_trial(self._chosen_by_gradients())
                elif self.what.method == "pbt":
                    line = self._next_interval(trials)
                    if not isinstance(line, dict):
                        return line
            # A resumed or helping process would draw again what a sampler of the same seed has drawn before.
            waiting = (each.number for each in trials if each.state == states.WAITING)
            self._study.sampler = self._sampler(min(waiting, default=len(trials)))
            trial = self._study.ask()
            parameters = self.space.draw(partial(_suggested, trial))
            line = trial.user_attrs.get("line", {})
            name = line.get("folder") or f"trial-{trial.number:04d}"
            begun = {"folder": name, "owner": this_process(), "beat": time.time(), "parameters": parameters}
            trial.set_user_attr("begun", begun)
            self._mine[trial.number] = trial, begun
            return _Assigned(trial, parameters, name, line.get("begin_from", ""), line.get("epochs", 0))

    def _chosen_by_gradients(self) -> dict[str, Any]:
        """Search a network by gradients, and return the parameters of its trial; what was found is written down."""
        from polyrhythm.search.differentiable import Choice, searched  # no other search pays for it

        choice = Choice.of(self.space)
        options = _options(self.what, self.space, choice.parameters(self.space, {}))
        config = configure(options)
        dataset = data_of(config)
        learned = searched(
            dataset,
            choice.allowed,
            choice.network,
            epochs=config.epochs or dataset.default_epochs,
            batch_size=config.batch_size,
            seed=self.what.seed,
            notify=self._notify,
        )
        _publish(self.folder / EDGES_FILE, json.dumps(vars(learned), indent=2) + "\n")
        return choice.parameters(self.space, learned.edges)

    def made_by(self, process: RunProcess, assigned: _Assigned) -> dict[str, Any]:
        """Have the run of a trial made; it is begun again where its process dies."""
        options = _options(self.what, self.space, assigned.parameters)
        task: dict[str, Any] = {
            "folder": str(self.folder / assigned.name),
            "simulation": dict(self.what.simulation),
        }
        if assigned.epochs:
            options["epochs"] = assigned.epochs
        if assigned.begin_from:
            task["begin_from"] = str(self.folder / assigned.begin_from)
            kept = ("seed", "strategy", "workers", "data", "model")
            options = {key: value for key, value in options.items() if key not in kept}
        watched = (
            self.what.goal not in {"seconds", "price"} and self.what.simulation.get("gradients") != "none"
        )
        for _ in range(_TRIES):
            judge = partial(self._continues, assigned) if watched else None
            answer = process.make({**task, "options": options}, judge)
            if not answer.get("died"):
                break
        return answer

    def ended(self, assigned: _Assigned, answer: Mapping[str, Any]) -> None:
        """Write down how a trial has ended."""
        trial = assigned.trial
        answered = {key: answer[key] for key in _KEPT if answer.get(key) is not None}
        answered |= {"took_s": time.monotonic() - assigned.began_s, "curve": sorted(assigned.curve.items())}
        with self._locked():
            trial.set_user_attr("came", answered)
            if self._budget.kind == "seconds" and not self.what.simulation:
                self._study.set_user_attr("elapsed_s", self._elapsed_s())
            if answer["outcome"] == "stopped":
                self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
            else:
                self._study.tell(trial, self._value(answer))
            del self._mine[trial.number]
            search = self.search()
        self._report_trial(trial.number, answer, search)

    def leave(self) -> None:
        """Stop saying that this process is there."""
        self._left.set()
        self._beating.join()

    def search(self, *, whole: bool = False) -> Search:
        """Return all trials as they are now; with `whole` also what matters, which takes a while."""
        states = self._optuna.trial.TrialState
        found = []
        for trial in self._trials():
            if trial.state in {states.WAITING, states.FAIL}:  # failed: another has taken it over
                continue
            begun, answered = trial.user_attrs.get("begun", {}), trial.user_attrs.get("came", {})
            value = trial.value if trial.state in {states.COMPLETE, states.PRUNED} else None
            curve = answered.get("curve") or sorted(trial.intermediate_values.items())
            found.append(
                Tried(
                    number=trial.number,
                    folder=begun.get("folder", ""),
                    parameters=(parameters := begun.get("parameters", {})),
                    options=self.space.chosen_options(parameters) if parameters else {},
                    value=value if value is not None and math.isfinite(value) else None,
                    state="failed" if "error" in answered else _STATES[trial.state.name],
                    curve=[(int(epochs), float(each)) for epochs, each in curve],
                    seconds=answered.get("seconds"),
                    price=answered.get("price"),
                    took_s=answered.get("took_s"),
                    error=answered.get("error"),
                    parent=trial.user_attrs.get("line", {}).get("begin_from") or None,
                )
            )
        return Search(
            method=self.what.method,
            goal=self.what.goal,
            budget=self.what.budget,
            maximize=self._sign > 0,
            simulated=bool(self.what.simulation),
            trials=found,
            importance=self._importance() if whole else {},
        )

    def _importance(self) -> dict[str, float]:
        """Return how much of the values' variance each option explains (fANOVA), where enough trials have ended."""
        done = [
            trial for trial in self._trials() if trial.state.name == "COMPLETE" and math.isfinite(trial.value)
        ]
        if len(done) < 8 or len({trial.value for trial in done}) < 2:
            return {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self._optuna.importance.get_param_importances(self._study, normalize=True)
        except (RuntimeError, ValueError, ImportError):  # no option that all have, or one value each
            return {}
        return {name: float(value) for name, value in found.items()}

    def _trials(self) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False))

    def _parents(self, trials: Sequence[Any]) -> list[Parent]:
        """Return the trials that have ended, in the order in which they did."""
        ended = [
            each for each in trials if each.state.name in {"COMPLETE", "PRUNED"} and each.value is not None
        ]
        ended.sort(key=lambda trial: (trial.datetime_complete, trial.number))
        return [
            Parent(trial.number, trial.user_attrs["begun"]["parameters"], self._sign * trial.value)
            for trial in ended
        ]

    def _next_interval(self, trials: Sequence[Any]) -> dict[str, Any] | str | None:
        """Enqueue the next interval of PBT: that of the member with the fewest intervals that is not in progress.

        It is compared with those that have completed as many, as they were then; members never wait for each
        other.
        """
        done: dict[int, dict[int, Any]] = {}  # epochs -> member -> trial
        left = dict.fromkeys(range(self.what.population), 0)
        for trial in trials:
            line = trial.user_attrs["line"]
            if trial.state.name == "COMPLETE":
                done.setdefault(line["epochs"], {})[line["member"]] = trial
                left[line["member"]] = max(left[line["member"]], line["epochs"])
        total = self._total_epochs()
        under_way = {"RUNNING", "WAITING"}
        busy = {trial.user_attrs["line"]["member"] for trial in trials if trial.state.name in under_way}
        free = [member for member, epochs in left.items() if epochs < total and member not in busy]
        if not free:
            return "wait" if busy else None
        member = min(free, key=lambda each: (left[each], each))
        epochs = left[member]
        rng = Random(f"{self.what.seed} {member} {epochs}")
        interval = -(-epochs // self.what.interval)
        line = {
            "member": member,
            "interval": interval,
            "folder": f"member-{member:02d}-interval-{interval:02d}",
            "epochs": min(epochs + self.what.interval, total),
        }
        if epochs:
            parents = {
                each: Parent(trial.number, trial.user_attrs["begun"]["parameters"], self._sign * trial.value)
                for each, trial in done[epochs].items()
            }
            parent, parameters = succeeded(member, parents, self.space, rng)
            before = next(trial for trial in done[epochs].values() if trial.number == parent.number)
            line["begin_from"] = before.user_attrs["begun"]["folder"]
        else:
            parameters = self.space.draw(lambda name, domain: domain.draw(rng))
        self._study.enqueue_trial(parameters, user_attrs={"line": line})
        return line

    def _total_epochs(self) -> int:
        """Return the epochs of a whole run."""
        if not self._epochs:
            example = self.space.draw(lambda name, domain: domain.draw(Random(0)))
            job = assemble(configure(_options(self.what, self.space, example)), CheckpointConfig())
            self._epochs = job.learning.epochs
        return self._epochs

    def _continues(self, assigned: _Assigned, epoch: int, tested: Mapping[str, float]) -> bool:
        """Store a test of a trial, and return whether it continues."""
        value = tested[self.what.goal]
        repeated = epoch in assigned.curve
        assigned.curve[epoch] = value
        if self.what.method != "hyperband" and self.what.prune == "none":
            return True
        with self._locked():
            total = self._total_epochs()
            if self.what.prune == "curve":
                curve = [(step, self._sign * each) for step, each in sorted(assigned.curve.items())]
                best = max((each.value for each in self._parents(self._trials())), default=-math.inf)
                return epoch >= total or not hopeless(curve, total, best)
            if not repeated:
                assigned.trial.report(value, epoch)
            return epoch >= total or not assigned.trial.should_prune()

    def _elapsed_s(self) -> float:
        """Return for how long the search has been made, by its earlier processes too."""
        return self._before_s + time.monotonic() - self._began_s

    def _value(self, answer: Mapping[str, Any]) -> float:
        """Return the result of a run; the worst value if it was refused, failed or did not reach the goal."""
        goal, done = self.what.goal, answer["outcome"] == "done"
        if goal in {"seconds", "price"}:
            return (
                float(answer[goal])
                if done and answer.get("reached") and answer.get(goal) is not None
                else math.inf
            )
        value = answer.get(f"test_{goal}") if done else None
        return float(value) if value is not None else (0.0 if self._sign > 0 else math.inf)

    def _spent(self, trials: Sequence[Any]) -> bool:
        counted = [trial for trial in trials if trial.state != self._optuna.trial.TrialState.FAIL]
        if self._budget.kind == "trials":
            return len(counted) >= self._budget.amount
        ended = [trial for trial in counted if "came" in trial.user_attrs]
        if len(ended) >= _FRUITLESS and all("error" in trial.user_attrs["came"] for trial in ended):
            return True  # refused trials cost nothing, and would never end
        if self._budget.kind == "USD":
            return sum(_figure_of(trial, "price") for trial in counted) >= self._budget.amount
        if self.what.simulation:
            return sum(_figure_of(trial, "seconds") for trial in counted) >= self._budget.amount
        return self._elapsed_s() >= self._budget.amount

    def _affordable(self, every: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return as many combinations of a grid as the budget has trials."""
        return every[: int(self._budget.amount)] if self._budget.kind == "trials" else every

    def _take_over(self, trials: Sequence[Any]) -> None:
        """Enqueue the unfinished trials of ended processes again."""
        for trial in trials:
            if trial.state.name != "RUNNING" or trial.number in self._mine:
                continue
            begun, line = trial.user_attrs.get("begun"), trial.user_attrs.get("line", {})
            if begun is not None and owner_lives(begun["owner"], begun["beat"]):
                continue
            self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
            parameters = begun["parameters"] if begun is not None else dict(trial.params)
            line = {**line, "folder": begun["folder"]} if begun is not None else line
            self._study.enqueue_trial(parameters, user_attrs={"line": line})

    def _beat(self) -> None:
        """Publish now and then that this process is alive, for those on other hosts."""
        while not self._left.wait(_BEAT_S):
            with self._locked():
                for trial, begun in self._mine.values():
                    trial.set_user_attr("begun", {**begun, "beat": time.time()})

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other threads, and other processes on this folder, from looking or changing in the meantime."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._thread_lock, os.fdopen(os.open(self.folder / ".lock", flags, 0o666), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _sampler(self, number: int) -> Any:
        """Return the sampler of a trial's parameters, seeded by the trial's number, so equal in all processes."""
        samplers, seed = self._optuna.samplers, Random(f"{self.what.seed} {number}").getrandbits(32)
        if self.what.method in {"tpe", "hyperband"}:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return samplers.TPESampler(seed=seed, constant_liar=True, multivariate=True, group=True)
        return samplers.RandomSampler(seed=seed)

    def _pruner(self) -> Any:
        pruners = self._optuna.pruners
        if self.what.method == "hyperband":
            return pruners.HyperbandPruner(
                min_resource=1, max_resource=self._total_epochs(), reduction_factor=3
            )
        if self.what.prune == "median":
            return pruners.MedianPruner(n_startup_trials=4)
        if self.what.prune == "halving":
            return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        return pruners.NopPruner()

    def _report_trial(self, number: int, answer: Mapping[str, Any], search: Search) -> None:
        trial = next(each for each in search.trials if each.number == number)
        done = sum(each.state != "running" for each in search.trials)
        most = f"/{self._budget.amount:.0f}" if self._budget.kind == "trials" else ""
        if answer["outcome"] in {"refused", "failed"}:
            answered = f"{answer['outcome']}: {answer['error']}"
        else:
            answered = f"{self.what.goal} {shown(self.what.goal, trial.value)}"
            answered += " (ended early)" if answer["outcome"] == "stopped" else ""
            answered += f", {duration(answer['seconds'])}" if answer.get("seconds") is not None else ""
        best = search.best()
        record = (
            f"  (best {shown(self.what.goal, best.value)}, trial {best.number})" if best is not None else ""
        )
        what = ", ".join(f"{key}={_short(value)}" for key, value in trial.options.items())
        self._notify(f"[{done}{most}] trial {number}: {what}: {answered}{record}")


def _suggested(trial: Any, name: str, domain: Domain) -> Any:
    """Return Optuna's choice."""
    if isinstance(domain, Values):
        return trial.suggest_categorical(name, list(domain.values))
    assert isinstance(domain, Range)
    if domain.whole:
        return trial.suggest_int(
            name, int(domain.low), int(domain.high), step=int(domain.step or 1), log=domain.log
        )
    return trial.suggest_float(name, domain.low, domain.high, step=domain.step, log=domain.log)


def _figure_of(trial: Any, key: str) -> float:
    """Return a figure of a trial that has ended; 0 where it is not known."""
    return float(trial.user_attrs.get("came", {}).get(key) or 0.0)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def this_process() -> list[Any]:
    """Return a key that identifies this process: host, number, start."""
    return [platform.node(), os.getpid(), _started_at(os.getpid())]


def _started_at(pid: int) -> int:
    """Return when a process started, in ticks since its host did; 0 if there is none, or no such figure."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def owner_lives(owner: Sequence[Any], beat: float) -> bool:
    """Whether the process that has a trial in progress still lives, as far as one can know from here."""
    host, pid, started = owner
    if host == platform.node() and started:
        return bool(_started_at(int(pid)) == started)
    return time.time() - beat < _SILENT_S
