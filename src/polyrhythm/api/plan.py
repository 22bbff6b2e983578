"""Choosing a strategy and numbers of workers and servers, for time or money: the verb `plan`.

    1  candidates        strategies × workers × servers and where they are × batch sizes × rates, that fit the cluster,
       on uneven hosts with parts of the batch by speed
    2  throughput        of each by a dry run in virtual time, a fraction of a second
       and, with machines of a price list, on clusters of each of those; compressed, where less to send is sooner there
    3  time to target    of the most promising by a race (`race.py`): trainings in virtual time, with real gradients,
                         until they reach the target or are dominated; several seeds of those within reach of the best
    4  ranking           by time, or by money; candidates within each other's noise share a rank

    interval of a further seed   mean · exp(± t s sqrt(1 + 1/n))      s: deviation of ln(time), of all seeds
    one rank                     |ln(a / b)| < t s sqrt(1/n_a + 1/n_b)          t: 80 %, see `planning/intervals.py`

The number of images that a strategy needs hardly depends on the placement of its servers, nor on the speed of its
machines if all are equal. So only the fastest of the candidates that differ in their servers alone is tried, on the
cluster's own hosts; its images divided by their throughput are the time on other machines.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.api.compare import PLAN_FILE, REPORT_FILE, claimed, write
from polyrhythm.api.compare import Plan as Trials
from polyrhythm.api.observed_run import choose_folder
from polyrhythm.api.race import LONGEST, Entrant, Limits, Race, noise_among, not_known
from polyrhythm.api.rehearsal import STRATEGIES, Candidate, rehearse, with_servers
from polyrhythm.api.simulate import calibrated_within, laid_out, paced_for
from polyrhythm.claim import UNCLAIMED
from polyrhythm.config.assemble import default_optimizer, opened, strategy_from
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.ensemble import Ensemble
from polyrhythm.config.recipe import as_command, check_writable, configure
from polyrhythm.config.run_config import refuse_real_only
from polyrhythm.config.stages import Stages
from polyrhythm.data.balances.measured import Measured
from polyrhythm.errors import RequestError
from polyrhythm.escaping import json_text
from polyrhythm.evaluation.target import IMAGES, Target
from polyrhythm.launch.devices import available_cores
from polyrhythm.models.architectures.sizes import is_sizes
from polyrhythm.planning.intervals import Noise
from polyrhythm.reporting.comparison import RANK, Comparison, read_run, throughput
from polyrhythm.reporting.comparison import images_to as images_of
from polyrhythm.reporting.event_log import LOG_FILE
from polyrhythm.reporting.held_back import COMPUTING
from polyrhythm.reporting.pages.several_runs import PlanTable, render_plan
from polyrhythm.reporting.quantities import UNKNOWN, counted, duration, significant, whole
from polyrhythm.roles.balance import balances
from polyrhythm.simulation.cluster import Cluster, Link, Racks, machines_of, open_cluster, with_machine
from polyrhythm.specs import Config, Spec, parse, split_outside
from polyrhythm.strategies.compressing import Compressible, payoff_of

PLAN_JSON = "plan.json"
CONSIDERED = (*STRATEGIES, "pipeline(balance=auto)")
"""Default candidates."""
AUTO = "auto"
_COMPRESSORS = ("float16", "int8", "top_k(density=0.01)", "power_sgd")
_EXPLAINED, _NAMED = 3, 3
_UNLIMITED = 1e15
_TRIALS, _SEEDS = 24, 3
"""Defaults of `trials` and `seeds`."""
_EQUAL = 1.02
"""Ratio of times up to which the simpler one is recommended, where money does not matter.

The fastest of a rank is the better guess: on the 20 clusters of `benchmarks/plan`, the simplest of a whole rank costs
more than twice the time that is lost with this ratio.
"""
_WORTH_IT = 1.1
"""Gain in simulated images/s from which compression is tried, since it may cost accuracy."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate with its cost of reaching the target.

    Attributes:
        candidate: the way to run the job.
        images: images to the target: mean over seeds, and bounds of the interval of a further seed; infinite if the
            target was not reached, and bounds NaN with a single seed.
        seconds: seconds to the target, with the same bounds.
        price: price at the mean; None if no price is known.
        reached: number of seeds that reached the target.
        trials: number of seeds.
        epochs: epochs of the longest trial.
        command: command that runs it.
        rank: 1 for the best; candidates within each other's noise share one. 0: not ranked.
        left_out: reason for its exclusion; empty if there is none.
        calibrated_within: 80 % interval of its images/s, relative to it, by those of the cluster's fitted values; None:
            one that matters has no limit. Empty: not known, or the cluster has no fitted values.
    """

    candidate: Candidate
    images: tuple[float, float, float]
    seconds: tuple[float, float, float]
    price: float | None
    reached: int
    trials: int
    command: str
    epochs: int = 0
    rank: int = 0
    left_out: str = ""
    calibrated_within: Sequence[float] | None = ()

    @property
    def prices(self) -> tuple[float, float, float] | None:
        """The price with the ends of its interval; None if it is not known."""
        if self.price is None:
            return None
        middle, low, high = self.seconds
        return self.price, self.price * low / middle, self.price * high / middle

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        candidate, within = self.candidate, self.calibrated_within
        calibrated = {} if within is not None and not within else {"calibrated_within": within}
        return {
            "rank": self.rank or None,
            "strategy": candidate.strategy,
            "workers": candidate.workers,
            "options": dict(candidate.options),
            "machine": candidate.machine or None,
            "hosts": candidate.hosts,
            "images_per_s": _finite(candidate.images_per_s),
            "held_back": candidate.held_back,
            "images": list(map(_finite, self.images)),
            "seconds": list(map(_finite, self.seconds)),
            "price": self.price,
            "prices": None if self.prices is None else list(map(_finite, self.prices)),
            "reached": self.reached,
            "trials": self.trials,
            "epochs": self.epochs,
            "command": self.command,
            "left_out": self.left_out or None,
            **calibrated,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best ways to run a job.

    Attributes:
        folder: folder of the trials and the report.
        cluster: name of the cluster.
        currency: currency of prices; empty if unknown.
        target: target to be reached.
        choices: candidates that reach it within budget and deadline: by rank, the recommended one first.
        others: excluded candidates of trials, with the reason in each.
        rehearsed: simulated candidates, the highest throughput first.
        pareto: Pareto-optimal `choices`: no other is both faster and cheaper.
        refused: candidates that cannot be run, with the reason.
        for_money: whether the cheapest is first; else the fastest.
        allowed: the budget or deadline in words; empty without.
        asked: the command that repeats the plan.
        interrupted: whether the user ended the race before its end.
    """

    folder: Path
    cluster: str
    currency: str
    target: Target
    choices: Sequence[Choice]
    others: Sequence[Choice]
    rehearsed: Sequence[Candidate]
    pareto: Sequence[Choice]
    refused: Mapping[str, str]
    for_money: bool
    allowed: str
    asked: str = ""
    interrupted: bool = False

    @property
    def heading(self) -> str:
        """Target, cluster, bound and objective, as text."""
        within = f" within {self.allowed}" if self.allowed else ""
        return f"to {self.target} on {self.cluster}{within}, best for {'money' if self.for_money else 'time'} first"

    @property
    def recommended(self) -> Choice:
        """The choice to take."""
        return self.choices[0]

    def reason(self) -> str:
        """Return why the recommended choice is recommended, in a sentence."""
        best = self.recommended
        aim = "cheapest" if self.for_money else "fastest"
        rivals = [each for each in self.choices[1:] if each.rank == best.rank]
        text = f"{best.candidate.name}: {self.cost(best)}"
        if not rivals:
            text += f", the {aim}"
            after = next((each for each in self.choices if each.rank > best.rank), None)
            text += (
                f"; next is {after.candidate.name}, {self.cost(after)}" if after else " and the only choice"
            )
            return f"{text}."
        shown = rivals if len(rivals) <= _NAMED else rivals[: _NAMED - 1]
        names = "; ".join(f"{each.candidate.name}, {self.cost(each)}" for each in shown)
        if len(shown) < len(rivals):
            names += f"; and {counted(len(rivals) - len(shown), 'other')}"
        what = "price" if self.for_money else "time"
        text += f". No difference in {what} beyond that of seeds from {names}"
        fastest = all(best.seconds[0] <= each.seconds[0] for each in rivals)
        otherwise = "has the lowest mean" if fastest else "is among the simplest"
        return f"{text}; this one {_advantage(best, rivals) or otherwise}."

    def cost(self, choice: Choice) -> str:
        """Return the price or time of a choice, whichever the plan optimizes, with its interval."""
        if self.for_money and choice.prices is not None:
            return f"{_between(choice.prices, significant)} {self.currency}".strip()
        return _between(choice.seconds, duration)

    def explained(self, choice: Choice) -> str:
        """Return a sentence on why a choice stands where it does."""
        candidate = choice.candidate
        rate, within = candidate.images_per_s, choice.calibrated_within
        text = f"{candidate.name}: {whole(rate)} images/s on {counted(candidate.hosts, 'host')}"
        text += f" ({candidate.machine})" if candidate.machine else ""
        if within:
            text += (
                f", {whole(rate * within[0])} to {whole(rate * within[1])} by the calibration alone (80 %)"
            )
        elif within is None:
            text += ", with an unknown error: a value that it depends on was not determined by `calibrate`"
        if candidate.held_back not in ("", COMPUTING):
            text += f", bottleneck: {candidate.held_back}"
        text += f"; needs {_between(choice.images, whole)} images"
        fewest = min(each.images[0] for each in (*self.choices, *self.others))
        if self.target.metric == IMAGES:
            return f"{text.rpartition('; needs')[0]}."
        if math.isfinite(choice.images[0]) and choice.images[0] > 1.05 * fewest > 0:
            text += f", {choice.images[0] / fewest:.1f}× the fewest"
        if choice.reached < choice.trials:
            text += f"; {choice.reached} of {choice.trials} seeds reached the target"
        return text + "."

    def table(self) -> PlanTable:
        """Return the plan as the terminal and its report show it."""
        money = f"price {self.currency}".strip()
        priced = any(each.prices is not None for each in self.choices)
        heads = [RANK, "candidate", "virtual time", *([money] if priced else [])]

        def row(choice: Choice) -> list[str]:
            price = [] if choice.prices is None else [_between(choice.prices, significant)]
            price = price or ([UNKNOWN] if priced else [])
            return [f"{choice.rank}", choice.candidate.name, _between(choice.seconds, duration), *price]

        notes = [self.explained(each) for each in self.choices[:_EXPLAINED]]
        if any(math.isfinite(each.seconds[1]) for each in self.choices):
            notes.append(
                "In brackets: 80 % interval of a further seed. Candidates of one rank show no difference beyond "
                "that of seeds."
            )
        if self.pareto:
            notes.append(
                "No choice is both faster and cheaper than "
                + "; ".join(each.candidate.name for each in self.pareto)
                + "."
            )
        if not priced:
            notes.append("The price is not known: the cluster's hosts have no price_per_hour.")
        if self.target.metric == IMAGES:
            if self.recommended.command.startswith("polyrhythm run"):
                notes.append(f"In the script: polyrhythm.join({self.recommended.candidate.strategy!r}).")
            notes.append(
                "By dry runs alone: how far the network is trained by these images is not known. The batch of all "
                "workers grows with their number."
            )
        if self.interrupted:
            notes.append("The race was interrupted: this is the best answer so far.")
        left_out = [(each.candidate.name, each.left_out) for each in self.others]
        return PlanTable(
            heading=self.heading,
            reason=self.reason(),
            command=self.recommended.command,
            heads=heads,
            rows=[row(each) for each in self.choices],
            notes=notes,
            left_out=[*left_out, *_by_reason(self.refused)],
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        return {
            "cluster": self.cluster,
            "currency": self.currency or None,
            "target": {"metric": self.target.metric, "value": self.target.value},
            "for": "money" if self.for_money else "time",
            "allowed": self.allowed or None,
            "recommended": self.reason(),
            "interrupted": self.interrupted,
            "choices": [{**each.to_json(), "why": self.explained(each)} for each in self.choices],
            "others": [each.to_json() for each in self.others],
            "pareto": [each.candidate.name for each in self.pareto],
            "rehearsed": [{"name": each.name, "images_per_s": each.images_per_s} for each in self.rehearsed],
            "refused": dict(self.refused),
            "report": str(self.folder / "report.html"),
        }


def plan(
    *,
    cluster: str | Path,
    target: str,
    strategies: str | Sequence[str | Config] = CONSIDERED,
    workers: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = (),
    rates: Sequence[float] = (),
    compressors: str | Sequence[str] = AUTO,
    machines: str | Sequence[str] = (),
    budget: float | None = None,
    currency: str = "",
    deadline_s: float | None = None,
    optimize: str | None = None,
    trials: int = _TRIALS,
    seeds: int = _SEEDS,
    trial_epochs: int | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    notify: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Plan:
    """Find out how a job is best run on a cluster; real training is simulated, nothing is run for real.

    Args:
        cluster: a ready cluster or a cluster file.
        target: `top1=0.9`, `top5=0.99` or `loss=0.3`; or `images=1e6`, which ranks by dry runs alone.
        strategies: specs or objects; number and place of servers are found where a spec leaves them open.
        workers: numbers of workers; None: 1, 2, 4, … and as many as there are places.
        batch_sizes: batch sizes of a worker; none: that of `options`.
        rates: learning rates of the optimizer; none: each strategy's default.
        compressors: specs; the fastest candidate of every compressible strategy is tried with each as well.
            `auto`: with the one of the usual ones that gains most in simulation, if it gains a tenth; none:
            uncompressed only.
        machines: names of the cluster's price list, or `all` that it describes: as many of them as the cluster has
            hosts are further candidates.
        budget: budget in the currency of the cluster's prices.
        currency: currency of the budget; empty: the cluster's.
        deadline_s: deadline in seconds.
        optimize: `time` or `money`; None: money where only a deadline is given, else time.
        trials: maximum number of candidates that are trained in simulation; each strategy's fastest is one.
        seeds: number of seeds of candidates close to the best.
        trial_epochs: maximum epochs of a trial; None: eight times those of the job.
        out: the folder of the trials, new or empty; None: a new one under `runs/`.
        jobs: number of concurrent trials; None: one per core.
        notify: receiver of progress messages.
        **options: options of `simulate`: `data`, `model`, `epochs`, and any other.

    Raises:
        RequestError: the request is wrong, nothing reaches the target, or nothing does within budget and deadline.
        KeyboardInterrupt: the user ended the race before any candidate reached the target.
    """
    where = open_cluster(cluster)
    rented = split_outside(machines, ";,") if isinstance(machines, str) else list(machines)
    refused: dict[str, str] = {}
    rented = machines_of(where, refused) if rented == ["all"] else rented
    elsewhere = [with_machine(where, name) for name in rented]
    wanted = _Wanted(_goal(target), budget, deadline_s, optimize)
    wanted.check([where, *elsewhere])
    by_images = wanted.goal.metric == IMAGES
    if not by_images and is_sizes(options.get("model")):
        raise RequestError(
            f"a network of sizes alone cannot be trained to {wanted.goal}: give a number of images, as --target "
            "images=1e6"
        )
    if by_images and (trials, seeds, trial_epochs, compressors) != (_TRIALS, _SEEDS, None, AUTO):
        raise RequestError(
            "--target images trains nothing, and compression may cost accuracy: leave --trials, --seeds, "
            "--trial-epochs and --compressors out"
        )
    _check(trials, trial_epochs, options)
    check_writable("plan", options)
    if batch_sizes and (where.step_of is None or where.step_of.factor(1.0) is None):
        raise RequestError(
            f"cluster {where.name} does not specify how step times grow with the batch: leave --batch-sizes out, "
            "or take a "
            "cluster with step_of, as `polyrhythm profile` writes it"
        )
    where_priced = elsewhere[0] if elsewhere else where
    if currency and currency != where_priced.currency:
        raise RequestError(
            f"cluster {where.name} has prices in {where_priced.currency or 'no currency that it names'}, not {currency}"
        )
    names = split_outside(strategies, ";,") if isinstance(strategies, str) else list(map(str, strategies))
    if several := [each for each in names if Stages.parse(each) or Ensemble.parse(each)]:
        raise RequestError(
            f"plan weighs strategies that train one network from start to end (given {several[0]}): compare has rows "
            "of stages and ensembles"
        )
    candidates = list(_candidates(names, _numbers(where, workers), batch_sizes, rates))
    if is_uneven(where) and "balance" not in options:
        candidates = list(balanced(candidates, options))
    found = without_slow_pipelines(rehearse(where, candidates, options, refused), refused)
    if not found:
        raise RequestError(next(iter(refused.values()), "name at least one strategy"))
    rentable: list[Candidate] = []
    for name, machine in zip(rented, elsewhere, strict=True):
        there = [replace(each, machine=name) for each in candidates]
        rentable += rehearse(machine, there, options, refused)
    asked: dict[str, Any] = {
        "cluster": cluster,
        "target": target,
        "strategies": None if names == list(CONSIDERED) else "; ".join(map(str, names)),
        "workers": ",".join(map(str, workers or ())),
        "batch_sizes": ",".join(map(str, batch_sizes)),
        "rates": ",".join(f"{rate:g}" for rate in rates),
        "machines": "; ".join(rented),
        "budget": None if budget is None else f"{budget:g}{currency}",
        "deadline": None if deadline_s is None else f"{deadline_s:g}s",
        "optimize": optimize,
    }
    notify(f"simulated {counted(len(found) + len(rentable), 'candidate')}; {len(refused)} cannot be run here")
    if by_images:
        given = {key: value for key, value in asked.items() if value} | options
        return _by_images(
            [*found, *rentable], refused, where_priced, wanted, options, as_command(["plan"], given), out
        )
    shrunk = split_outside(compressors, ";,") if isinstance(compressors, str) else list(compressors)
    if shrunk == [AUTO]:
        smaller = worth_compressing(where, found, options)
        found = sorted([*found, *smaller], key=lambda each: -each.images_per_s)
    else:
        smaller = compressed_candidates(found, [each for each in shrunk if each != "none"], refused)
        smaller = [_with_its_cost(where, each, options) for each in smaller]
    first, rest = most_promising([each for each in found if each not in smaller])
    limits = Limits(
        target=wanted.goal,
        trials=max(trials, len(first) + len(smaller)),
        for_money=wanted.for_money and all(each.price_per_hour is not None for each in found),
        epochs=_epochs(options),
        most_epochs=trial_epochs or LONGEST * _epochs(options),
        seeds=seeds,
        budget=budget,
        deadline_s=deadline_s,
        images_alone=bool(rented),
    )
    asked |= {
        "compressors": None if shrunk == [AUTO] else "; ".join(shrunk) or "none",
        "trials": None if trials == _TRIALS else trials,
        "seeds": None if seeds == _SEEDS else seeds,
        "trial_epochs": trial_epochs,
    }
    trainings = Trials(
        strategies=[],
        workers=[],
        seeds=list(range(seeds)),
        grid={},
        options={key: value for key, value in options.items() if key != "epochs"},
        simulation={"cluster": str(cluster)},
        until=target,
        asked=as_command(["plan"], {key: value for key, value in asked.items() if value} | options),
    )
    folder = choose_folder(out, "plan")
    with claimed(folder):
        race = Race(folder, trainings, limits, jobs or available_cores(), notify)
        race.run([*first, *smaller], rest)
        return _ranked(race, folder, trainings, [*found, *rentable], refused, where_priced, wanted)


def _goal(text: str) -> Target:
    """Read a target, or `images=1e6`.

    Raises:
        RequestError: it is neither.
    """
    metric, _, number = (part.strip() for part in text.partition("="))
    if metric != IMAGES:
        return Target.parse(text)
    try:
        images = float(number)
    except ValueError:
        images = math.nan
    if not 1 <= images < math.inf:
        raise RequestError(f"cannot read the target {text!r}: write images=1e6, at least 1")
    return Target(IMAGES, images)


def _by_images(
    found: Sequence[Candidate],
    refused: dict[str, str],
    where: Cluster,
    wanted: _Wanted,
    options: Mapping[str, Any],
    asked: str,
    out: str | Path | None,
) -> Plan:
    """Return the plan for a number of images, by dry runs alone; see `plan`."""
    images = wanted.goal.value
    every = []
    for each in found:
        seconds = images / each.images_per_s if each.images_per_s > 0 else math.inf
        same = strategy_from(each.strategy).traits(each.workers).identical
        hourly = each.price_per_hour
        every.append(
            Choice(
                candidate=each,
                images=(images, math.nan, math.nan),
                seconds=(seconds, math.nan, math.nan),
                price=None if hourly is None else seconds / 3600 * hourly,
                reached=0,
                trials=0,
                command=_command_for_images(each, options, images),
                left_out="" if same else "stale or averaged updates, which may need more images",
            )
        )
    for_money = wanted.for_money and any(each.price is not None for each in every)
    reaching = [each for each in every if not each.left_out]
    limits = wanted.limits(where.currency)
    choices = ranked(list(filter(wanted.allows, reaching)), Noise(math.nan, 0), for_money=for_money)
    if not choices:
        why = too_little(wanted.goal, limits, reaching, where.currency) if reaching else ""
        raise RequestError(why or "every candidate has stale or averaged updates: add synchronous")
    folder = choose_folder(out, "plan")
    made = Plan(
        folder=folder,
        cluster=where.name,
        currency=where.currency,
        target=wanted.goal,
        choices=_calibrated(where, choices, options),
        others=_others(every, choices, limits),
        rehearsed=found,
        pareto=pareto_choices(choices),
        refused=refused,
        for_money=for_money,
        allowed=limits,
        asked=asked,
    )
    with claimed(folder):
        UNCLAIMED.write(folder / PLAN_JSON, json_text(made.to_json(), indent=2) + "\n")
        UNCLAIMED.write(folder / REPORT_FILE, render_plan(made.table(), None, folder, asked))
    return made


def _others(every: Sequence[Choice], choices: Sequence[Choice], limits: str) -> list[Choice]:
    """Return what is not among the choices, each with the reason."""
    kept = {each.candidate.name for each in choices}
    return [
        replace(each, left_out=each.left_out or f"over {limits}")
        for each in every
        if each.candidate.name not in kept
    ]


def _command_for_images(candidate: Candidate, options: Mapping[str, Any], images: float) -> str:
    """Return the command of a run of that length; of a network of sizes alone, that of its script."""
    if is_sizes(options.get("model")):
        return f"polyrhythm run --workers {candidate.workers} SCRIPT"
    given = {**options, "strategy": candidate.strategy, "workers": candidate.workers, **candidate.options}
    length = len(opened(configure({}, given)).train)
    return as_command(["train"], {**given, "epochs": max(1, math.ceil(images / length))})


def _epochs(options: Mapping[str, Any]) -> int:
    """Return the epochs of a job."""
    config = configure({}, {**options, "strategy": "synchronous", "workers": 1})
    return config.epochs or opened(config).default_epochs


@dataclass(frozen=True)
class _Wanted:
    """The request of a plan.

    Attributes:
        goal: target.
        budget: budget in the currency of the prices; None: any.
        deadline_s: seconds; None: any.
        optimize: `time` or `money`; None: money where only a deadline is given.
    """

    goal: Target
    budget: float | None
    deadline_s: float | None
    optimize: str | None

    def check(self, clusters: Sequence[Cluster]) -> None:
        """Reject requests that are contradictory, or impossible on these clusters.

        Raises:
            RequestError: the request cannot be met.
        """
        if self.optimize not in (None, "time", "money"):
            raise RequestError(f"optimize is time or money (given {self.optimize!r})")
        for name, value in (("budget", self.budget), ("deadline", self.deadline_s)):
            if value is not None and not value > 0:
                raise RequestError(f"{name} must be above 0 (given {value:g})")
        priced = any(kind.price_per_hour is not None for where in clusters for kind in where.hosts)
        if not priced and (self.budget is not None or self.optimize == "money"):
            raise RequestError(
                f"cluster {clusters[0].name} has no prices, so nothing is known of money: give its hosts a "
                "price_per_hour"
            )

    @property
    def for_money(self) -> bool:
        """Whether the cheapest is the best; else the fastest."""
        by_default = self.deadline_s is not None and self.budget is None
        return self.optimize == "money" or (self.optimize is None and by_default)

    def allows(self, choice: Choice) -> bool:
        """Whether a choice keeps to budget and deadline."""
        within = self.deadline_s is None or choice.seconds[0] <= self.deadline_s
        return within and (self.budget is None or (choice.price is not None and choice.price <= self.budget))

    def limits(self, currency: str) -> str:
        """Return budget and deadline in words; empty without."""
        limits = [] if self.budget is None else [f"{self.budget:g} {currency}".strip()]
        return " and ".join(limits + ([] if self.deadline_s is None else [duration(self.deadline_s)]))


def _check(trials: int, trial_epochs: int | None, options: Mapping[str, Any]) -> None:
    refuse_real_only(options)
    for key in ("strategy", "workers", "until", "seed"):
        if key in options:
            raise RequestError(f"plan finds the strategy and its workers itself: leave --{key} out")
    if options.get("svrg", "none") != "none":
        raise RequestError("plan's dry runs do not count the passes of svrg: leave it out, or use simulate")
    if trials < 1 or (trial_epochs is not None and trial_epochs < 1):
        raise RequestError("trials and trial-epochs must be at least 1")


def _numbers(where: Cluster, workers: Sequence[int] | None) -> list[int]:
    places = sum(machine.places for machine in where.machines)
    if workers is None:
        doubled = [1 << power for power in range(places.bit_length())]
        return sorted({*doubled, places})
    if not workers or min(workers) < 1:
        raise RequestError(f"workers must be numbers from 1, as in 1,2,4 (given {list(workers)})")
    return list(workers)


def _candidates(
    names: Sequence[str], workers: Sequence[int], batch_sizes: Sequence[int], rates: Sequence[float]
) -> Iterator[Candidate]:
    for name, count, batch, rate in product(names, workers, batch_sizes or (None,), rates or (None,)):
        options: dict[str, Any] = {} if batch is None else {"batch_size": batch}
        if rate is not None:
            optimizer = default_optimizer(strategy_from(name), count)
            options["optimizer"] = str(optimizer.model_copy(update={"lr": rate}))
        for spec in with_servers(name, count):
            yield Candidate(strategy=spec, family=str(parse(name)), workers=count, options=options)


def most_promising(found: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the fastest candidate of every strategy, and of all others that learn differently the fastest.

    Args:
        found: the highest throughput first.
    """
    fastest: dict[tuple[Any, ...], Candidate] = {}
    for each in found:
        fastest.setdefault(each.learns_as, each)
    of_family: dict[str, Candidate] = {}
    for each in fastest.values():
        of_family.setdefault(each.family, each)
    firsts = list(of_family.values())
    return firsts, [each for each in fastest.values() if each not in firsts]


def is_uneven(where: Cluster) -> bool:
    """Whether some hosts or ranks are slower than others."""
    return len({machine.speed for machine in where.machines}) > 1 or bool(where.slow)


def balanced(candidates: Sequence[Candidate], options: Mapping[str, Any]) -> Iterator[Candidate]:
    """Return candidates, those that support per-worker batch sizes by speed with such sizes.

    `auto` has them, too, but dry runs may be too short for its decision.
    """
    for each in candidates:
        batch = configure({}, {**options, **each.options}).worker_batch
        try:
            by_speed = balances(Measured(), strategy_from(each.strategy), each.workers, each.workers * batch)
        except RequestError:
            by_speed = False
        yield replace(each, options={**each.options, "balance": "measured"}) if by_speed else each


def without_slow_pipelines(found: Sequence[Candidate], refused: dict[str, str]) -> list[Candidate]:
    """Drop pipelines that are slower than the same number of workers with data parallelism.

    Args:
        found: candidates, the highest throughput first.
        refused: receiver of the reason of those that are dropped.
    """
    alone: dict[tuple[Any, ...], Candidate] = {}
    for each in found:
        if parse(each.strategy).name == "synchronous":
            alone.setdefault((each.workers, str(each.options.get("batch_size")), each.machine), each)
    kept = []
    for each in found:
        other = alone.get((each.workers, str(each.options.get("batch_size")), each.machine))
        if each.cuts_network and other is not None and each.images_per_s <= other.images_per_s:
            refused.setdefault(each.name, f"same updates as {other.name}, which is faster")
        else:
            kept.append(each)
    return kept


def worth_compressing(
    where: Cluster, found: Sequence[Candidate], options: Mapping[str, Any]
) -> list[Candidate]:
    """Return the fastest candidate of every strategy that gains by one of the usual compressors.

    Args:
        where: the cluster.
        found: candidates, the highest throughput first.
        options: options of the job.
    """
    fastest: dict[str, Candidate] = {}
    for each in found:
        fastest.setdefault(each.family, each)
    gained = []
    unlimited = _with_bandwidth(where)
    for each in fastest.values():
        compressed = compressed_candidates([each], _COMPRESSORS, {}, strict=False)
        bound = rehearse(unlimited, [each], options, {}) if compressed else []
        # Unlimited links bound the gain of any compressor; dry runs of compressors are slow.
        if not bound or bound[0].images_per_s <= _WORTH_IT * each.images_per_s:
            continue
        costed = [_with_its_cost(where, other, options) for other in rehearse(where, compressed, options, {})]
        rates = [(other.with_compressing(other.images_per_s), other) for other in costed]
        rate, best = max(rates, key=lambda entry: entry[0], default=(0.0, each))
        if rate > _WORTH_IT * each.images_per_s:
            gained.append(replace(best, images_per_s=rate))
    return gained


def _with_bandwidth(where: Cluster) -> Cluster:
    """Return a cluster with latency only, at infinite bandwidth."""

    def free(link: Link) -> Link:
        return Link(latency_s=link.latency_s, bandwidth_bytes_per_s=_UNLIMITED)

    hosts = tuple(
        kind.model_copy(
            update={
                "nic": kind.nic and free(kind.nic),
                "inside": kind.inside and free(kind.inside),
                "tree": tuple(
                    level.model_copy(update={"bandwidth_bytes_per_s": _UNLIMITED}) for level in kind.tree
                ),
            }
        )
        for kind in where.hosts
    )
    racks = where.racks and Racks(
        hosts=where.racks.hosts, uplink_bandwidth_bytes_per_s=_UNLIMITED, latency_s=where.racks.latency_s
    )
    # Not `model_copy`, which would copy the list of its machines.
    values = {name: getattr(where, name) for name in Cluster.model_fields}
    values |= {"hosts": hosts, "nic": free(where.nic), "inside": free(where.inside), "racks": racks}
    return Cluster(**{**values, "server_bandwidth_bytes_per_s": None})


def _with_its_cost(where: Cluster, candidate: Candidate, options: Mapping[str, Any]) -> Candidate:
    """Return a candidate that knows what compressing takes, measured on this machine; unless values decide it."""
    request = {**options, **candidate.options, "strategy": candidate.strategy, "workers": candidate.workers}
    dry_run, _ = assemble_dry_run(configure({}, request), 1)
    link = laid_out(where.model_copy(update={"faults": ()}), dry_run).slowest_link_bytes_per_s
    sizes, workers = dry_run.sizes, candidate.workers
    pays = payoff_of(dry_run.strategy, sizes.shapes, sizes.dtype, workers, link)
    if pays is None:
        return candidate
    images = workers * dry_run.batch_size * max(1, dry_run.strategy.traits(workers).exchange_every)
    return replace(candidate, compress_s=pays.compress_s / images)


def compressed_candidates(
    found: Sequence[Candidate], compressors: Sequence[str], refused: dict[str, str], *, strict: bool = True
) -> list[Candidate]:
    """Return the fastest candidate of every strategy with each compressor; trials measure their throughput.

    A dry run has no gradients, and the size of many compressed messages depends on their values.

    Args:
        found: the highest throughput first.
        compressors: specs.
        refused: receiver of the reason of every candidate that cannot be compressed so.
        strict: whether it is an error if none can be.

    Raises:
        RequestError: a compressor is none, or no candidate can be compressed.
    """
    fastest: dict[str, Candidate] = {}
    for each in found:
        fastest.setdefault(each.family, each)
    made = []
    for each, spec in product(fastest.values(), compressors):
        given = parse(each.strategy)
        if not isinstance(strategy_from(each.strategy), Compressible) or "compress" in given.arguments:
            continue
        arguments = {**given.arguments, "compress": parse(spec)}
        changed = str(Spec(given.name, arguments))
        try:
            strategy_from(changed).check(each.workers)
        except RequestError as error:
            refused.setdefault(f"{changed}, {counted(each.workers, 'worker')}", str(error))
            continue
        made.append(replace(each, strategy=changed, family=changed, images_per_s=math.nan, held_back=""))
    if compressors and strict and not made:
        raise RequestError(
            next(iter(refused.values()), "no strategy of these can be compressed: add synchronous")
        )
    return made


def _ranked(
    race: Race,
    folder: Path,
    trainings: Trials,
    found: Sequence[Candidate],
    refused: dict[str, str],
    where: Cluster,
    wanted: _Wanted,
) -> Plan:
    goal = wanted.goal
    for entrant in race.entrants:
        if entrant.refused:
            refused.setdefault(entrant.candidate.name, entrant.refused)
    entrants = [each for each in race.ranked() if each.runs or each.short is not None]
    if not entrants and race.interrupted:
        raise KeyboardInterrupt
    if not entrants:
        raise RequestError(next(iter(refused.values()), "no trial could be made"))
    noise = noise_among(entrants, goal)
    every = [
        _choice(other, entrant, goal, trainings, noise, race.dominated(entrant))
        for entrant in entrants
        for other in (entrant.candidate, *_on_other_machines(entrant.candidate, found))
    ]
    cases = [race.case(each.candidate, each.epochs) for each in entrants]
    runs = [read_run(path.parent) for path in sorted(folder.glob(f"*/{LOG_FILE}"))]
    comparison = Comparison.of(runs, goal, refused)
    (folder / PLAN_FILE).write_text(
        yaml.safe_dump(vars(replace(trainings, cases=cases)), sort_keys=False), encoding="utf-8"
    )
    write(comparison, folder, trainings.command())
    reaching = [each for each in every if math.isfinite(each.seconds[0]) and not each.left_out]
    if not reaching and race.interrupted:
        raise KeyboardInterrupt
    if not reaching:
        raise _failed(_nothing(goal, comparison, folder), comparison, folder, trainings)
    for_money = wanted.for_money and any(each.price is not None for each in reaching)
    limits = wanted.limits(where.currency)
    priced = any(each.price is not None for each in reaching)
    equal = _EQUAL if wanted.optimize == "time" or not priced else math.inf
    choices = ranked(list(filter(wanted.allows, reaching)), noise, for_money=for_money, equal=equal)
    if not choices:
        why = too_little(goal, limits, reaching, where.currency)
        raise _failed(why, comparison, folder, trainings)
    made = Plan(
        folder=folder,
        cluster=where.name,
        currency=where.currency,
        target=goal,
        choices=_calibrated(where, choices, trainings.options),
        others=_others(every, choices, limits),
        rehearsed=found,
        pareto=pareto_choices(choices),
        refused=refused,
        for_money=for_money,
        allowed=limits,
        asked=trainings.command(),
        interrupted=race.interrupted,
    )
    UNCLAIMED.write(folder / PLAN_JSON, json_text(made.to_json(), indent=2) + "\n")
    UNCLAIMED.write(folder / REPORT_FILE, render_plan(made.table(), comparison, folder, trainings.command()))
    return made


def ranked(
    choices: Sequence[Choice], noise: Noise, *, for_money: bool, equal: float = math.inf
) -> list[Choice]:
    """Return choices by rank; those within the noise of a rank's best share it, the cheaper or simpler ones first.

    Args:
        choices: choices that reach the target.
        noise: noise of their times.
        for_money: whether the price decides; else the time.
        equal: ratio to the rank's best up to which the cheaper or simpler one is first; beyond, the better one.
    """

    def cost(choice: Choice) -> float:
        return (math.inf if choice.price is None else choice.price) if for_money else choice.seconds[0]

    ranks: list[list[Choice]] = []
    for each in sorted(choices, key=cost):
        best = ranks[-1][0] if ranks and math.isfinite(cost(each)) else None
        if best is not None and noise.alike(cost(best), cost(each), (best.trials, each.trials)):
            ranks[-1].append(each)
        else:
            ranks.append([each])

    def place(choice: Choice, best: float) -> tuple[float, ...]:
        beyond = cost(choice) > equal * best
        return (choice.reached < choice.trials, beyond, *(() if beyond else _preferred(choice)), cost(choice))

    found: list[Choice] = []
    for number, rank in enumerate(ranks, 1):
        keys = [(place(each, cost(rank[0])), count) for count, each in enumerate(rank)]
        found += [replace(rank[count], rank=number) for _, count in sorted(keys)]
    return found


def _preferred(choice: Choice) -> tuple[float, ...]:
    """Return the sort key between equally good choices: price per hour, then simplicity."""
    candidate = choice.candidate
    traits = strategy_from(candidate.strategy).traits(candidate.workers)
    hourly = math.inf if candidate.price_per_hour is None else candidate.price_per_hour
    return (
        hourly,
        candidate.hosts,
        not traits.identical,
        traits.servers,
        candidate.workers,
        len(candidate.options),
    )


def _by_reason(refused: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return refused candidates with their reasons, one of each group with reasons that differ in numbers alone."""
    alike: dict[str, list[str]] = {}
    for name, why in refused.items():
        alike.setdefault(re.sub(r"\d+ servers?", "servers", why), []).append(name)
    return [
        (names[0] + (f" and {counted(len(names) - 1, 'other')}" if names[1:] else ""), refused[names[0]])
        for names in alike.values()
    ]


def _advantage(best: Choice, rivals: Sequence[Choice]) -> str:
    """Return the advantage of a choice over others of its rank; empty without one over all of them."""
    (hourly, hosts, stale, servers, workers, _), *others = map(_preferred, (best, *rivals))
    if all(hourly < other[0] for other in others):
        return "costs less an hour"
    if all(hosts < other[1] for other in others):
        return "takes fewer hosts"
    if not stale and all(other[2] for other in others):
        return "trains as with one large batch"
    if all((servers, workers) < (other[3], other[4]) for other in others):
        return "is simpler"
    return ""


def _calibrated(where: Cluster, choices: Sequence[Choice], options: Mapping[str, Any]) -> list[Choice]:
    """Return choices, those that are explained with the intervals of their images/s where the cluster was fitted."""
    if not where.fitted:
        return list(choices)
    given = {key: value for key, value in options.items() if key != "epochs"}
    found = list(choices)
    for place, choice in enumerate(choices[:_EXPLAINED]):
        candidate = choice.candidate
        if candidate.machine:
            continue
        asked = {
            **given,
            **candidate.options,
            "strategy": candidate.strategy,
            "workers": candidate.workers,
        }
        config = configure({}, asked)
        within = calibrated_within(paced_for(where, config), assemble_dry_run(config)[0])
        found[place] = replace(choice, calibrated_within=within)
    return found


def _on_other_machines(tried: Candidate, found: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest and the cheapest candidate on every other machine, of those that train like a tried one."""
    best: dict[tuple[str, str], Candidate] = {}
    for each in found:
        if each.machine and each.learns_as == tried.learns_as and each.images_per_s > 0:
            for why, cost in (("time", 1.0), ("money", each.price_per_hour or math.inf)):
                held = best.get((each.machine, why))
                of_held = (
                    math.inf if held is None else (1.0 if why == "time" else held.price_per_hour or math.inf)
                )
                if held is None or cost / each.images_per_s < of_held / held.images_per_s:
                    best[each.machine, why] = each
    return list({each.name: each for each in best.values()}.values())


def _choice(
    candidate: Candidate, entrant: Entrant, goal: Target, trainings: Trials, noise: Noise, dominated: str
) -> Choice:
    runs = [entrant.runs[seed] for seed in sorted(entrant.runs)]
    seen = runs or ([entrant.short] if entrant.short is not None else [])
    rate = candidate.images_per_s
    if not candidate.machine:
        measured = [throughput(run) for run in seen if math.isfinite(throughput(run))]
        rate = candidate.with_compressing(statistics.fmean(measured)) if measured else rate
    if math.isnan(candidate.images_per_s):
        candidate = replace(candidate, images_per_s=rate)
    images = statistics.fmean(images_of(goal)(run) for run in runs) if runs else math.inf
    if candidate.machine or not runs:
        middle = images / rate
    else:
        slower = 1 + candidate.compress_s * statistics.fmean(map(throughput, runs))
        middle = slower * statistics.fmean(entrant.seconds(goal))
    hourly = candidate.price_per_hour
    choice = {
        **trainings.options,
        "strategy": candidate.strategy,
        "workers": candidate.workers,
        **candidate.options,
        "until": f"{goal.metric}={goal.value:g}",
    }
    if "updates" not in trainings.options:
        choice["epochs"] = entrant.epochs
    return Choice(
        candidate=candidate,
        images=noise.interval(images, len(runs)),
        seconds=noise.interval(middle, len(entrant.seconds(goal)) or 1),
        price=None if hourly is None or not math.isfinite(middle) else middle / 3600 * hourly,
        reached=len(runs),
        trials=len(runs) + len(entrant.missed_s) + (entrant.short is not None and not runs),
        command=as_command(["train"], choice),
        epochs=entrant.epochs,
        left_out=dominated if runs else not_known(entrant, goal),
    )


def pareto_choices(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices than which none is both faster and cheaper; none where prices are not known."""
    priced = sorted(
        ((each.seconds[0], each.price, each) for each in choices if each.price is not None),
        key=lambda entry: entry[:2],
    )
    found: list[Choice] = []
    cheapest = math.inf
    for _, price, each in priced:
        if price < cheapest:
            found.append(each)
            cheapest = price
    return found


def _failed(why: str, comparison: Comparison, folder: Path, trainings: Trials) -> RequestError:
    """Return the error of a plan without a choice, after writing it into the report of its trials."""
    write(replace(comparison, notes=(f"No recommendation: {why}.",)), folder, trainings.command())
    return RequestError(why)


def _nothing(goal: Target, comparison: Comparison, folder: Path) -> str:
    best = comparison.most_accurate()
    top = f": the best was {100 * best.mean(lambda run: run.best()):.1f} % by {best.name}" if best else ""
    return f"nothing reaches {goal}{top}; ask for less, or for more --epochs ({folder}/report.html)"


def too_little(goal: Target, limit: str, reaching: Sequence[Choice], currency: str) -> str:
    """Return the sentence for limits that no choice keeps to: what the fastest and the cheapest would take."""
    quickest = min(reaching, key=lambda each: each.seconds[0])
    text = f"nothing reaches {goal} within {limit}: the fastest, {quickest.candidate.name}, takes "
    text += duration(quickest.seconds[0])
    priced = [each for each in reaching if each.price is not None]
    if priced:
        cheapest = min(priced, key=lambda each: each.price or 0.0)
        text += f"; the cheapest, {cheapest.candidate.name}, {significant(cheapest.price or 0.0)} {currency}".rstrip()
    return text


def _between(values: tuple[float, float, float], write: Callable[[float], str]) -> str:
    middle, low, high = values
    if not math.isfinite(low) or write(low) == write(high):
        return write(middle)
    return f"{write(middle)} ({write(low)} to {write(high)})"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
