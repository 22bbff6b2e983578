"""Steady throughput, by the same rule for real and for simulated runs: from the times at which steps began.

    worker 0   | .  .  .  .  .  .  .  .  |        end     the first worker begins no more
    worker 1   | .    .    .    .    .   |        begin   a quarter of the way there, from when all have begun
                      │   windows    │                    their second step: until then all are still in phase
                    begin           end

A run ends by itself: worker 0 wishes to stop once it has taken steps for so many seconds, and all_peers hears of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.world import StopRequest
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.run import program_of
from polyrhythm.simulation.simulated_run import modeled_run

WINDOWS = 5
IN_PHASE = 0.25
"""Share of a run that does not count: workers begin together, and those of free-running strategies drift apart."""

ENDLESS = 10**9
"""Steps of a run that ends by a wish."""

Draw = Callable[[], float]


class Marks:
    """When a worker began its steps; wraps what draws their compute seconds.

    Args:
        draw: gives the compute seconds of the next step, which begins now.
        now: the clock, the same for all workers.

    Attributes:
        times: seconds, one a step.
    """

    def __init__(self, draw: Draw, now: Callable[[], float]) -> None:
        self._draw = draw
        self._now = now
        self._stop: StopRequest | None = None
        self._seconds = 0.0
        self.times: list[float] = []

    def end_after(self, seconds: float, stop: StopRequest) -> None:
        """Wishes to stop so long after the first step began."""
        self._seconds, self._stop = seconds, stop

    def __call__(self) -> float:
        self.times.append(self._now())
        if self._stop is not None and self.times[-1] - self.times[0] >= self._seconds:
            self._stop.request()
        return self._draw()


def steps_per_s(times: Sequence[Sequence[float]], windows: int = WINDOWS) -> float:
    """Return the steps a second of all workers together: the median over windows, between steps interpolated.

    Args:
        times: of the beginnings of each worker's steps.
        windows: of equal length.

    Raises:
        ValueError: a worker has begun fewer than three steps.
    """
    if min(map(len, times)) < 3:
        raise ValueError("a worker has begun fewer than three steps: let the run take longer")
    first, last = max(own[1] for own in times), min(own[-1] for own in times)
    edges = np.linspace(first + (last - first) * IN_PHASE, last, windows + 1)
    done = sum(np.interp(edges, own, np.arange(len(own))) for own in times)
    return float(statistics.median(np.diff(done) / np.diff(edges)))


def simulated_times(layout: Layout, dry_run: DryRun, seconds: float) -> list[list[float]]:
    """Run dry on a simulated cluster; return the beginnings of each worker's steps.

    Args:
        layout: of the cluster.
        dry_run: of endless steps.
        seconds: virtual ones, after which worker 0 wishes to stop.
    """
    stage = modeled_run(layout, program_of(dry_run), lambda event: None, seed=dry_run.seed)
    plain, marks = stage.draws, {}

    def marked(rank: int) -> Draw:
        marks[rank] = Marks(plain(rank), stage.time.now)
        if rank == 0:
            marks[rank].end_after(seconds, stage.stop)
        return marks[rank]

    stage.draws = marked
    stage.play()
    return [marks[rank].times for rank in layout.roles.workers]
