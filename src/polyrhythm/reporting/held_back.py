"""What held a run back: computing, slower workers, or servers and network, with the figures that say so.

    a worker's time = computing + waiting;  waiting = for slower workers + for servers and network

Free-running workers wait for servers and network only. Where workers do wait for each other, the slowest
waits for servers and network only: the least wait of a step, over all workers, is taken to be the cost of
everyone's exchange, and the rest of the waiting to be for slower workers.

What lockstep would have cost a free-running run with servers, by the run's own figures:

    N gradients, free-running      N / sum of the workers' steps a second
    N gradients in lockstep        c + max(N (b - u) + u, w - (N - 1) u)

c: the slowest worker's mean computing time of a step. b: the busiest server's time for a gradient, u of it
spent making the update. w: the least time that a worker waited for a step. Lockstep moves as many gradients
and answers, and makes one update of them all in place of N. Steps of unequal length make c longer than the
mean that is known, so lockstep would rather have taken longer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from polyrhythm.reporting.quantities import percent, significant

if TYPE_CHECKING:
    from polyrhythm.reporting.figures import RunFigures, Stretch


@dataclass(frozen=True, kw_only=True)
class LockStep:
    """Lock-step beside what was.

    Attributes:
        free_running_s: that a gradient of every worker took.
        lock_step_s: that it would have taken in lock-step, about.
        update_s: of an update at the busiest server.
        text: in one line.
    """

    free_running_s: float
    lock_step_s: float
    update_s: float
    text: str


def lock_step(figures: RunFigures, totals: dict[int, Stretch]) -> LockStep | None:
    """Return the comparison; None where workers go in step, or there are no servers, or only one worker.

    Args:
        figures: of the run so far.
        totals: what every worker did, all with steps and time.
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
    return LockStep(
        free_running_s=free_s,
        lock_step_s=together_s,
        update_s=update_s,
        text=_text(count, free_s, together_s, update_s),
    )


def _text(count: int, free_s: float, together_s: float, update_s: float) -> str:
    if free_s <= together_s:
        return (
            f"a gradient of every worker took {significant(free_s)} s, and in lock-step would have taken about "
            f"{significant(together_s)} s or more"
        )
    # In a simulation an update takes no time, so it is no reason.
    why = f", since servers make {count} updates of {significant(update_s)} s where it makes one"
    return (
        f"slower than lock-step, which would have taken about {significant(together_s)} s for a gradient of every "
        f"worker in place of {significant(free_s)} s{why if update_s > 0 else ''}"
    )


_STRAGGLER = 1.25
"""Times the median computing time of a step, from which a worker is called a straggler."""
_BUSY = 0.6
"""Share of its time from which a server is taken to be the bottleneck, and not the links to it."""


@dataclass(frozen=True, kw_only=True)
class HeldBack:
    """What held a run back.

    Attributes:
        cause: `compute`, `stragglers`, `lock-step waiting`, `servers` or `network`.
        compute_share: of all workers' time.
        slower_workers_share: of all workers' time, spent waiting for them.
        exchange_share: of all workers' time, spent waiting for servers and network.
        servers_busy_share: of the busiest server's time; 0 without servers.
        server_queue: messages in a row that the busiest server found waiting; 0 without servers.
        lock_step: what lock-step would have cost a free-running run with servers; None where that is no question.
        text: in one line.
    """

    cause: str
    compute_share: float
    slower_workers_share: float
    exchange_share: float
    servers_busy_share: float
    server_queue: float
    lock_step: LockStep | None
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON-able dict."""
        return asdict(self)


def held_back(figures: RunFigures) -> HeldBack | None:
    """Find out what held a run back.

    Args:
        figures: of the run so far.

    Returns:
        None, as long as no worker has told of a step.
    """
    totals = {worker: series.total for worker, series in figures.workers.items()}
    totals = {worker: total for worker, total in totals.items() if total.steps and total.seconds > 0}
    if not totals:
        return None
    seconds = sum(total.seconds for total in totals.values())
    waiting = sum(total.wait_s for total in totals.values()) / seconds
    exchange, free_running = waiting, bool(figures.started and figures.started.free_running)
    if not free_running:
        least_s = min(total.wait_s / total.steps for total in totals.values())
        exchange = min(waiting, least_s * sum(total.steps for total in totals.values()) / seconds)
    slower, compute = waiting - exchange, 1 - waiting
    busy, queue = max(
        ((load.busy_share, load.queue) for load in figures.server_loads.values()), default=(0.0, 0.0)
    )
    if compute >= max(slower, exchange):
        cause, why = "compute", "computing"
    elif slower >= exchange:
        cause, why = _slower_workers(totals)
    else:
        cause, why = _exchange(figures, busy, queue)
    other = lock_step(figures, totals)
    others = "" if free_running else f"{percent(slower)} waiting for slower workers, "
    text = (
        f"{why}: {percent(compute)} of the workers' time was computing, {others}{percent(exchange)} "
        f"{'waiting ' if free_running else ''}for {'servers and network' if figures.server_loads else 'the network'}"
        f"{f'; {other.text}' if other else ''}"
    )
    return HeldBack(
        cause=cause,
        compute_share=compute,
        slower_workers_share=slower,
        exchange_share=exchange,
        servers_busy_share=busy,
        server_queue=queue,
        lock_step=other,
        text=text,
    )


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
        "lock-step waiting, since steps take unequally long and whoever is first waits",
    )


def _exchange(figures: RunFigures, busy: float, queue: float) -> tuple[str, str]:
    """Distinguish servers that are busy from a network that is slow; say what asynchrony has to do with it."""
    free_running = figures.staleness.counts and figures.staleness.mean > 0
    cost = (
        ", to which every gradient is an update and an answer of its own, where lock-step has one update of all"
        if free_running
        else ""
    )
    if busy >= _BUSY:
        return "servers", f"the servers, busy {percent(busy)} of the time with a queue of {queue:.1f}{cost}"
    servers = figures.started.servers if figures.started else 0
    if servers:
        return "network", f"the network to the servers{cost and ', whose links asynchronous workers share'}"
    return "network", "the network"
