"""Which strategy, with how many workers and servers, for time or money: the verb `plan`.

    1  candidates        strategies × workers × servers and where they are × batch sizes × rates, that fit the cluster,
       and on uneven hosts × parts of the batch by speed
    2  throughput        of each by a rehearsal: a dry run in virtual time, a fraction of a second
       and, with machines of a price list, on clusters of each of those; compressed, where less to send is sooner there
    3  images to target  of the most promising by short trainings in virtual time, with real gradients, over some seeds;
                         where they end before the target, by the curve of their tests
    4  ranking           by time, and by money where prices are known

    time to target = images to target / throughput, and that of the trial itself where it got there

How many images a strategy needs hardly depends on who serves its shards, nor on how fast its machines are if all are
alike. So of candidates that differ in their servers alone only the one with the highest throughput is tried, and on the
cluster's own hosts; its images over their throughput are the time on other machines.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from polyrhythm.api.compare import Compared, carry_out
from polyrhythm.api.compare import Plan as Trials
from polyrhythm.api.rehearsal import STRATEGIES, Candidate, rehearse, with_servers
from polyrhythm.api.simulate import laid_out
from polyrhythm.claim import UNCLAIMED
from polyrhythm.config.assemble import default_optimizer, strategy_from
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.ensemble import Ensemble
from polyrhythm.config.recipe import as_command, configure
from polyrhythm.config.run_config import refuse_real_only
from polyrhythm.config.stages import Stages
from polyrhythm.data.balances.measured import Measured
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.target import Target
from polyrhythm.planning.learning_curve import FEWEST_TESTS, images_to
from polyrhythm.reporting.comparison import ComparedRun, Row, throughput, time_to
from polyrhythm.reporting.comparison import images_to as images_of
from polyrhythm.reporting.quantities import counted, duration, significant, whole
from polyrhythm.roles.balance import balances
from polyrhythm.simulation.cluster import Cluster, machines_of, open_cluster, with_machine
from polyrhythm.specs import Spec, parse, split_outside
from polyrhythm.strategies.compressing import Compressible, payoff_of

PLAN_JSON = "plan.json"
CONSIDERED = (*STRATEGIES, "pipeline(balance=auto)")
"""What is chosen among, unless the user says otherwise."""
AUTO = "auto"
_COMPRESSORS = ("float16", "int8", "top_k(density=0.01)", "power_sgd")
_WORTH_IT = 1.1
"""Times as many images a second that compression must bring in rehearsal to be tried: it may cost images."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate with what it is predicted to take to the target.

    Attributes:
        candidate: the way to run the job.
        images: to the target: the middle, and the ends of what seeds or the curve allow.
        seconds: likewise.
        price: at the middle; None if no price is known.
        reached: in how many trials the target was reached; elsewhere the curve of their tests says.
        trials: how many there were.
        command: that runs it.
    """

    candidate: Candidate
    images: tuple[float, float, float]
    seconds: tuple[float, float, float]
    price: float | None
    reached: int
    trials: int
    command: str

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        candidate = self.candidate
        return {
            "strategy": candidate.strategy,
            "workers": candidate.workers,
            "options": dict(candidate.options),
            "machine": candidate.machine or None,
            "hosts": candidate.hosts,
            "images_per_s": candidate.images_per_s,
            "held_back": candidate.held_back,
            "images": list(map(_finite, self.images)),
            "seconds": list(map(_finite, self.seconds)),
            "price": self.price,
            "reached": self.reached,
            "trials": self.trials,
            "command": self.command,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a job is best run as.

    Attributes:
        folder: of the trials, with their report.
        cluster: its name.
        currency: of prices; empty if it is not known.
        target: that is to be reached.
        choices: that reach it within budget and deadline, the best first.
        others: that do not, or take longer than allowed.
        rehearsed: every candidate, the highest throughput first.
        pareto: of `choices`, those than which none is both faster and cheaper.
        refused: candidates that cannot be run, with the reason.
        for_money: whether the cheapest is first; else the fastest.
        allowed: the budget or deadline in words; empty without.
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

    def explained(self, choice: Choice) -> str:
        """Return a sentence on why a choice stands where it does."""
        candidate = choice.candidate
        text = f"{candidate.name}: {whole(candidate.images_per_s)} images/s on {counted(candidate.hosts, 'host')}"
        text += f" ({candidate.machine})" if candidate.machine else ""
        if candidate.held_back:
            text += f", bound by {candidate.held_back}"
        text += f"; needs {_between(choice.images, whole)} images"
        fewest = min(each.images[0] for each in (*self.choices, *self.others))
        if math.isfinite(choice.images[0]) and choice.images[0] > 1.05 * fewest > 0:
            text += f", {choice.images[0] / fewest:.1f} times the fewest of all"
        if choice.reached < choice.trials:
            text += f" by the curve of {counted(choice.trials - choice.reached, 'trial')} that ended before"
        return text + "."

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        return {
            "cluster": self.cluster,
            "currency": self.currency or None,
            "target": {"metric": self.target.metric, "value": self.target.value},
            "for": "money" if self.for_money else "time",
            "allowed": self.allowed or None,
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
    strategies: str | Sequence[str] = CONSIDERED,
    workers: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = (),
    rates: Sequence[float] = (),
    compressors: str | Sequence[str] = AUTO,
    machines: str | Sequence[str] = (),
    budget: float | None = None,
    currency: str = "",
    deadline_s: float | None = None,
    optimise: str | None = None,
    trials: int = 12,
    seeds: int = 2,
    trial_epochs: int | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Plan:
    """Find out how a job is best run on a cluster; real training is simulated, nothing is run for real.

    Args:
        cluster: a ready cluster or a cluster file.
        target: `top1=0.9`, `top5=0.99` or `loss=0.3`.
        strategies: specs; number and place of servers are found where a spec leaves them open.
        workers: numbers of workers; None: 1, 2, 4, … and as many as there are places.
        batch_sizes: of a worker; none: that of `options`.
        rates: of the optimizer; none: each strategy's default.
        compressors: specs; of every strategy that can be compressed the fastest candidate is tried with each as well.
            `auto`: with that of some usual ones which in rehearsal gains most, if that is a tenth; none: not at all.
        machines: of the cluster's price list, `all` of which it says what they are, or names of them: as many as the
            cluster has hosts are candidates beside those.
        budget: in the currency of the cluster's prices.
        currency: of the budget; empty: the cluster's.
        deadline_s: seconds.
        optimise: `time` or `money`; None: money where only a deadline is given, else time.
        trials: candidates that are trained in simulation, each strategy's fastest at least.
        seeds: of every trial.
        trial_epochs: after which trials end before the target; None: the epochs of the job.
        out: the folder of the trials, new or empty; None: a new one under `runs/`.
        jobs: trials at a time; None: one a core.
        tell: receives a line about what is done.
        **options: of `simulate`: `data`, `model`, `epochs`, and any other.

    Raises:
        RequestError: the request is wrong, nothing reaches the target, or nothing does within budget and deadline.
    """
    where = open_cluster(cluster)
    rented = split_outside(machines, ";") if isinstance(machines, str) else list(machines)
    rented = machines_of(where) if rented == ["all"] else rented
    elsewhere = [with_machine(where, name) for name in rented]
    wanted = _Wanted(Target.parse(target), budget, deadline_s, optimise)
    wanted.check([where, *elsewhere])
    _check(trials, trial_epochs, options)
    if batch_sizes and (where.step_of is None or where.step_of.factor(1.0) is None):
        raise RequestError(
            f"cluster {where.name} does not say how step times grow with the batch: leave --batch-sizes out, or take a "
            "cluster with step_of, as `polyrhythm profile` writes it"
        )
    where_priced = elsewhere[0] if elsewhere else where
    if currency and currency != where_priced.currency:
        raise RequestError(
            f"cluster {where.name} has prices in {where_priced.currency or 'no currency that it names'}, not {currency}"
        )
    names = split_outside(strategies, ";") if isinstance(strategies, str) else list(strategies)
    if several := [each for each in names if Stages.parse(each) or Ensemble.parse(each)]:
        raise RequestError(
            f"plan weighs strategies that train one network from start to end (given {several[0]}): compare has rows "
            "of stages and ensembles"
        )
    refused: dict[str, str] = {}
    candidates = list(_candidates(names, _numbers(where, workers), batch_sizes, rates))
    if is_uneven(where) and "balance" not in options:
        candidates = [*candidates, *balanced(candidates, options)]
    found = without_slow_pipelines(rehearse(where, candidates, options, refused), refused)
    if not found:
        raise RequestError(next(iter(refused.values()), "name at least one strategy"))
    rentable: list[Candidate] = []
    for name, machine in zip(rented, elsewhere, strict=True):
        there = [replace(each, machine=name) for each in candidates]
        rentable += rehearse(machine, there, options, refused)
    tell(f"rehearsed {counted(len(found) + len(rentable), 'candidate')}; {len(refused)} cannot be run here")
    shrunk = split_outside(compressors, ";") if isinstance(compressors, str) else list(compressors)
    if shrunk == [AUTO]:
        smaller = worth_compressing(where, found, options)
        found = sorted([*found, *smaller], key=lambda each: -each.images_per_s)
    else:
        smaller = compressed_candidates(found, [each for each in shrunk if each != "none"], refused)
        smaller = [_with_its_cost(where, each, options) for each in smaller]
    tried = [*most_promising([each for each in found if each not in smaller], trials), *smaller]
    common = dict(options)
    if trial_epochs is not None:
        # A schedule that ends with the trial would have its tests flatten before their time.
        common |= {"epochs": trial_epochs, "schedule": options.get("schedule", "constant")}
    asked = as_command(["plan"], {"cluster": cluster, "target": target, **options})
    trainings = Trials(
        strategies=[],
        workers=[],
        seeds=list(range(seeds)),
        grid={},
        options=common,
        simulation={"cluster": str(cluster)},
        until=target,
        cases=[{"strategy": each.strategy, "workers": each.workers, **each.options} for each in tried],
        asked=asked,
    )
    done = carry_out(trainings, out=out, jobs=jobs, tell=tell)
    found += rentable
    of_folder = {run.folder.name: row for row in done.comparison.rows for run in row.runs}
    names = [run.name for run in trainings.runs()]
    rows = [
        next((of_folder[name] for name in names[start : start + seeds] if name in of_folder), None)
        for start in range(0, len(names), seeds)
    ]
    trained = list(zip(tried, rows, strict=True))
    return _ranked(done, trained, found, refused, where_priced, wanted, common)


@dataclass(frozen=True)
class _Wanted:
    """What a plan is for.

    Attributes:
        goal: that is to be reached.
        budget: in the currency of the prices; None: any.
        deadline_s: seconds; None: any.
        optimise: `time` or `money`; None: money where only a deadline is given.
    """

    goal: Target
    budget: float | None
    deadline_s: float | None
    optimise: str | None

    def check(self, clusters: Sequence[Cluster]) -> None:
        """Refuse what cannot be wanted, or not on these clusters.

        Raises:
            RequestError: so it is.
        """
        if self.optimise not in (None, "time", "money"):
            raise RequestError(f"optimise is time or money (given {self.optimise!r})")
        for name, value in (("budget", self.budget), ("deadline", self.deadline_s)):
            if value is not None and not value > 0:
                raise RequestError(f"{name} must be above 0 (given {value:g})")
        priced = any(kind.price_per_hour is not None for where in clusters for kind in where.hosts)
        if not priced and (self.budget is not None or self.optimise == "money"):
            raise RequestError(
                f"cluster {clusters[0].name} has no prices, so nothing is known of money: give its hosts a "
                "price_per_hour"
            )

    @property
    def for_money(self) -> bool:
        """Whether the cheapest is the best; else the fastest."""
        by_default = self.deadline_s is not None and self.budget is None
        return self.optimise == "money" or (self.optimise is None and by_default)

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


def most_promising(found: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the candidates to try: of those that learn alike the fastest; every strategy's fastest come first."""
    fastest: dict[tuple[Any, ...], Candidate] = {}
    for each in found:  # the highest throughput first
        fastest.setdefault(each.learns_as, each)
    of_family: dict[str, Candidate] = {}
    for each in fastest.values():
        of_family.setdefault(each.family, each)
    firsts = list(of_family.values())
    rest = [each for each in fastest.values() if each not in firsts]
    return [*firsts, *rest][: max(count, len(firsts))]


def is_uneven(where: Cluster) -> bool:
    """Whether some hosts or ranks are slower than others."""
    return len({machine.speed for machine in where.machines}) > 1 or bool(where.slow)


def balanced(candidates: Sequence[Candidate], options: Mapping[str, Any]) -> Iterator[Candidate]:
    """Return the candidates again whose workers may have parts of the batch by speed, with such parts."""
    for each in candidates:
        batch = configure({}, {**options, **each.options}).worker_batch
        try:
            balances(Measured(), strategy_from(each.strategy), each.workers, each.workers * batch)
        except RequestError:
            continue
        if each.workers > 1:
            yield replace(each, options={**each.options, "balance": "measured"})


def without_slow_pipelines(found: Sequence[Candidate], refused: dict[str, str]) -> list[Candidate]:
    """Leave out who computes one large batch together, and slower than as many workers each on its own part of it.

    Args:
        found: the highest throughput first.
        refused: receives the reason of those that are left out.
    """
    alone: dict[tuple[Any, ...], Candidate] = {}
    for each in found:
        if parse(each.strategy).name == "synchronous":
            alone.setdefault((each.workers, str(each.options.get("batch_size")), each.machine), each)
    kept = []
    for each in found:
        other = alone.get((each.workers, str(each.options.get("batch_size")), each.machine))
        if each.cuts_network and other is not None and each.images_per_s <= other.images_per_s:
            refused.setdefault(each.name, f"it learns as {other.name}, which is faster")
        else:
            kept.append(each)
    return kept


def worth_compressing(
    where: Cluster, found: Sequence[Candidate], options: Mapping[str, Any]
) -> list[Candidate]:
    """Return, of every strategy whose fastest candidate gains by one of the usual compressors, that one.

    Args:
        where: the cluster.
        found: the highest throughput first.
        options: of the job.
    """
    fastest: dict[str, Candidate] = {}
    for each in found:
        fastest.setdefault(each.family, each)
    gained = []
    for each in fastest.values():
        compressed = compressed_candidates([each], _COMPRESSORS, {}, strict=False)
        costed = [_with_its_cost(where, other, options) for other in rehearse(where, compressed, options, {})]
        rates = [(other.with_compressing(other.images_per_s), other) for other in costed]
        rate, best = max(rates, key=lambda entry: entry[0], default=(0.0, each))
        if rate > _WORTH_IT * each.images_per_s:
            gained.append(replace(best, images_per_s=rate))
    return gained


def _with_its_cost(where: Cluster, candidate: Candidate, options: Mapping[str, Any]) -> Candidate:
    """Return a candidate that knows what compressing takes, measured on this machine; unless values decide it."""
    told = {**options, **candidate.options, "strategy": candidate.strategy, "workers": candidate.workers}
    dry_run, _ = assemble_dry_run(configure({}, told), 1)
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
    """Return the fastest candidate of every strategy with each compressor; trials say how fast they are.

    A rehearsal has no gradients, whose values decide what many compressors send.

    Args:
        found: the highest throughput first.
        compressors: specs.
        refused: receives the reason of every candidate that cannot be compressed so.
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
    done: Compared,
    trained: Sequence[tuple[Candidate, Row | None]],
    found: Sequence[Candidate],
    refused: dict[str, str],
    where: Cluster,
    wanted: _Wanted,
    options: Mapping[str, Any],
) -> Plan:
    assert done.folder is not None
    goal, every = wanted.goal, []
    for each, row in trained:
        if row is None:
            refused.setdefault(each.name, "its trials did not start")
            continue
        every += [_choice(other, row, goal, options) for other in (each, *_elsewhere(each, found))]
    reaching = [each for each in every if math.isfinite(each.seconds[0])]
    if not reaching:
        raise RequestError(_nothing(goal, done))
    for_money = wanted.for_money and any(each.price is not None for each in reaching)

    def cost(choice: Choice) -> tuple[float, float]:
        price = math.inf if choice.price is None else choice.price
        return (price, choice.seconds[0]) if for_money else (choice.seconds[0], price)

    choices, limits = sorted(filter(wanted.allows, reaching), key=cost), wanted.limits(where.currency)
    if not choices:
        raise RequestError(too_little(goal, limits, reaching, where.currency))
    made = Plan(
        folder=done.folder,
        cluster=where.name,
        currency=where.currency,
        target=goal,
        choices=choices,
        others=[each for each in every if each not in choices],
        rehearsed=found,
        pareto=pareto_choices(choices),
        refused=refused,
        for_money=for_money,
        allowed=limits,
    )
    UNCLAIMED.write(done.folder / PLAN_JSON, json.dumps(made.to_json(), indent=2) + "\n")
    return made


def _elsewhere(tried: Candidate, found: Sequence[Candidate]) -> list[Candidate]:
    """Return, of those who learn as one that was tried, the fastest and the cheapest on every other machine."""
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


def _choice(candidate: Candidate, row: Row, goal: Target, options: Mapping[str, Any]) -> Choice:
    each = [_images(run, goal) for run in row.runs]
    reached = [run for run in row.runs if run.test_at(goal) is not None]
    # One trial's own range if it is alone; else from the least to the most that seeds say.
    images = (
        statistics.fmean(middle for middle, _, _ in each),
        min(low for _, low, _ in each),
        max(high for _, _, high in each),
    )
    # Of a rehearsal, it has been taken off already.
    rate = candidate.images_per_s if candidate.machine else candidate.with_compressing(row.mean(throughput))
    if not math.isfinite(rate) or rate <= 0:
        rate = candidate.images_per_s
    if math.isnan(candidate.images_per_s):
        candidate = replace(candidate, images_per_s=rate)
    middle, low, high = (number / rate for number in images)
    if len(reached) == len(row.runs) and not candidate.machine:
        slower = 1 + candidate.compress_s * row.mean(throughput)
        times = [slower * time_to(goal)(run) for run in row.runs]
        middle, low, high = statistics.fmean(times), min(times), max(times)
    hourly = candidate.price_per_hour
    price = None if hourly is None or not math.isfinite(middle) else middle / 3600 * hourly
    told = {
        **options,
        "strategy": candidate.strategy,
        "workers": candidate.workers,
        **candidate.options,
        "until": f"{goal.metric}={goal.value:g}",
    }
    if len(reached) < len(row.runs) and math.isfinite(images[2]):
        seen = max(test.images for run in row.runs for test in run.tests)
        done = max(int(run.known["epochs"]) for run in row.runs)
        told["epochs"] = math.ceil(images[2] / seen * done)
    return Choice(
        candidate=candidate,
        images=images,
        seconds=(middle, low, high),
        price=price,
        reached=len(reached),
        trials=len(row.runs),
        command=as_command(["train"], told),
    )


def _images(run: ComparedRun, goal: Target) -> tuple[float, float, float]:
    """Return the images of a run to the target, and their interval; infinite if it never gets there."""
    if run.test_at(goal) is not None:
        seen = images_of(goal)(run)
        return seen, seen, seen
    if len(run.tests) < FEWEST_TESTS:
        return math.inf, math.inf, math.inf
    at = [float(test.images) for test in run.tests]
    if goal.metric == "loss":
        return images_to(at, [test.event.test_loss for test in run.tests], goal.value)
    tops = [test.event.test_top1 if goal.metric == "top1" else test.event.test_top5 for test in run.tests]
    return images_to(at, [max(1 - top, 1e-6) for top in tops], 1 - goal.value)


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


def _nothing(goal: Target, done: Compared) -> str:
    best = done.comparison.most_accurate()
    top = f": the best was {100 * best.mean(lambda run: run.best()):.1f} % by {best.name}" if best else ""
    return f"nothing reaches {goal}{top}; ask for less, or for more --epochs ({done.folder}/report.html)"


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
    if low == high or write(low) == write(high):
        return write(middle)
    return f"{write(middle)} ({write(low)} to {write(high) if math.isfinite(high) else 'no end'})"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
