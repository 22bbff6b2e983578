"""The bottleneck of a run: the cause that costs most by the run's own measurements, and its remedy.

    gain of a cause  =  1 / (1 - s) - 1        s: share of the run's length that it costs

Computing is no cause: a run is bound by it where no cause would gain a tenth, however large the share of computing
is. A slow worker costs its step less the median one, not what the others waited for it.

    the run's length = computing + waiting + nothing left to do
    waiting          = for the processor + for slower workers + for other stages + for servers + for the network
                       + for batches + while the model is tested

All shares are of the run's length, over all workers, and add up to 1. What each is taken from:

- The processor: time for which a worker's thread was ready but not running, with more processes than cores.
- Tests: from the last report of any worker's step to the event of the test, where steps follow.
- Batches: what `--timings` measures; without it, that counts as computing.
- Other stages of a pipeline: what its workers waited inside their passes.
- Slower workers, with servers: time for which servers have held gradients until others' arrived. Where workers wait
for
  each other without servers, the slowest waits for the network only: the least wait of a step, over all workers, is
  taken to be the cost of everyone's exchange, and the rest of the waiting to be for slower workers.
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

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from polyrhythm.reporting.quantities import percent, significant

if TYPE_CHECKING:
    from polyrhythm.reporting.figures import RunFigures, Stretch


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
_STRAGGLER = 1.25
"""Times the median computing time of a step, from which a worker is called a straggler."""
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
        problem: a sentence with its share of the time, or that there is none.
        remedy: options that would relieve it; empty without a bottleneck.
        time: shares of the workers' time in words; they sum to 100 %.
        text: problem, remedy, gain, and the comparison with synchronous training, in a line.
        cause: `compute`, `processor`, `stragglers`, `lock-step waiting`, `stages`, `servers`, `network`, `tests`,
            `input` or `nothing left`.
        gain: images/s that would be gained without the cause, as a share; 0 for `compute`.
        exchange_share: waiting for servers and for the network.
        server_share: part of `exchange_share` spent waiting for servers.
        network_share: part of `exchange_share` spent waiting for the network.
        stage_share: waiting for other stages of a pipeline.
        processor_share: waiting for the processor.
        testing_share: while the model was tested, and no worker took steps.
        input_share: waiting for batches; 0 where it was not measured.
        nothing_left_share: share of the time after a worker's last step, while others still had steps to take.
        server_queue: messages in a row that the busiest server found waiting; 0 without servers.
        lock_step: None where that is no question.
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
    gain: float = 0.0


def held_back(figures: RunFigures) -> Bottleneck | None:
    """Find out what held a run back; None before the first report of a step."""
    totals = {worker: series.total for worker, series in figures.workers.items()}
    totals = {worker: total for worker, total in totals.items() if total.steps and total.seconds > 0}
    if not totals:
        return None
    end_s = max(figures.workers[worker].last.end_s for worker in totals)
    # The remaining work of failed workers was done by others.
    there = totals.keys() - figures.absent if figures.ended else set()
    idle_s = sum(end_s - figures.workers[worker].last.end_s for worker in there)
    seconds = sum(total.seconds for total in totals.values()) + idle_s
    idle = idle_s / seconds
    waited_s = sum(total.wait_s for total in totals.values())
    stage_s = min(waited_s, sum(total.stage_s for total in totals.values()))
    free_running = bool(figures.started and figures.started.free_running)
    slower_s, server_s = _slower_and_server_s(figures, totals, waited_s - stage_s, free_running=free_running)
    others_s = {
        "tests": figures.testing_s * len(totals),
        "input": figures.timings.data_s,
        "processor": sum(total.processor_s for total in totals.values()),
    }
    working_s = left_s = seconds - idle_s - waited_s
    other = {}
    for name, most_s in others_s.items():
        if name == "processor" and working_s > 0:  # tests wait for cores as well, and are counted already
            most_s *= left_s / working_s
        other[name] = min(left_s, most_s) / seconds
        left_s -= min(left_s, most_s)
    compute, processor = left_s / seconds, other["processor"]
    slower, stage, server = slower_s / seconds, stage_s / seconds, server_s / seconds
    exchange = (waited_s - stage_s - slower_s) / seconds
    busy, queue = max(
        ((load.busy_share, load.queue) for load in figures.server_loads.values()), default=(0.0, 0.0)
    )
    step_s = [(total.seconds - total.wait_s) / total.steps for total in totals.values()]
    straggling = 0.0 if free_running else (max(step_s) - median(step_s)) / (seconds / _steps(totals))
    costs = {
        "nothing left": idle,
        **other,
        "stages": stage,
        "slower": max(slower, straggling) if slower > idle else slower,
        "exchange": exchange,
    }
    most = max(costs, key=lambda each: costs[each])
    gain = 1 / max(1 - costs[most], _LEAST_LEFT) - 1
    if gain < _WORTH_NAMING:
        cause, name, gain, remedy = "compute", COMPUTING, 0.0, ""
        problem = f"none: no cause but computing costs more than {percent(max(costs.values()))} of the time"
    else:
        shares = {"slower": slower, "exchange": exchange - server}
        share = percent(shares.get(most, costs[most]))  # as `time` has it
        if most == "slower":
            served = bool(figures.started and figures.started.servers)
            cause, name, problem, remedy = _slower_workers(totals, served=served)
        elif most == "exchange":
            cause, name, problem, remedy = _exchange(figures, busy, queue)
        else:
            cause, (name, problem, remedy) = most, _CAUSES[most]
        problem += f" ({share} of the workers' time)" if cause != "servers" else ""
    together = lock_step(figures, totals)
    parts = [
        (compute, "computing", True),
        (slower, "waiting for slower workers", not free_running or slower >= _WORTH_SAYING),
        (stage, "waiting for other stages", stage > 0),
        (server, "waiting for servers", server >= _WORTH_SAYING),
        (exchange - server, "communication", True),
        (processor, "waiting for a core", processor >= _WORTH_SAYING),
        (other["input"], "waiting for batches", other["input"] >= _WORTH_SAYING),
        (other["tests"], "tests", other["tests"] >= _WORTH_SAYING),
        (idle, "idle at the end", idle >= _WORTH_SAYING),
    ]
    named_share = sum(share for share, _, shown in parts if shown)
    parts.append((1 - named_share, "other waiting", 1 - named_share >= _SHOWN))
    text = problem
    if remedy:
        text += f"; remedy: {remedy}, up to {gain_text(gain)}"
    if together:
        text += f"; {together.text}"
    return Bottleneck(
        cause=cause,
        compute_share=compute,
        slower_workers_share=slower,
        exchange_share=exchange,
        servers_busy_share=busy,
        server_queue=queue,
        lock_step=together,
        bottleneck=name,
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
        input_share=other["input"],
        gain=gain,
    )


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
    if free_running:
        return 0.0, 0.0
    least_s = min((total.wait_s - total.stage_s) / total.steps for total in totals.values())
    return max(0.0, waited_s - least_s * sum(total.steps for total in totals.values())), 0.0


def gain_text(gain: float) -> str:
    """Write a gain in speed: `+21 % images/s`."""
    return f"{100 * gain:+.0f} % images/s"


_CAUSES = {
    "nothing left": (
        "equal shares on unequal machines",
        "equal shares on unequal machines: faster workers finish early and idle",
        "`--balance measured` or `--deal drawn`, which give faster workers more batches",
    ),
    "processor": (
        "too few cores",
        "more busy processes than cores: workers wait for a core",
        "fewer processes: `--workers` at most the number of free cores",
    ),
    "tests": (
        "tests",
        "no worker trains while the model is tested",
        "a smaller test set, or fewer and longer epochs",
    ),
    "input": (
        "the input",
        "batches are not ready in time",
        "`--cache`, `--decoded FOLDER` or a cheaper `--augment`",
    ),
    "stages": (
        "pipeline bubbles",
        "pipeline bubbles: stages wait for each other",
        "`pipeline(balance=auto)` or more `microbatches`",
    ),
}
"""Of each cause with a single form its name, the problem, and the remedy."""
_AVERAGING = ("local_sgd", "diloco", "bmuf", "slowmo", "hierarchical_averaging", "ng_sgd", "post_local_sgd")
"""Strategies that exchange once in several `steps`."""


def _slower_workers(totals: dict[int, Stretch], *, served: bool) -> tuple[str, str, str, str]:
    """Distinguish a worker that is slow from steps that are unequally long."""
    step_s = {worker: (total.seconds - total.wait_s) / total.steps for worker, total in totals.items()}
    slowest = max(step_s, key=lambda worker: step_s[worker])
    usual_s = median(step_s.values())
    if usual_s > 0 and step_s[slowest] > _STRAGGLER * usual_s:
        slow = f"worker {slowest} is {step_s[slowest] / usual_s:.1f}× slower than the median"
        remedy = "`--strategy backup_workers` or an asynchronous one"
        if not served:
            remedy = "`--balance measured`, which gives it a smaller share"
        return "stragglers", slow, f"{slow}, and the others wait for it", remedy
    return (
        "lock-step waiting",
        "unequal step times",
        "step times vary, and each step waits for the slowest worker",
        "fewer barriers: `--strategy 'local_sgd(steps=4)'` or `backup_workers`",
    )


def _exchange(figures: RunFigures, busy: float, queue: float) -> tuple[str, str, str, str]:
    """Distinguish servers that are busy from a network that is slow."""
    started = figures.started
    if busy >= _BUSY:
        load = f"the servers are busy {percent(busy)} of the time, with a queue of {queue:.1f} messages"
        return "servers", "the servers", load, "more servers (`servers=…`) or a larger `--batch-size`"
    rounds = started is not None and started.strategy.startswith(_AVERAGING)
    seldom = "a larger `steps`" if rounds else "`--strategy 'local_sgd(steps=4)'`"
    remedy = f"a larger `--batch-size`, `--compress`, or fewer exchanges ({seldom})"
    if started and started.servers:
        shared = figures.staleness.counts and figures.staleness.mean > 0
        load = "communication with the servers" + (", over links that all workers share" if shared else "")
        return "network", "the network to the servers", load, remedy
    return "network", "the network", "communication", remedy
