"""Why a finished run was slow, and what would help: the verb `why`.

Dry runs are made of the run as it was, without each possible cause of slowness, and with one thing changed at a time:
on the cluster that it was simulated on, or for a real run on the machine that its record describes. That has the time
of every worker's step, and the link that was measured after the run, or where none was, one of the bandwidth with which
the dry run is as fast as the run. Gains are ratios of dry runs.

    step of a worker = computing + for the processor + for batches + tests      each shared out per step

A dry run without one of these has steps that are shorter by as much. A dry run over a measured link that is faster than
the run itself has its own cause: messages took longer than the link, since processors were busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
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
from polyrhythm.reporting.figures import RunFigures, as_one_run
from polyrhythm.reporting.held_back import held_back
from polyrhythm.run_files import check_in_run, read_json_in_run
from polyrhythm.simulation.cluster import Cluster, HostKind, Link, open_cluster
from polyrhythm.simulation.step_times.constant import Constant
from polyrhythm.specs import Spec, parse
from polyrhythm.strategies.compressing import compressor_of, payoff_of

_OTHERS = ("synchronous", "parameter_server(servers=1)", "local_sgd(steps=8)")
_PLAIN = "no compression"
_SLOWER, _UNEVEN = "slower workers", "steps of unequal length"
_NETWORK, _SERVERS = "the network", "the servers"
_CAUSES = (_SLOWER, _UNEVEN, _NETWORK, _SERVERS)
_PROCESSOR, _INPUT = "other processes on the same cores", "batches that are not ready in time"
_TESTS = "tests"
_UNEXPLAINED = "messages beyond the measured link's time"
_FREE, _LATENCY_S, _LEAST_FACTOR, _DRAWS = 1e15, 1e-5, 1e-3, 1000
_LEAST_STEPS, _STEPS_OF_ALL = 40, 1200
_RECORD, _MEASURED = "the run's own record", "the run's machine, as it was measured"
_NOT_OF_A_REHEARSAL = ("strategy", "workers", "epochs", "until", "seed", "out")


@dataclass(frozen=True, kw_only=True)
class Change:
    """An alternative setting.

    Attributes:
        what: description.
        images_per_s: simulated throughput with it.
        gain: relative gain over the simulated run as it was: 0.38 is 38 % more images/s.
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
        gain: images/s of a dry run without it, over the dry run of the run as it was: 0.38 is 38 % more.
        remedy: the best change that relieves it; empty if none gains.
        remedy_gain: gain of that change.
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
        images_per_s: throughput of the run.
        rehearsed_images_per_s: throughput of its dry run, unchanged; the difference shows the accuracy of the
            simulation.
        changes: changes, the largest gain first.
        refused: changes that cannot be made, with the reason.
        compression: whether it pays, in words; empty where nothing is compressed.
        causes: possible causes of slowness, the largest gain first.
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
        RequestError: there is no such run, or it was on several hosts and no cluster is given.
    """
    folder = Path(run)
    read = read_run(folder)
    where, as_it_was, options, config = _as_it_was(read, cluster)
    figures = RunFigures.of(as_one_run(read_events(folder / LOG_FILE)))
    recorded = cluster is None and not (folder / CLUSTER_FILE).is_file()
    costs = _costs_of_steps(figures) if recorded else {}
    strategy, workers, batch = as_it_was.strategy, as_it_was.workers, config.batch_size
    tried: dict[str, tuple[Candidate, str]] = {}
    relieves: dict[str, tuple[str, ...]] = {}

    def offer(
        what: str, caution: str, spec: str = strategy, *, of: tuple[str, ...] = (), **changed: Any
    ) -> None:
        relieves[what] = of
        tried[what] = Candidate(strategy=spec, family=what, workers=workers, options=changed), caution

    for spec, servers, placement in _servers(strategy, workers):
        offer(f"{servers} server{'s' * (servers != 1)}{placement}", "", spec, of=(_SERVERS, _NETWORK))
    if str(config.balance) == "off":
        offer("--balance measured", "", of=(_SLOWER,), balance="measured")
    offer(
        f"--batch-size {2 * batch}",
        "fewer updates an epoch: more images to the same accuracy",
        of=(_SERVERS, _NETWORK),
        batch_size=2 * batch,
    )
    plain = _uncompressed(config)
    if plain is not None:
        offer(_PLAIN, "", plain, compress=None)
    for other in _OTHERS:
        if parse(other).name != parse(strategy).name:
            offer(
                other, "another strategy learns otherwise: `polyrhythm plan` weighs both", other, of=_CAUSES
            )
    refused: dict[str, str] = {}
    steps = max(
        _LEAST_STEPS, _STEPS_OF_ALL // workers
    )  # the first ones, before shares are balanced, count little
    found = rehearse(where, [as_it_was, *(each for each, _ in tried.values())], options, refused, steps=steps)
    rates = {each.family: each.images_per_s for each in found}
    if strategy not in rates:
        raise RequestError(f"{folder} cannot be simulated: {next(iter(refused.values()))}")
    base = rates[strategy]
    pays = None if plain is None else _payoff(where, config)
    # Dry runs do not include the time to compress, so the run is slower than its dry run by that time.
    images = workers * batch * max(1, strategy_from(strategy).traits(workers).exchange_every)
    slower = 1.0 if pays is None else 1 + pays.compress_s * base / images
    changes = [
        Change(
            what=what,
            images_per_s=rates[what],
            gain=rates[what] / base * (slower if what == _PLAIN else 1.0) - 1,
            caution=caution,
            options={
                **candidate.options,
                **({"strategy": candidate.strategy} if candidate.strategy != strategy else {}),
            },
        )
        for what, (candidate, caution) in tried.items()
        if what in rates
    ]
    causes = []
    servers = strategy_from(strategy).traits(workers).servers
    for what, without in {**_without(where, servers), **_with_shorter_steps(where, costs)}.items():
        free = rehearse(without, [as_it_was], options, {}, steps=steps)
        gain = free[0].images_per_s / base - 1 if free else 0.0
        if what == _PROCESSOR and (cores := _cores(folder)) and 0 < cores - servers < workers:
            kept = {rank: factor for rank, factor in without.slow.items() if rank < cores - servers}
            alone = replace(as_it_was, workers=cores - servers)
            fewer = rehearse(_changed(without, slow=kept), [alone], options, {}, steps=steps)
            for each in fewer:
                changes.append(
                    Change(
                        what=f"--workers {each.workers} (one per core)",
                        images_per_s=each.images_per_s,
                        gain=each.images_per_s / base - 1,
                        caution="another batch of all workers together",
                        options={"workers": each.workers},
                    )
                )
                relieves[changes[-1].what] = (_PROCESSOR,)
        helping = [change for change in changes if what in relieves[change.what] and change.gain > 0]
        remedy = max(helping, key=lambda change: change.gain, default=None)
        causes.append(
            Cause(
                what=what,
                gain=gain,
                remedy=remedy.what if remedy else "",
                remedy_gain=remedy.gain if remedy else 0.0,
            )
        )
    rate = float(read.known.get("images_per_s", 0.0))
    if recorded and where.name == _MEASURED and rate > 0 and figures.together is not None:
        total = figures.together.total  # its last batches may be smaller than those of dry runs
        full_rate = rate * total.steps * config.worker_batch / max(total.images, 1)
        causes.append(Cause(what=_UNEXPLAINED, gain=base / full_rate - 1, remedy="", remedy_gain=0.0))
    bound = held_back(figures)
    return Why(
        run=str(folder),
        held_back=bound.text if bound else "",
        time=bound.time if bound else "",
        images_per_s=rate,
        rehearsed_images_per_s=base,
        changes=tuple(sorted(changes, key=lambda change: -change.gain)),
        refused=refused,
        compression="" if pays is None else pays.text,
        causes=tuple(sorted(causes, key=lambda cause: -cause.gain)),
        cluster=where.name,
        another=cluster is not None and Path(cluster).resolve() != (folder / CLUSTER_FILE).resolve(),
    )


def _without(where: Cluster, servers: int) -> dict[str, Cluster]:
    """Return the cluster without each possible cause of slowness."""
    speeds = sorted(machine.speed for machine in where.machines)
    usual = speeds[len(speeds) // 2]
    even = tuple(kind.model_copy(update={"speed": max(kind.speed, usual)}) for kind in where.hosts)
    free = Link(latency_s=0.0, bandwidth_bytes_per_s=_FREE)
    unlinked = {"nic": None, "inside": None, "tree": ()}
    generator = Random(0)
    mean_s = sum(where.step_time.draw(generator) for _ in range(_DRAWS)) / _DRAWS
    found = {
        _SLOWER: _changed(
            where,
            hosts=even,
            slow={rank: min(factor, 1.0) for rank, factor in where.slow.items()},
            passing_slowness=(),
        ),
        _UNEVEN: _changed(where, step_time=Constant(seconds=mean_s), shared_slowness=None),
        _NETWORK: _changed(
            where,
            hosts=tuple(kind.model_copy(update=unlinked) for kind in where.hosts),
            nic=free,
            inside=free,
            racks=None,
        ),
    }
    if servers:
        idle = tuple(kind.model_copy(update={"server_takes": 0.0}) for kind in where.hosts)
        found[_SERVERS] = _changed(where, hosts=idle, server_update=None, server_bandwidth_bytes_per_s=None)
    return found


def _changed(where: Cluster, **changed: Any) -> Cluster:
    # Not `model_copy`, which would copy the list of its machines.
    return Cluster(**{**{name: getattr(where, name) for name in Cluster.model_fields}, **changed})


def _costs_of_steps(figures: RunFigures) -> dict[str, dict[int, float]]:
    """Return which share of every worker's own part of a step each cause takes that no cluster has, by cause."""
    found: dict[str, dict[int, float]] = {_TESTS: {}, _INPUT: {}, _PROCESSOR: {}}
    waited_s = {each.worker: each.seconds["data"] for each in figures.timings.of_workers()}
    for worker, series in figures.workers.items():
        total = series.total
        own_s = total.seconds - total.wait_s
        left_s = own_s
        for what, most_s in (
            (_TESTS, figures.testing_s),
            (_INPUT, waited_s.get(worker, 0.0)),
            (_PROCESSOR, total.processor_s),
        ):
            took_s = min(left_s, most_s)
            left_s -= took_s
            found[what][worker] = took_s / own_s if own_s > 0 else 0.0
    return {what: shares for what, shares in found.items() if any(shares.values())}


def _with_shorter_steps(where: Cluster, costs: Mapping[str, Mapping[int, float]]) -> dict[str, Cluster]:
    """Return the cluster of a run's own record without each cause that takes a share of the workers' steps."""
    return {
        what: _changed(
            where,
            slow={
                rank: max(factor * (1 - shares.get(rank, 0.0)), _LEAST_FACTOR)
                for rank, factor in where.slow.items()
            },
        )
        for what, shares in costs.items()
    }


def _cores(folder: Path) -> int | None:
    """Return the number of cores of a run's processes, from its record."""
    cores = _environment(folder).get("cores")
    return cores if isinstance(cores, int) else None


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


def recorded_cluster(read: ComparedRun, config: RunConfig) -> Cluster:
    """Return the cluster that a real run's own record describes: one host, its link, and the step time of every worker.

    Where no link was measured, it has the bandwidth with which a dry run is as fast as the run was.

    Raises:
        RequestError: the record has no steps, or is of several hosts.
    """
    figures = RunFigures.of(as_one_run(read_events(read.folder / LOG_FILE)))
    totals = {worker: series.total for worker, series in figures.workers.items() if series.total.steps}
    hosts = int(read.known.get("hosts", 1) or 1)
    if not totals or hosts > 1:
        why_not = "has no record of its steps" if not totals else f"was a real run on {hosts} hosts"
        raise RequestError(
            f"{read.folder} {why_not}: write its machines down with `polyrhythm profile`, and give --cluster "
            "profile.yaml"
        )
    step_s = {worker: (total.seconds - total.wait_s) / total.steps for worker, total in totals.items()}
    usual_s = max(median(step_s.values()), 1e-9)
    servers = strategy_from(str(config.strategy)).traits(config.workers).servers
    link = _measured_link(read.folder)
    free = Link(latency_s=_LATENCY_S, bandwidth_bytes_per_s=_FREE)
    where = Cluster(
        name=_RECORD if link is None else _MEASURED,
        hosts=(
            HostKind(
                name="host",
                count=1,
                cores=config.workers + servers + 1,
                workers=config.workers,
                server_takes=0.0,
            ),
        ),
        nic=free if link is None else link,
        inside=free if link is None else link,
        step_time=Constant(seconds=usual_s),
        slow={worker: max(each_s / usual_s, _LEAST_FACTOR) for worker, each_s in step_s.items()},
    )
    rate = float(read.known.get("images_per_s", 0.0))
    if link is not None or config.workers == 1 or not rate > 0:
        return where
    least_s = max(1e-6, min(total.wait_s / total.steps for total in totals.values()))
    moved = float(read.known.get("bytes_sent_per_step", 0.0) or 0.0)
    guess = max(moved, 1.0) / least_s
    strategy = str(config.strategy)
    as_it_was = Candidate(strategy=strategy, family=strategy, workers=config.workers, options={})
    options = {key: value for key, value in read.config.items() if value is not None}
    options = {key: value for key, value in options.items() if key not in _NOT_OF_A_REHEARSAL}

    def linked(cost: float) -> Cluster:
        return _changed(where, inside=Link(latency_s=_LATENCY_S, bandwidth_bytes_per_s=guess / cost))

    def seconds(row: int, costs: Numbers) -> float:
        found = rehearse(linked(float(costs[0])), [as_it_was], options, {})
        return 1 / found[0].images_per_s if found else 1 / rate

    fitted = fit_costs(seconds, [1 / rate], np.ones((1, 1), dtype=bool))
    return linked(float(fitted.costs[0]))


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
    """Return the cluster of a run's dry run, the run as it was, its other options, and its configuration."""
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
    """Simulate a run as it was, and write the prediction next to its events, for its report.

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
