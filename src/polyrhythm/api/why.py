"""Why a finished run was slow, and what would help: the verb `why`.

Dry runs are made of the run as it was, and with one thing changed at a time: on the cluster that it was simulated on,
or for a real run on one that its record describes. That has the time of every worker's step, and links with the ratio
of latency and bandwidth that was measured after the run, as fast as makes the dry run as fast as the run.

A possible cause of slowness has the gain of a dry run without it. Causes of a real run have those of its own
measurements (`reporting/held_back.py`), as its summary and report have them. Gains of changes are ratios of dry runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median_low
from typing import Any

import numpy as np
from pydantic import ValidationError

from polyrhythm.api.rehearsal import Candidate, rehearse, with_servers, write_prediction
from polyrhythm.api.simulate import CLUSTER_FILE, at_its_pace, laid_out
from polyrhythm.compression.payoff import Payoff
from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.recipe import ENVIRONMENT_FILE, configure
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.planning.cost_fit import Numbers, fit_costs
from polyrhythm.reporting.comparison import ComparedRun, read_run
from polyrhythm.reporting.event_log import LOG_FILE, read_events
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.held_back import (
    CROWD,
    DECODING,
    INPUT,
    NETWORK,
    READING,
    SERVERS,
    SLOWER,
    TESTS,
    UNEVEN,
    Bottleneck,
    held_back,
    own_parts,
)
from polyrhythm.run_files import check_in_run, read_json_in_run
from polyrhythm.simulation.cluster import Cluster, HostKind, Link, ServerUpdate, open_cluster
from polyrhythm.simulation.step_times.constant import Constant
from polyrhythm.specs import Spec, parse
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.compressing import compressor_of, payoff_of

_OTHERS = ("synchronous", "parameter_server(servers=1)", "local_sgd(steps=8)")
_PLAIN = "no compression"
_CAUSES = (SLOWER, UNEVEN, NETWORK, SERVERS)
_INPUTS = (DECODING, READING, INPUT)
_FREE, _LEAST_FACTOR, _DRAWS = 1e15, 1e-3, 1000
_USUAL = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
_FEWEST_STEPS, _LEAST_STEPS, _STEPS_OF_ALL = 10, 40, 1200
_RECORD = "the run's own record"
_WORTH_TRYING = 0.02
"""Gain of a change from which it is the remedy of a cause."""
_NOT_OF_A_REHEARSAL = ("strategy", "workers", "epochs", "until", "seed", "out")


@dataclass(frozen=True, kw_only=True)
class Change:
    """An alternative setting.

    Attributes:
        what: description.
        images_per_s: simulated throughput with it.
        gain: relative gain over the simulated run without changes: 0.38 is 38 % more images/s.
        caution: effect on more than speed; empty if training results do not change.
        options: options of a run with the change.
    """

    what: str
    images_per_s: float
    gain: float
    caution: str
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A possible cause of slowness.

    Attributes:
        what: description.
        gain: relative gain in images/s without it: 0.38 is 38 % more; 0: unknown.
        remedy: the best change that relieves it, or advice that cannot be simulated; empty if none gains 2 %.
        remedy_gain: gain of that change; 0: unknown.
    """

    what: str
    gain: float
    remedy: str
    remedy_gain: float


@dataclass(frozen=True, kw_only=True)
class Why:
    """The bottleneck of a run, and possible improvements.

    Attributes:
        run: run folder.
        held_back: bottleneck by the run's own figures, as text.
        bottleneck: the first cause in words, with its share of the run's own time; empty without one.
        images_per_s: throughput of the run.
        rehearsed_images_per_s: throughput of its dry run, unchanged; the difference shows the accuracy of the
            simulation.
        changes: changes, the largest gain first.
        refused: changes that cannot be made, with the reason.
        compression: whether it pays, in words; empty where nothing is compressed.
        causes: possible causes of slowness, the one that costs most first.
        cluster: name of the cluster of the dry runs.
        another: whether that is another cluster than the run's own.
        time: shares of the workers' time in words.
    """

    run: str
    held_back: str
    images_per_s: float
    rehearsed_images_per_s: float
    changes: tuple[Change, ...]
    refused: Mapping[str, str]
    compression: str = ""
    bottleneck: str = ""
    causes: tuple[Cause, ...] = ()
    cluster: str = ""
    another: bool = False
    time: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        return asdict(self)


def why(run: str | Path, *, cluster: str | Path | None = None) -> Why:
    """Find out what bound a finished run, and what would help most.

    Args:
        run: run folder.
        cluster: a cluster file or ready cluster; None: the one that it was simulated on, or for a real run the one that
            its own record describes.

    Raises:
        RequestError: there is no such run.
    """
    folder = Path(run)
    read = read_run(folder)
    where, as_it_was, options, config = _as_it_was(read, cluster)
    figures = RunFigures.of(read_events(folder / LOG_FILE))
    part = figures.latest
    rate = float(read.known.get("images_per_s", 0.0)) if part is figures else part.images_per_s
    figures = part
    recorded = cluster is None and not (folder / CLUSTER_FILE).is_file()
    bound = held_back(figures)
    strategy, workers, batch = as_it_was.strategy, as_it_was.workers, config.batch_size
    tried: dict[str, tuple[Candidate, str]] = {}
    relieves: dict[str, tuple[str, ...]] = {}

    def offer(
        what: str, caution: str, spec: str = strategy, *, of: tuple[str, ...] = (), **changed: Any
    ) -> None:
        relieves[what] = of
        tried[what] = Candidate(strategy=spec, family=what, workers=workers, options=changed), caution

    for spec, servers, placement in _servers(strategy, workers):
        offer(f"{servers} server{'s' * (servers != 1)}{placement}", "", spec, of=(SERVERS, NETWORK))
    if str(config.balance) == "off":
        offer("--balance measured", "", of=(SLOWER,), balance="measured")
    offer(
        f"--batch-size {2 * batch}",
        "fewer updates an epoch: more images to the same accuracy",
        of=(SERVERS, NETWORK),
        batch_size=2 * batch,
    )
    plain = _uncompressed(config)
    if plain is not None:
        offer(_PLAIN, "", plain, compress=None)
    if rarer := _rounds_inside(strategy):
        offer(rarer, "averages models inside groups", rarer, of=_CAUSES)
    for other in _OTHERS:
        if parse(other).name != parse(strategy).name:
            offer(
                other, "another strategy learns otherwise: `polyrhythm plan` weighs both", other, of=_CAUSES
            )
    refused: dict[str, str] = {}
    # As many as the run had: before shares are balanced, some steps have equal ones.
    taken = [series.total.steps for series in figures.workers.values()]
    least = max(_LEAST_STEPS, _STEPS_OF_ALL // workers)
    steps = min(least, max(_FEWEST_STEPS, round(sum(taken) / max(1, len(taken)))))
    found = rehearse(where, [as_it_was, *(each for each, _ in tried.values())], options, refused, steps=steps)
    rates = {each.family: each.images_per_s for each in found}
    if strategy not in rates:
        raise RequestError(f"{folder} cannot be simulated: {next(iter(refused.values()))}")
    base = rates[strategy]

    def gain_of(images_per_s: float) -> float:
        return images_per_s / base - 1

    pays = None if plain is None else _payoff(where, config)
    # Dry runs do not include the time to compress, so the run is slower than its dry run by that time.
    images = workers * batch * max(1, strategy_from(strategy).traits(workers).exchange_every)
    slower = 1.0 if pays is None else 1 + pays.compress_s * base / images
    changes = [
        Change(
            what=what,
            images_per_s=rates[what],
            gain=gain_of(rates[what] * (slower if what == _PLAIN else 1.0)),
            caution=caution,
            options={
                **candidate.options,
                **({"strategy": candidate.strategy} if candidate.strategy != strategy else {}),
            },
        )
        for what, (candidate, caution) in tried.items()
        if what in rates
    ]
    if recorded:
        gains = dict(bound.gains) if bound else {}
        if CROWD in gains:
            for each in _one_per_core(read, config, as_it_was, figures, options, steps):
                what = f"--workers {each.workers} (one per core)"
                caution = "another batch of all workers together"
                changes.append(
                    Change(
                        what=what,
                        images_per_s=each.images_per_s,
                        gain=gain_of(each.images_per_s),
                        caution=caution,
                        options={"workers": each.workers},
                    )
                )
                relieves[what] = (CROWD,)
    else:
        gains = {}
        for what, without in _without(where, strategy_from(strategy).traits(workers).servers).items():
            free = rehearse(without, [as_it_was], options, {}, steps=steps)
            gains[what] = gain_of(free[0].images_per_s) if free else 0.0
    causes: list[Cause] = []
    for what, gain in gains.items():
        if what in _INPUTS and bound and (saved := _kept_images(config, figures, bound, gain)):
            changes.append(replace(saved, images_per_s=base * (1 + saved.gain)))
            relieves[saved.what] = _INPUTS
        elif what == TESTS and config.evaluation == "in_place":
            changes.append(
                Change(
                    what="--evaluation async",
                    images_per_s=base * (1 + gain),
                    gain=gain,
                    caution="needs a free core",
                    options={"evaluation": "async"},
                )
            )
            relieves["--evaluation async"] = (TESTS,)
        helping = [
            change for change in changes if what in relieves[change.what] and change.gain >= _WORTH_TRYING
        ]
        remedy = max(helping, key=lambda change: change.gain, default=None)
        advice = bound.remedy if bound and recorded and not causes else ""
        causes.append(
            Cause(
                what=what,
                gain=remedy.gain if recorded and not gain and remedy else gain,
                remedy=remedy.what if remedy else advice,
                remedy_gain=remedy.gain if remedy else 0.0,
            )
        )
    if not recorded:
        causes.sort(key=lambda cause: -cause.gain)
    return Why(
        run=str(folder),
        held_back=bound.text if bound else "",
        bottleneck=(bound.problem if recorded else causes[0].what) if bound and causes else "",
        time=bound.time if bound else "",
        images_per_s=rate,
        rehearsed_images_per_s=base,
        changes=tuple(sorted(changes, key=lambda change: -change.gain)),
        refused=refused,
        compression="" if pays is None else pays.text,
        causes=tuple(causes),
        cluster=where.name,
        another=cluster is not None and Path(cluster).resolve() != (folder / CLUSTER_FILE).resolve(),
    )


def _one_per_core(
    read: ComparedRun,
    config: RunConfig,
    as_it_was: Candidate,
    figures: RunFigures,
    options: Mapping[str, Any],
    steps: int,
) -> list[Candidate]:
    """Return the dry run of as many workers as there are cores, without waits for a core; none without cores."""
    started = figures.started
    count = started.cores - started.servers if started is not None else 0
    if count < 1:
        return []
    where = at_its_pace(recorded_cluster(read, config, cores=count), config)
    slow = {rank: factor for rank, factor in where.slow.items() if rank < count}
    alone = replace(as_it_was, workers=count)
    return rehearse(_changed(where, slow=slow), [alone], options, {}, steps=steps)


def _without(where: Cluster, servers: int) -> dict[str, Cluster]:
    """Return the cluster without each possible cause of slowness.

    Args:
        where: the cluster.
        servers: number of servers.
    """
    speeds = sorted(machine.speed for machine in where.machines)
    usual = speeds[len(speeds) // 2]
    even = tuple(kind.model_copy(update={"speed": max(kind.speed, usual)}) for kind in where.hosts)
    free = Link(latency_s=0.0, bandwidth_bytes_per_s=_FREE)
    unlinked = {"nic": None, "inside": None, "tree": ()}
    generator = Random(0)
    mean_s = sum(where.step_time.draw(generator) for _ in range(_DRAWS)) / _DRAWS
    found = {
        SLOWER: _changed(
            where,
            hosts=even,
            slow={rank: min(factor, 1.0) for rank, factor in where.slow.items()},
            passing_slowness=(),
        ),
        UNEVEN: _changed(where, step_time=Constant(seconds=mean_s), shared_slowness=None),
        NETWORK: _changed(
            where,
            hosts=tuple(kind.model_copy(update=unlinked) for kind in where.hosts),
            nic=free,
            inside=free,
            racks=None,
        ),
    }
    if servers:
        idle = tuple(kind.model_copy(update={"server_takes": 0.0}) for kind in where.hosts)
        found[SERVERS] = _changed(where, hosts=idle, server_update=None, server_bandwidth_bytes_per_s=None)
    return found


def _changed(where: Cluster, **changed: Any) -> Cluster:
    # Not `model_copy`, which would copy the list of its machines.
    return Cluster(**{**{name: getattr(where, name) for name in Cluster.model_fields}, **changed})


def _kept_images(config: RunConfig, figures: RunFigures, bound: Bottleneck, gain: float) -> Change | None:
    """Return the change that keeps decoded images, so that only the first epoch waits for them.

    Files hold images of training and tests, memory those of training only.

    Returns:
        None where they are kept, or the images are none that are decoded from files.

    Args:
        config: configuration of the run.
        figures: statistics of the run.
        bound: bottleneck of the run.
        gain: gain of a run without any wait for images.
    """
    if config.decoded is not None or (config.cache != "none" and not figures.cache):
        return None
    if config.cache != "none":
        return Change(
            what="--decoded FOLDER",
            images_per_s=0.0,
            gain=gain,
            caution="of later runs; takes disk space",
            options={},
        )
    epochs = config.epochs or 1
    later = min(1.0, 1 / (1 + gain) + bound.tested_images_share)
    after = epochs / (1 + (epochs - 1) * later) - 1
    return Change(
        what="--cache auto", images_per_s=0.0, gain=after, caution="takes memory", options={"cache": "auto"}
    )


def _measured_link(folder: Path) -> Link | None:
    """Return the link that was measured after a run; None where none was."""
    try:
        return Link.model_validate(_environment(folder).get("link"))
    except ValidationError:
        return None


def _environment(folder: Path) -> dict[str, Any]:
    try:
        read = read_json_in_run(folder / ENVIRONMENT_FILE)
    except (OSError, ValueError, RequestError):
        return {}
    return read if isinstance(read, dict) else {}


def _times(link: Link, faster: float) -> Link:
    return Link(
        latency_s=link.latency_s / faster,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * faster,
    )


def recorded_cluster(read: ComparedRun, config: RunConfig, *, cores: int = 0) -> Cluster:
    """Return the cluster that a real run's own record describes: the step time of every worker, and equal links.

    Updates on servers take what they took, in proportion to their bytes. Links are as fast as makes a dry run as fast
    as the run. Where servers are the bottleneck its speed does not depend on links, so both are fitted by one factor.

    Args:
        read: record of the run.
        config: configuration of the run.
        cores: number of workers with a core each; 0: as in the run. They wait for no core but those of other programs,
            nor for workers that do: a step takes the slowest worker's own time and that of an exchange which all have
            reached. As many tests as in the run are spread over more steps.

    Raises:
        RequestError: the record has no steps.
    """
    figures = RunFigures.of(read_events(read.folder / LOG_FILE)).latest
    totals = {
        worker: series.total
        for worker, series in figures.workers.items()
        if series.total.steps and worker < config.workers
    }
    if not totals:
        raise RequestError(
            f"{read.folder} has no record of its steps: write its machines down with `polyrhythm profile`, and give "
            "--cluster profile.yaml"
        )
    step_s = {worker: (total.seconds - total.wait_s) / total.steps for worker, total in totals.items()}
    seconds = max(total.seconds for total in totals.values())
    least_s = min(total.wait_s / total.steps for total in totals.values())
    if cores:
        spread, own = 1 - cores / config.workers, own_parts(figures)
        exchanges_s = [(each.exchange_s - each.exchange_processor_s) / each.steps for each in totals.values()]
        least_s = fmean(exchanges_s) or least_s
        longer = _longer_by_others(figures, cores)
        for worker, total in totals.items():
            saved_s = own[worker]["processor"] + spread * own[worker]["tests"]
            step_s[worker] = longer * (step_s[worker] - saved_s / total.steps)
        least_s *= longer
        seconds = max(total.steps for total in totals.values()) * (max(step_s.values()) + least_s)
    least_s = max(1e-6, least_s)
    usual_s = max(median_low(step_s.values()), 1e-9)  # of two workers the faster one
    strategy = str(config.strategy)
    servers = strategy_from(strategy).traits(config.workers).servers
    count = config.workers
    shape = _measured_link(read.folder) or _USUAL
    moved = float(read.known.get("bytes_sent_per_step", 0.0) or 0.0)
    slower = least_s / (shape.latency_s + moved / shape.bandwidth_bytes_per_s)  # a first guess
    steps = sum(total.steps for total in totals.values()) / len(totals)
    loads = [load for load in figures.server_loads.values() if load.gradients]
    updated_bytes_per_s = 0.0
    if loads:
        served_s = max(load.busy_s for load in loads) / steps
        slower = max(1.0, slower * (1 - served_s / least_s))
        gradient_s = max(load.busy_s / load.gradients for load in loads)
        updated_bytes_per_s = assemble_dry_run(config, 1)[0].sizes.nbytes / servers / max(gradient_s, 1e-9)
    shape = _times(shape, 1 / slower)

    def linked(cost: float) -> Cluster:
        link = _times(shape, 1 / cost)
        update = ServerUpdate(bandwidth_bytes_per_s=updated_bytes_per_s / cost) if loads else None
        return Cluster(
            name=_RECORD,
            hosts=(
                HostKind(name="host", count=1, cores=count + servers + 1, workers=count, server_takes=0.0),
            ),
            nic=link,
            inside=link,
            server_update=update,
            step_time=Constant(seconds=usual_s),
            slow={worker: max(each_s / usual_s, _LEAST_FACTOR) for worker, each_s in step_s.items()},
        )

    target_s = seconds / (
        sum(total.steps for total in totals.values()) * config.worker_batch
    )  # of full batches
    if count == 1:
        return linked(1.0)
    as_it_was = Candidate(strategy=strategy, family=strategy, workers=count, options={})
    options = {key: value for key, value in read.config.items() if value is not None}
    options = {key: value for key, value in options.items() if key not in _NOT_OF_A_REHEARSAL}

    def simulated(row: int, costs: Numbers) -> float:
        found = rehearse(linked(float(costs[0])), [as_it_was], options, {})
        return 1 / found[0].images_per_s if found else target_s

    fitted = fit_costs(simulated, [target_s], np.ones((1, 1), dtype=bool))
    return linked(float(fitted.costs[0]))


def _longer_by_others(figures: RunFigures, workers: int) -> float:
    """Return the factor of the time on cores that other programs make of it, if as many workers as cores run.

    A core's time is shared evenly by all that can run: of `n` workers, each `c` of a step on a core and `d` waiting for
    one, and `E` other programs. A step takes `T`.

        c / (c + d) = cores / (n (c + d) / T + E)
    """
    started, totals = figures.started, [series.total for series in figures.workers.values()]
    own = own_parts(figures)
    waited_s = sum(parts["processor"] for parts in own.values())
    waited_s += sum(each.exchange_processor_s for each in totals)
    ran_s = sum(parts["computing"] + parts["tests"] for parts in own.values())
    ran_s += sum(each.exchange_s - each.exchange_processor_s for each in totals)
    seconds = sum(each.seconds for each in totals) / len(totals)
    if started is None or not ran_s:
        return 1.0
    others = (waited_s + ran_s) * (started.cores / ran_s - 1 / seconds)
    return max(1.0, (workers + started.servers + others) / started.cores)


def _uncompressed(config: RunConfig) -> str | None:
    """Return the spec of a run's strategy without compression; None where nothing is compressed."""
    if compressor_of(strategy_from(config.strategy, config.compress)) is None:
        return None
    given = parse(str(config.strategy))
    return str(Spec(given.name, {key: value for key, value in given.arguments.items() if key != "compress"}))


def _payoff(where: Cluster, config: RunConfig) -> Payoff | None:
    dry_run, _ = assemble_dry_run(config, 1)
    link = laid_out(where, dry_run).slowest_link_bytes_per_s
    return payoff_of(dry_run.strategy, dry_run.sizes.shapes, dry_run.sizes.dtype, config.workers, link)


def _as_it_was(
    read: ComparedRun, cluster: str | Path | None
) -> tuple[Cluster, Candidate, dict[str, Any], RunConfig]:
    """Return the cluster of a run's dry run, the unchanged run, its other options, and its configuration."""
    file = read.folder / CLUSTER_FILE
    if cluster is None and file.is_file():
        check_in_run(file)
    given = {key: value for key, value in read.config.items() if value is not None}
    config = configure({}, given)
    if cluster is None and not file.is_file():
        described = recorded_cluster(read, config)
    else:
        described = open_cluster(file if cluster is None else cluster)
    where = at_its_pace(described, config)
    options = {key: value for key, value in given.items() if key not in _NOT_OF_A_REHEARSAL}
    strategy = str(config.strategy)
    return (
        where,
        Candidate(strategy=strategy, family=strategy, workers=config.workers, options={}),
        options,
        config,
    )


def predict_run(run: str | Path, cluster: str | Path) -> Path:
    """Simulate a run without changes, and write the prediction next to its events, for its report.

    Args:
        run: run folder.
        cluster: a cluster file or ready cluster, of the machines that it ran on.

    Returns:
        The file.

    Raises:
        RequestError: there is no such run or cluster, or the run cannot be simulated on it.
    """
    folder = Path(run)
    where, as_it_was, options, _ = _as_it_was(read_run(folder), cluster)
    refused: dict[str, str] = {}
    found = rehearse(where, [as_it_was], options, refused)
    if not found:
        raise RequestError(f"{folder} cannot be simulated: {next(iter(refused.values()))}")
    return write_prediction(folder, where.name, found[0])


def _rounds_inside(strategy: str) -> str:
    """Return the strategy with local steps inside its groups; empty where it has no groups that are synchronous."""
    given, inside = parse(strategy), getattr(strategy_from(strategy), "inside", None)
    if not isinstance(inside, Synchronous) or "replicas" not in type(strategy_from(strategy)).model_fields:
        return ""
    return str(Spec(given.name, {**given.arguments, "inside": parse("local_sgd(steps=8)")}))


def _servers(strategy: str, workers: int) -> list[tuple[str, int, str]]:
    """Return the strategy with other numbers and places of servers, where it has any."""
    given = parse(strategy)
    now = strategy_from(strategy).traits(workers).servers
    bare = {key: value for key, value in given.arguments.items() if key not in ("servers", "placement")}
    found = []
    for spec in with_servers(str(Spec(given.name, bare)), workers) if now else []:
        arguments = parse(spec).arguments
        servers = int(arguments.get("servers", now))
        place = str(arguments.get("placement", "shared"))
        if (servers, place) != (now, str(given.arguments.get("placement", "shared"))):
            found.append((spec, servers, " on hosts of their own" if place == "dedicated" else ""))
    return found
