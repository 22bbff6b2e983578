"""The bottleneck of a run: the cause that costs most by the run's own measurements, and its remedy.

    gain of a cause  =  1 / (1 - s) - 1        s: share of the run's length that it costs

Computing is no cause: a run is bound by it where no cause would gain a tenth, however large the share of computing
is. Workers that wait for each other take as long for a step as the slowest one, and the cost of a cause is the time of
the step less what it would be without:

    step of N workers in lockstep   T = M + U + x      M: the largest mean of a worker's own part of a step
                                                       x: exchange; U: unequal lengths, the rest of T
    without a slow worker           T - (its own computing - the median of all)
    without unequal lengths         T - U
    without the exchange            T - x
    without waits of k a step       T - (M - M of the own parts less k) - min(U, (N - 1) k)     for batches, for cores

A rare wait of one worker is a wait of all others, hence N - 1. Exchanges on busy cores take longer as well: k has the
part of x for which the last worker's thread waits for a core. A thread that looks for messages of slower workers waits
for a core without loss. Decoders that had a core for a share of the time in which workers waited for them took the core
of a step for that share of its waits for one, and with decoding these end as well.

    the run's length = computing + waiting + nothing left to do
    waiting          = for the processor + for slower workers + for other stages + for servers + for the network
                       + for batches + while the model is tested

All shares are of the run's length, over all workers, and add up to 1. What each is taken from:

- The processor: time for which a worker's thread was ready but not running, with more processes than cores.
- Tests: from the last report of any worker's step to the event of the test, where steps follow, without the time for
  which the worker that tests longest waited for images.
- Batches: the time until each is there, if it is not gathered in memory alone, and the images of tests. Images are
  decoded if the process computed for a fifth of that time, and read if it did not.
- Other stages of a pipeline: what its workers waited inside their passes.
- Slower workers, with servers: time for which servers have held gradients until others' arrived. Where workers wait
  for each other without servers, the last one waits for the network only: low waits of single steps are taken to be the
  cost of everyone's exchange (where unknown, the least mean of a worker), and the rest of the waiting to be for slower
  workers.
- Servers: their time for the messages of steps. The network is the rest, with the time that messages queue.

The estimated cost of synchronous training for an asynchronous run with servers, by the run's own measurements:

    N gradients, asynchronous      N / sum of the workers' steps per second
    N gradients in lockstep        c + max(N (b - u) + u, w - (N - 1) u)

c: the slowest worker's mean computing time of a step. b: the busiest server's time for a gradient, u of it
spent making the update. w: the least time that a worker waited for a step. Lockstep moves as many gradients
and answers, and makes one update of them all in place of N. Steps of unequal length make c longer than the
mean that is known, so lockstep would rather have taken longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import harmonic_mean, median_low
from typing import TYPE_CHECKING

from polyrhythm.errors import RequestError
from polyrhythm.reporting.quantities import percent, significant
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES

if TYPE_CHECKING:
    from polyrhythm.reporting.figures import RunFigures, Stretch
    from polyrhythm.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class LockStep:
    """Seconds per gradient of every worker, asynchronous and synchronous; `update_s` of the busiest server."""

    free_running_s: float
    lock_step_s: float
    update_s: float
    text: str


def lock_step(figures: RunFigures, totals: dict[int, Stretch]) -> LockStep | None:
    """Return the comparison; None where workers are synchronous, or without servers, or with one worker.

    It is a lower bound of what lockstep would take. So a run that took longer is compared with nothing.
    """
    loads = [load for load in figures.server_loads.values() if load.gradients]
    count = len(totals)
    if count < 2 or not loads or not figures.staleness.mean > 0:
        return None
    free_s = count / sum(total.steps / total.seconds for total in totals.values())
    computing_s = max((total.seconds - total.wait_s) / total.steps for total in totals.values())
    waiting_s = min(total.wait_s / total.steps for total in totals.values())
    busiest = max(loads, key=lambda load: load.busy_s / load.gradients)
    busy_s, update_s = (
        busiest.busy_s / busiest.gradients,
        min(busiest.updating_s, busiest.busy_s) / busiest.gradients,
    )
    exchange_s = max(count * (busy_s - update_s) + update_s, waiting_s - (count - 1) * update_s)
    together_s = computing_s + exchange_s
    if free_s > together_s:
        return None
    return LockStep(
        free_running_s=free_s,
        lock_step_s=together_s,
        update_s=update_s,
        text=f"{significant(free_s)} s for a gradient of every worker; synchronous training would take about "
        f"{significant(together_s)} s or more",
    )


COMPUTING = "computing"
"""Name of the bottleneck of a run that has none."""
_WORTH_NAMING = 0.1
"""Gain from which a cause is named as what held the run back."""
_LEAST_LEFT = 0.001
_WORTH_SAYING = 0.01
"""Minimum share of the time for minor causes to be mentioned by name."""
_SHOWN = 0.0005
"""Share of the time that is written as more than nothing."""
_BUSY = 0.6
"""Share of its time from which a server is taken to be the bottleneck, and not the links to it."""


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The bottleneck of a run: shares of the run's length over all workers, and of the busiest server's time.

    Attributes:
        bottleneck: name as a noun phrase: `the network`.
        problem: a sentence; its share of the time stands in `time`.
        remedy: options that would relieve it; empty without a bottleneck.
        time: shares of the workers' time in words; they sum to 100 %.
        text: problem, remedy, gain, and the comparison with synchronous training, in a line.
        cause: `compute`, `processor`, `stragglers`, `lock-step waiting`, `stages`, `servers`, `network`, `tests`,
            `input` or `nothing left`.
        gain: images/s that would be gained without the cause, as a share; 0 for `compute`, and for more processes or
            threads than cores: their remedy leaves as many cores.
        gains: the same of every possible cause, by its kind; the cause that costs most first.
        remedy_gain: gain of shares by speed in the same run where these are the remedy; else `gain`, which no remedy
            exceeds.
        exchange_share: share of time spent waiting for servers and for the network.
        server_share: part of `exchange_share` spent waiting for servers.
        network_share: part of `exchange_share` spent waiting for the network.
        stage_share: share of time spent waiting for other stages of a pipeline.
        processor_share: share of time spent waiting for a processor.
        testing_share: share of time in which the model was tested and no worker took steps.
        input_share: share of time spent waiting for batches and images of tests; 0 where it was not measured.
        tested_images_share: part of `input_share` spent waiting for images of tests.
        nothing_left_share: share of the time after a worker's last step, while others still had steps to take.
        server_queue: messages in a row that the busiest server found waiting; 0 without servers.
        lock_step: comparison with synchronous training; None: not applicable.
    """

    bottleneck: str
    problem: str
    remedy: str
    time: str
    cause: str
    compute_share: float
    slower_workers_share: float
    exchange_share: float
    servers_busy_share: float
    server_queue: float
    lock_step: LockStep | None
    text: str
    nothing_left_share: float = 0.0
    server_share: float = 0.0
    network_share: float = 0.0
    stage_share: float = 0.0
    processor_share: float = 0.0
    testing_share: float = 0.0
    input_share: float = 0.0
    tested_images_share: float = 0.0
    gain: float = 0.0
    gains: Mapping[str, float] = field(default_factory=dict)
    remedy_gain: float = 0.0


@dataclass(frozen=True)
class _Cause:
    """A cause: as `Bottleneck` has it, and its kind, which does not depend on the run."""

    cause: str
    kind: str
    name: str
    problem: str
    remedy: str


_OWN_COSTS = ("tests", "input", "processor")
"""Causes inside a worker's own part of its steps, which is the rest of its waits for others."""
_TESTED = "images of tests"
"""Part of an own part that belongs to `input`, and is as long on all workers."""
_DECODERS = "cores of decoders"
"""Part of an own part that belongs to `input` as well: waits for a core that decoders have."""
_PARTS_OF = {"tests": ("tests",), "input": ("input", _TESTED, _DECODERS), "processor": ("processor",)}


def own_parts(figures: RunFigures) -> dict[int, dict[str, float]]:
    """Return the seconds of every worker's own part of its steps, by causes, the parts of `input`, and `computing`."""
    tested_s = min(
        figures.testing_s, max((each.testing_s for each in figures.input_waits.values()), default=0.0)
    )
    waited_s = {worker: each.seconds for worker, each in figures.input_waits.items()} or {
        each.worker: each.seconds["data"] for each in figures.timings.of_workers()
    }
    decoders = _decoders_share(figures)
    found = {}
    for worker, series in figures.workers.items():
        total = series.total
        if not (total.steps and total.seconds > 0):
            continue
        own_s = left_s = max(0.0, total.seconds - total.wait_s)
        parts = {}
        for name, most_s in (
            ("tests", figures.testing_s - tested_s),
            (_TESTED, tested_s),
            ("input", waited_s.get(worker, 0.0)),
            ("processor", total.processor_s),
        ):
            if name == "processor" and own_s > 0:  # tests wait for cores as well, and are counted already
                most_s *= left_s / own_s
            parts[name] = min(left_s, most_s)
            left_s -= parts[name]
        parts[_DECODERS] = parts["processor"] * decoders
        parts["processor"] -= parts[_DECODERS]
        found[worker] = {**parts, "computing": left_s}
    return found


def _costs_in_lockstep(
    totals: dict[int, Stretch], own: dict[int, dict[str, float]], slower: float, seconds: float
) -> dict[str, float]:
    """Return the shares of a run's length that workers cost which wait for each other, as the module has it.

    Args:
        totals: statistics of each worker.
        own: parts of each worker's own time.
        slower: share of all waiting for slower workers.
        seconds: length of the run, of all workers together.
    """
    step_s = seconds / _steps(totals)
    parts = {
        worker: {name: value / totals[worker].steps for name, value in each.items()}
        for worker, each in own.items()
    }
    of_all = {worker: sum(each.values()) for worker, each in parts.items()}
    slowest_s = max(of_all.values())
    mean_s = sum(of_all[worker] * totals[worker].steps for worker in totals) / _steps(totals)
    unequal_s = max(0.0, slower * step_s - (slowest_s - mean_s))
    costs, left_s = {}, unequal_s
    for name in _OWN_COSTS:
        without_s = max(
            of_all[worker] - sum(each[part] for part in _PARTS_OF[name]) for worker, each in parts.items()
        )
        costs[name] = slowest_s - without_s
        if name != "tests":
            rare = ("input", _DECODERS) if name == "input" else (name,)
            mean_cost_s = sum(each[part] for each in parts.values() for part in rare) / len(parts)
            spread_s = min(left_s, (len(parts) - 1) * mean_cost_s)
            costs[name] += spread_s
            left_s -= spread_s
    computing = [each["computing"] for each in parts.values()]
    costs["stragglers"] = max(computing) - median_low(computing)
    costs["unequal"] = left_s
    return {name: min(1.0, cost_s / step_s) for name, cost_s in costs.items()}


def _costs_in_groups(
    groups: list[dict[int, Stretch]], own: dict[int, dict[str, float]], slower_s: list[float], seconds: float
) -> dict[str, float]:
    """Return the same shares where workers wait for others of their group alone.

    Args:
        groups: statistics of each worker, by group.
        own: parts of each worker's own time.
        slower_s: waiting for slower workers, by group.
        seconds: length of the run, of all workers together.
    """
    costs: dict[str, float] = {}
    for totals, waited_s in zip(groups, slower_s, strict=True):
        of_group_s = sum(total.seconds for total in totals.values())
        parts = {worker: own[worker] for worker in totals}
        for name, share in _costs_in_lockstep(totals, parts, waited_s / of_group_s, of_group_s).items():
            costs[name] = costs.get(name, 0.0) + share * of_group_s / seconds
    return costs


def _gain_of_shares(
    groups: list[dict[int, Stretch]], own: dict[int, dict[str, float]], measured_steps: int
) -> float:
    """Return the images/s gained in the same run if members of a group had shares by their speed, in whole images.

    Args:
        groups: statistics of each worker, by group that waits for its slowest member.
        own: parts of each worker's own time.
        measured_steps: steps with equal shares, in which speeds are measured.
    """
    rate = balanced = 0.0
    for totals in groups:
        step_s = sum(total.seconds for total in totals.values()) / _steps(totals)
        computing = [own[worker]["computing"] / total.steps for worker, total in totals.items()]
        if min(computing) <= 0:
            return 0.0
        saved = min(1 - _LEAST_LEFT, (max(computing) - _with_shares_s(totals, computing)) / step_s)
        steps = _steps(totals) / len(totals)
        rate += _steps(totals)
        balanced += _steps(totals) / (1 - saved * max(0.0, 1 - measured_steps / steps))
    return max(0.0, balanced / rate - 1)


def _with_shares_s(totals: dict[int, Stretch], computing: list[float]) -> float:
    """Return the computing time of a step if the images of a group's step were divided by speed."""
    per_step = [total.images / total.steps for total in totals.values()]
    together = round(sum(per_step))
    if together < len(totals) or min(per_step) <= 0:  # images are not counted
        return harmonic_mean(computing)
    from polyrhythm.data.balance import split

    image_s = [seconds / images for seconds, images in zip(computing, per_step, strict=True)]
    parts = split(together, [1 / seconds for seconds in image_s])
    return max(part * seconds for part, seconds in zip(parts, image_s, strict=True))


def _groups(figures: RunFigures, totals: dict[int, Stretch]) -> list[dict[int, Stretch]]:
    """Return the workers of every group that wait for each other without a server, with their statistics."""
    strategy = _strategy_of(figures) if figures.started and figures.started.servers else None
    if strategy is None or figures.started is None:
        return []
    traits = strategy.traits(figures.started.workers)
    if traits.leaves:
        return []
    present = ({worker: totals[worker] for worker in group if worker in totals} for group in traits.groups)
    return [group for group in present if group]


def _in_lockstep(figures: RunFigures) -> bool:
    strategy = _strategy_of(figures)
    return (
        strategy is not None
        and figures.started is not None
        and strategy.traits(figures.started.workers).lockstep
    )


def _measured_steps(figures: RunFigures) -> int:
    """Return the steps before shares can follow speeds: workers agree on them where they exchange anyway."""
    from polyrhythm.roles.balance import FIRST_MEETING

    strategy = _strategy_of(figures)
    every = strategy.traits(figures.started.workers).exchange_every if strategy and figures.started else 1
    return ceil(FIRST_MEETING / max(1, every)) * max(1, every)


def _slower_s(totals: dict[int, Stretch]) -> float:
    """Return the seconds for which workers that wait for each other waited for the slower ones of them."""
    least_s = min(
        (total.exchange_s or total.wait_s - total.stage_s) / total.steps for total in totals.values()
    )
    waited_s = sum(total.wait_s - total.stage_s for total in totals.values())
    return max(0.0, waited_s - least_s * _steps(totals))


def _without_core(totals: dict[int, Stretch]) -> float:
    """Return the share of exchanges in which workers waited for a core."""
    exchange_s = sum(total.exchange_s for total in totals.values())
    return sum(total.exchange_processor_s for total in totals.values()) / exchange_s if exchange_s else 0.0


def held_back(figures: RunFigures) -> Bottleneck | None:
    """Find out what held a run back, since it last had other workers; None before the first report of a step."""
    figures = figures.latest
    totals = {worker: series.total for worker, series in figures.workers.items()}
    totals = {worker: total for worker, total in totals.items() if total.steps and total.seconds > 0}
    if not totals:
        return None
    end_s = max(figures.workers[worker].last.end_s for worker in totals)
    # The remaining work of failed workers was done by others, as that of ranks that a resumed run has no more.
    workers = figures.started.workers if figures.started else len(totals)
    there = {worker for worker in totals.keys() - figures.absent if figures.ended and worker < workers}
    idle_s = sum(end_s - figures.workers[worker].last.end_s for worker in there)
    seconds = sum(total.seconds for total in totals.values()) + idle_s
    idle = idle_s / seconds
    waited_s = sum(total.wait_s for total in totals.values())
    stage_s = min(waited_s, sum(total.stage_s for total in totals.values()))
    groups = _groups(figures, totals)
    lockstep = bool(groups) and _in_lockstep(figures)
    free_running = bool(figures.started and figures.started.free_running) or bool(groups and not lockstep)
    lone = _is_lone(figures)
    slower_s, server_s = _slower_and_server_s(figures, totals, waited_s - stage_s, free_running=free_running)
    own = own_parts(figures)
    if lockstep:  # groups wait for each other: all of them are one
        slower_s, groups = max(slower_s, _slower_s(totals)), []
    inside_s = [_slower_s(group) for group in groups]
    slower_s = min(waited_s - stage_s, slower_s + sum(inside_s))
    server_s = min(server_s, waited_s - stage_s - slower_s)
    shares = {
        name: sum(parts[name] for parts in own.values()) / seconds
        for name in (*_OWN_COSTS, _TESTED, _DECODERS)
    }
    tested = shares[_TESTED]
    other = {name: sum(shares[part] for part in _PARTS_OF[name]) for name in _OWN_COSTS}
    compute = sum(parts["computing"] for parts in own.values()) / seconds
    queued = max(0.0, waited_s - stage_s - slower_s - server_s) / seconds * _without_core(totals)
    decoders = _decoders_share(figures) * queued
    processor = other["processor"] + shares[_DECODERS] + queued
    slower, stage, server = slower_s / seconds, stage_s / seconds, server_s / seconds
    exchange = (waited_s - stage_s - slower_s) / seconds - queued
    busy, queue = max(
        ((load.busy_share, load.queue) for load in figures.server_loads.values()), default=(0.0, 0.0)
    )
    costs = {"nothing left": idle, **other, "stages": stage, "exchange": exchange}
    costs |= {"stragglers": 0.0, "unequal": slower}
    if lone:
        costs["exchange"] = 0.0
    if slower > idle and groups:
        costs |= _costs_in_groups(groups, own, inside_s, seconds)
    elif slower > idle and not free_running:
        costs |= _costs_in_lockstep(totals, own, slower, seconds)
    costs["processor"] += queued - decoders
    costs["input"] += decoders
    causes = {name: _cause(name, figures, own, totals, busy, queue) for name in costs}
    # Fewer ranks or threads on the same cores do not compute as much as they would on more cores.
    gains = {
        name: 0.0 if causes[name].kind in (CROWD, THREADS) else 1 / max(1 - costs[name], _LEAST_LEFT) - 1
        for name in costs
    }
    most = max(costs, key=lambda each: costs[each])
    gain, found = gains[most], causes[most]
    if 1 / max(1 - costs[most], _LEAST_LEFT) - 1 < _WORTH_NAMING:
        problem = f"none: no cause but computing costs more than {percent(max(costs.values()))} of the time"
        gain, found = 0.0, _Cause("compute", COMPUTING, COMPUTING, problem, "")
    else:
        problem = found.problem
    remedy = found.remedy
    together = lock_step(figures, totals)
    waited = other["input"] - shares[_DECODERS]
    parts = [
        (compute, "computing", True),
        (slower, "waiting for slower workers", not (free_running or lone) or slower >= _WORTH_SAYING),
        (stage, "waiting for other stages", stage > 0),
        (server, "waiting for servers", server >= _WORTH_SAYING),
        (exchange - server, "communication", not lone),
        (processor, "waiting for a core", processor >= _WORTH_SAYING),
        (waited, "waiting for batches", waited >= _WORTH_SAYING),
        (other["tests"], "tests", other["tests"] >= _WORTH_SAYING),
        (idle, "idle at the end", idle >= _WORTH_SAYING),
    ]
    named_share = sum(share for share, _, shown in parts if shown)
    parts.append((1 - named_share, "other waiting", 1 - named_share >= _SHOWN))
    if found.kind in (
        CROWD,
        THREADS,
    ):  # fewer ranks on the same cores do not compute as much as more cores would
        gain = 0.0
    remedy_gain = gain
    if found.cause == "stragglers" and _may_follow_speeds(figures):
        remedy_gain = min(gain, _gain_of_shares(groups or [totals], own, _measured_steps(figures)))
    text = problem
    if remedy:
        text += f"; remedy: {remedy}" + (f", up to {gain_text(remedy_gain)}" if remedy_gain else "")
    if together:
        text += f"; {together.text}"
    return Bottleneck(
        cause=found.cause,
        compute_share=compute,
        slower_workers_share=slower,
        exchange_share=exchange,
        servers_busy_share=busy,
        server_queue=queue,
        lock_step=together,
        bottleneck=found.name,
        problem=problem,
        remedy=remedy,
        time=", ".join(f"{percent(share)} {what}" for share, what, shown in parts if shown),
        text=text,
        nothing_left_share=idle,
        server_share=server,
        network_share=exchange - server,
        stage_share=stage,
        processor_share=processor,
        testing_share=other["tests"],
        input_share=waited,
        tested_images_share=tested,
        gain=gain,
        gains={
            causes[name].kind: gains[name]
            for name in sorted(costs, key=lambda each: -costs[each])
            if costs[name] >= _SHOWN
        },
        remedy_gain=remedy_gain,
    )


def _is_lone(figures: RunFigures) -> bool:
    """Return whether the run has a single worker and no servers, hence nothing to wait for."""
    started = figures.started
    return started is not None and started.workers + started.servers == 1 == len(figures.workers)


def _steps(totals: dict[int, Stretch]) -> int:
    return sum(total.steps for total in totals.values())


def _slower_and_server_s(
    figures: RunFigures, totals: dict[int, Stretch], waited_s: float, *, free_running: bool
) -> tuple[float, float]:
    """Return the seconds for which all workers waited for slower ones, and for servers.

    Args:
        figures: statistics of the run.
        totals: statistics of each worker.
        waited_s: waiting time of all workers, without waiting for other stages.
        free_running: whether workers never wait for slower ones.
    """
    loads = figures.server_loads.values()
    if loads:  # each holds a part of every gradient, for as long as the others hold theirs
        slower_s = min(waited_s, sum(load.held_s for load in loads) / len(loads))
        return slower_s, min(waited_s - slower_s, sum(load.updating_s for load in loads) / len(loads))
    if free_running or _is_lone(figures):
        return 0.0, 0.0
    return _slower_s(totals), 0.0


def gain_text(gain: float) -> str:
    """Write a gain in speed: `+21 % images/s`."""
    return f"{100 * gain:+.0f} % images/s"


SLOWER, UNEVEN, NETWORK, SERVERS = (
    "slower workers",
    "steps of unequal length",
    "the network",
    "the servers",
)
CROWD, THREADS, OTHERS = (
    "more processes than cores",
    "more compute threads than cores",
    "other programs on the same cores",
)
TESTS, IDLE, STAGES = "tests", "equal shares on unequal machines", "pipeline bubbles"
"""Kinds of causes; `why` uses the same names."""
_CAUSES = {
    "nothing left": _Cause(
        "nothing left",
        IDLE,
        IDLE,
        "equal shares on unequal machines: faster workers finish early and idle",
        "`--balance measured` or `--batches dynamic`, which give faster workers more batches",
    ),
    "tests": _Cause(
        "tests",
        TESTS,
        TESTS,
        "no worker trains while the model is tested",
        "`--evaluation async` where a core is free, or a smaller test set",
    ),
    "stages": _Cause(
        "stages",
        STAGES,
        STAGES,
        "pipeline bubbles: stages wait for each other",
        "`pipeline(balance=auto)` or more `microbatches`",
    ),
}
"""Causes with a single form."""


def _cause(
    name: str,
    figures: RunFigures,
    own: dict[int, dict[str, float]],
    totals: dict[int, Stretch],
    busy: float,
    queue: float,
) -> _Cause:
    """Return a cause in the form that it has in this run."""
    match name:
        case "stragglers":
            return _slower_workers(totals, own, by_speed=_may_follow_speeds(figures))
        case "unequal":
            return _unequal(figures)
        case "exchange":
            return _exchange(figures, busy, queue)
        case "input":
            kind = input_kind(figures)
            name, problem, remedy = _INPUTS[kind]
            if not figures.cache:
                remedy = remedy.replace("`--decoded FOLDER`", "`--cache auto` for files")
            return _Cause("input", kind, name, problem, remedy)
        case "processor":
            return _processor(figures)
        case _:
            return _CAUSES[name]


def _processor(figures: RunFigures) -> _Cause:
    """Distinguish ranks and threads that are too many for the cores from other programs."""
    started = figures.started
    threads, cores = (started.threads, started.cores) if started is not None else (0, 0)
    ranks = started.workers + started.servers if started is not None else 0
    if threads > 1 and ranks * threads > cores:
        remedy = f"`--threads {max(1, cores // ranks)}`"
        return _Cause("processor", THREADS, THREADS, f"{THREADS}: workers wait for a core", remedy)
    if not cores or ranks > cores:
        text, remedy = "more busy processes than cores", "fewer processes: "
        kind, name = CROWD, "too few cores"
    else:
        text, remedy = "other programs keep the cores busy", "fewer other programs"
        kind = name = OTHERS
    if ranks != 1:
        remedy += ", or " * (kind is OTHERS) + "`--workers` at most the number of free cores"
    return _Cause("processor", kind, name, f"{text}: workers wait for a core", remedy)


DECODING, READING, INPUT = (
    "decoding and augmentation of images",
    "reading of images",
    "batches that are not ready in time",
)
_INPUTS = {
    DECODING: (
        DECODING,
        f"workers wait for {DECODING}",
        "a cheaper `--augment`, or `--decoded FOLDER`",
    ),
    READING: (
        READING,
        f"workers wait for {READING}: the disk is slow",
        "data on a faster disk, or more memory for `--cache`",
    ),
    INPUT: (
        "the input",
        "batches are not ready in time",
        "a cheaper `--augment`, or `--decoded FOLDER`",
    ),
}
"""The same of waiting for batches, by what they wait for, where decoded images are kept in memory."""
_COMPUTED = 0.2
"""Processor time of a process per second of its waiting for a batch, from which the wait counts as decoding.

Measured with 10 busy processes on 2 cores: 0.31 for photographs, 0.09 for a slow disk.
"""


def input_kind(figures: RunFigures) -> str:
    """Return the cause of waiting for batches: `DECODING`, `READING`, or `INPUT` where it was not measured."""
    waits = figures.input_waits.values()
    if not waits:
        return INPUT
    waited_s = sum(each.seconds + each.testing_s for each in waits)
    busy = sum(each.busy_s for each in waits) >= _COMPUTED * waited_s
    return DECODING if busy else READING


def _decoders_share(figures: RunFigures) -> float:
    """Return the share of waits for a core in which decoders of the same run have it.

    While workers wait for images, only other programs compete with decoders for cores.
    """
    if input_kind(figures) != DECODING:
        return 0.0
    waits = figures.input_waits.values()
    waited_s = sum(each.seconds + each.testing_s for each in waits)
    return min(1.0, sum(each.busy_s for each in waits) / waited_s) if waited_s else 0.0


def _strategy_of(figures: RunFigures) -> Strategy | None:
    """Return the strategy of a run; None where its name is none that is known."""
    from polyrhythm.strategies.strategy import Strategy  # with torch, which few reports need

    try:
        made = build("strategy", figures.started.strategy if figures.started else "", *FAMILIES)
    except RequestError:
        return None
    return made if isinstance(made, Strategy) else None


def _may_follow_speeds(figures: RunFigures) -> bool:
    """Return whether shares of batches could follow the workers' speeds, and have not yet."""
    from polyrhythm.data.balances.measured import Measured
    from polyrhythm.roles.balance import balances

    strategy = _strategy_of(figures)
    if figures.balanced or figures.started is None or strategy is None:
        return not figures.balanced and not (figures.started and figures.started.servers)
    workers = figures.started.workers
    try:
        return balances(Measured(), strategy, workers, workers)
    except RequestError:
        return False


_RHYTHMS = ("steps", "tau", "n_push", "portions")
"""Keys of strategies for the number of steps from one exchange to the next."""


def _rarer_exchanges(strategy: Strategy | None) -> str:
    """Return the option with which workers exchange less often."""
    keys = type(strategy).model_fields if strategy is not None else {}
    if "inside" in keys and "replicas" in keys:  # groups
        inside = type(getattr(strategy, "inside", None))
        key = next((key for key in _RHYTHMS if key in getattr(inside, "model_fields", {})), "")
        return f"a larger `{key}` of `inside`" if key else "`inside=local_sgd(steps=4)`"
    return next((f"a larger `{key}`" for key in _RHYTHMS if key in keys), "`--strategy 'local_sgd(steps=4)'`")


def _slower_workers(
    totals: dict[int, Stretch], own: dict[int, dict[str, float]], *, by_speed: bool
) -> _Cause:
    """Name the worker with the longest computing."""
    step_s = {worker: own[worker]["computing"] / totals[worker].steps for worker in totals}
    slowest = max(step_s, key=lambda worker: step_s[worker])
    usual_s = median_low(step_s.values())
    slow = f"worker {slowest} is {step_s[slowest] / max(usual_s, 1e-9):.1f}× slower than the median"
    remedy = "`--strategy backup_workers` or an asynchronous one"
    if by_speed:
        remedy = "`--balance measured`, which gives it a smaller share"
    return _Cause("stragglers", SLOWER, slow, f"{slow}, and the others wait for it", remedy)


def _unequal(figures: RunFigures) -> _Cause:
    return _Cause(
        "lock-step waiting",
        UNEVEN,
        "unequal step times",
        "step times vary, and each step waits for the slowest worker",
        f"fewer barriers: {_rarer_exchanges(_strategy_of(figures))} or `--strategy backup_workers`",
    )


def _exchange(figures: RunFigures, busy: float, queue: float) -> _Cause:
    """Distinguish servers that are busy from a network that is slow."""
    started = figures.started
    if busy >= _BUSY:
        load = f"the servers are busy {percent(busy)} of the time, with a queue of {queue:.1f} messages"
        remedy = "more servers (`servers=…`) or a larger `--batch-size`"
        return _Cause("servers", SERVERS, SERVERS, load, remedy)
    from polyrhythm.strategies.compressing import Compressible

    strategy = _strategy_of(figures)
    robust = getattr(getattr(strategy, "aggregator", None), "robust", False)  # compares whole messages
    compresses = strategy is None or (
        isinstance(strategy, Compressible) and strategy.compress is None and not robust
    )
    rarely = _rarer_exchanges(strategy)
    remedy = f"a larger `--batch-size`{', `--compress`,' if compresses else ''} or fewer exchanges ({rarely})"
    if started and started.servers:
        shared = figures.staleness.counts and figures.staleness.mean > 0
        load = "communication with the servers" + (", over links that all workers share" if shared else "")
        return _Cause("network", NETWORK, "the network to the servers", load, remedy)
    return _Cause("network", NETWORK, NETWORK, "communication", remedy)
