"""What held a run back: the cause whose removal would gain most, by the run's own figures.

    gain of a cause  =  1 / (1 - s) - 1        s: share of the run's length that it costs

Computing is no cause: a run is bound by it where no cause would gain a tenth, however large the share of computing
is. A slow worker costs its step less the median one, not what the others waited for it.

    the run's length = computing + waiting + nothing left to do
    waiting          = for the processor + for slower workers + for other stages + for servers + for the network
                       + for batches + while the model is tested

All shares are of the run's length, over all workers, and add up to 1. What each is taken from:

- The processor: for how long the system says that a worker's thread was ready, with more processes than cores.
- Tests: from the last report of any worker's step to the event of the test, where steps follow.
- Batches: what `--timings` measures; without it, that counts as computing.
- Other stages of a pipeline: what its workers waited inside their passes.
- Slower workers, with servers: how long servers have held gradients until others' had come. Where workers wait for
  each other without servers, the slowest waits for the network only: the least wait of a step, over all workers, is
  taken to be the cost of everyone's exchange, and the rest of the waiting to be for slower workers.
- Servers: their time for the messages of steps. The network is the rest, with the time that messages queue.

What lockstep would have cost a free-running run with servers, by the run's own figures:

    N gradients, free-running      N / sum of the workers' steps a second
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
    """Seconds for a gradient of every worker, free-running and synchronous; `update_s` of the busiest server."""

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
        text=f"a gradient of every worker took {significant(free_s)} s, and in lockstep would have taken about "
        f"{significant(together_s)} s or more",
    )


_STRAGGLER = 1.25
"""Times the median computing time of a step, from which a worker is called a straggler."""
_WORTH_NAMING = 0.1
"""Gain from which a cause is named as what held the run back."""
_LEAST_LEFT = 0.001
_WORTH_SAYING = 0.01
"""Share of the time from which what seldom counts is mentioned by its name."""
_SHOWN = 0.0005
"""Share of the time that is written as more than nothing."""
_BUSY = 0.6
"""Share of its time from which a server is taken to be the bottleneck, and not the links to it."""


@dataclass(frozen=True, kw_only=True)
class HeldBack:
    """What held a run back: shares of the run's length over all workers, and of the busiest server's time.

    Attributes:
        cause: `compute`, `processor`, `stragglers`, `lock-step waiting`, `stages`, `servers`, `network`, `tests`,
            `input` or `nothing left`.
        gain: images/s that would be gained without the cause, as a share; 0 for `compute`.
        exchange_share: waiting for servers and for the network.
        server_share: of it, for servers.
        network_share: of it, for the network.
        stage_share: waiting for other stages of a pipeline.
        processor_share: waiting for the processor.
        testing_share: while the model was tested, and no worker took steps.
        input_share: waiting for batches; 0 where it was not measured.
        nothing_left_share: of the time after a worker's last step, while others had still steps to take.
        server_queue: messages in a row that the busiest server found waiting; 0 without servers.
        lock_step: None where that is no question.
    """

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


def held_back(figures: RunFigures) -> HeldBack | None:
    """Find out what held a run back; None before the first report of a step."""
    totals = {worker: series.total for worker, series in figures.workers.items()}
    totals = {worker: total for worker, total in totals.items() if total.steps and total.seconds > 0}
    if not totals:
        return None
    end_s = max(figures.workers[worker].last.end_s for worker in totals)
    # Who is lost has left its work to others.
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
    left_s = seconds - idle_s - waited_s
    other = {}
    for name, most_s in others_s.items():
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
        cause, why, gain = "compute", "computing", 0.0
    elif most == "nothing left":
        cause = "nothing left"
        why = "equal shares on unequal machines, whose faster workers had nothing left to do"
    elif most == "processor":
        cause, why = "processor", "the processor, whose cores other processes kept busy"
    elif most == "tests":
        cause, why = most, "tests, during which no worker trains"
    elif most == "input":
        cause, why = most, "input, since batches are not ready in time"
    elif most == "stages":
        cause, why = "stages", "the pipeline, whose stages wait for each other"
    elif most == "slower":
        cause, why = _slower_workers(totals)
    else:
        cause, why = _exchange(figures, busy, queue)
    together = lock_step(figures, totals)
    parts = [f"{percent(compute)} of the workers' time was computing"]
    waits = [] if free_running and slower < _WORTH_SAYING else [(slower, "slower workers")]
    waits += [(stage, "other stages")] if stage else []
    if figures.server_loads:
        waits += [(server, "servers")] if server >= _WORTH_SAYING else []
        waits += [(exchange - server, "the network")]
    else:
        waits += [(exchange, "the network")]
    for share, what in ((processor, "the processor"), (other["input"], "batches")):
        waits += [(share, what)] if share >= _WORTH_SAYING else []
    pauses = [(other["tests"], "testing")] if other["tests"] >= _WORTH_SAYING else []
    told = compute + sum(share for share, _ in (*waits, *pauses)) + (idle if idle >= _WORTH_SAYING else 0.0)
    parts += [
        f"{percent(share)} {'waiting ' if not number else ''}for {what}"
        for number, (share, what) in enumerate(waits)
    ]
    parts += [f"{percent(share)} {what}" for share, what in pauses]
    parts += [f"{percent(idle)} with nothing left to do"] if idle >= _WORTH_SAYING else []
    parts += [f"{percent(1 - told)} other waiting"] if 1 - told >= _SHOWN else []
    gained = f"; without that up to {100 * gain:.0f} % more images/s" if gain else ""
    text = f"{why}: {', '.join(parts)}{gained}{f'; {together.text}' if together else ''}"
    return HeldBack(
        cause=cause,
        compute_share=compute,
        slower_workers_share=slower,
        exchange_share=exchange,
        servers_busy_share=busy,
        server_queue=queue,
        lock_step=together,
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
    """Return for how many seconds all workers waited for slower ones, and for servers.

    Args:
        figures: of the run.
        totals: what each worker did.
        waited_s: by all workers, but for other stages.
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


def _slower_workers(totals: dict[int, Stretch]) -> tuple[str, str]:
    """Distinguish a worker that is slow from steps that are unequally long."""
    step_s = {worker: (total.seconds - total.wait_s) / total.steps for worker, total in totals.items()}
    slowest = max(step_s, key=lambda worker: step_s[worker])
    usual_s = median(step_s.values())
    if usual_s > 0 and step_s[slowest] > _STRAGGLER * usual_s:
        times = step_s[slowest] / usual_s
        return (
            "stragglers",
            f"stragglers, worker {slowest} first, whose steps take {times:.1f} times the median",
        )
    return (
        "lock-step waiting",
        "lockstep waiting, since steps take unequally long and whoever is first waits",
    )


def _exchange(figures: RunFigures, busy: float, queue: float) -> tuple[str, str]:
    """Distinguish servers that are busy from a network that is slow; say what asynchrony has to do with it."""
    free_running = figures.staleness.counts and figures.staleness.mean > 0
    cost = (
        ", to which every gradient is an update and an answer of its own, where lockstep has one update of all"
        if free_running
        else ""
    )
    if busy >= _BUSY:
        return "servers", f"the servers, busy {percent(busy)} of the time with a queue of {queue:.1f}{cost}"
    servers = figures.started.servers if figures.started else 0
    if servers:
        return "network", f"the network to the servers{cost and ', whose links asynchronous workers share'}"
    return "network", "the network"
