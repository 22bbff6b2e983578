"""Figures of a run in which every worker has taken ten steps."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.events import RunStarted, WorkerProgress
from polyrhythm.reporting.figures import RunFigures


def ten_steps(
    workers: Sequence[tuple[float, float]], *, servers: int, free_running: bool = False
) -> RunFigures:
    """Makes the figures of workers, each of which has computed and waited for so many seconds in all.

    A step has 100 images of each worker.
    """
    figures = RunFigures()
    figures.add(
        RunStarted(
            time_s=0,
            strategy="s",
            data="d",
            model="m",
            workers=len(workers),
            servers=servers,
            epochs=1,
            steps_per_epoch=10,
            free_running=free_running,
        )
    )
    for worker, (compute_s, wait_s) in enumerate(workers):
        figures.add(
            WorkerProgress(
                time_s=compute_s + wait_s,
                worker=worker,
                epoch=0,
                step=10,
                steps=10,
                images=1000,
                loss=1.0,
                learning_rate=0.1,
                wait_s=wait_s,
            )
        )
    return figures
