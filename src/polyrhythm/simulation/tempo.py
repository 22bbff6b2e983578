"""The compute time of each worker's steps: drawn, scaled by its host, and slowed where the cluster says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from polyrhythm.communication.clock import Clock
from polyrhythm.errors import RequestError
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.step_time import generator_for_rank


def check_slowness(layout: Layout) -> None:
    """Checks that slow ranks exist and compute.

    Raises:
        RequestError: one does not.
    """
    cluster, workers = layout.cluster, layout.cast.workers
    named = [("slow", rank) for rank in cluster.slow]
    named += [("passing_slowness", entry.rank) for entry in cluster.passing_slowness]
    for key, rank in named:
        if rank not in workers:
            what = "is a server" if rank in layout.cast.servers else "does not exist"
            raise RequestError(
                f"cluster {cluster.name}: {key} names rank {rank}, which {what}: workers are 0 to {len(workers) - 1}"
            )


def step_times(layout: Layout, clock: Clock, seed: int, rank: int) -> Callable[[], float]:
    """Gives a function that draws the seconds of a worker's next step, which begins now.

    Args:
        layout: where the worker is.
        clock: the simulation's.
        seed: of the run.
        rank: the worker's.
    """
    cluster = layout.cluster
    generator = generator_for_rank(seed, rank)
    factor = layout.step_factor(rank) * cluster.slow.get(rank, 1.0)
    passing = [entry for entry in cluster.passing_slowness if entry.rank == rank]
    if factor == 1.0 and not passing:
        return partial(cluster.step_time.draw, generator)

    def draw() -> float:
        seconds = cluster.step_time.draw(generator) * factor
        for entry in passing:
            if entry.from_s <= clock.now() < entry.to_s:
                seconds *= entry.factor
        return seconds

    return draw
