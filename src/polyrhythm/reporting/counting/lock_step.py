"""What lock-step would have cost a free-running run with servers, by the run's own figures.

    N gradients, free-running      N / sum of the workers' steps a second
    N gradients in lock-step       c + max(N (b - u) + u, w - (N - 1) u)

c: the slowest worker's mean computing time of a step. b: the busiest server's time for a gradient, u of it spent making
the update. w: the least that a worker waited for a step. Lock-step moves as many gradients and answers, and makes one
update of them all in place of N. Steps that are unequally long make c longer than the mean that is known, so lock-step
would rather have taken longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyrhythm.reporting.quantities import significant

if TYPE_CHECKING:
    from polyrhythm.reporting.counting.figures import RunFigures
    from polyrhythm.reporting.counting.stretches import Stretch


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
    """Compares; None where workers go in step, or there are no servers, or only one worker.

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
