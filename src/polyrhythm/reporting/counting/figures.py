"""The figures of a run: a list of events folded into what tables and plots need."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from polyrhythm.events import (
    CacheUsed,
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    ServerProgress,
    Straggler,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
    WorkerTimings,
)
from polyrhythm.reporting.counting.cache_figures import CacheFigures
from polyrhythm.reporting.counting.resumption import as_one_run
from polyrhythm.reporting.counting.server_load import ServerLoad
from polyrhythm.reporting.counting.staleness import Staleness
from polyrhythm.reporting.counting.stretches import Series, Stretch, mean_loss
from polyrhythm.reporting.counting.timings import Timings

if TYPE_CHECKING:
    from collections.abc import Iterable


class RunFigures:
    """All that the events of one run add up to; grows event by event, in bounded memory.

    Attributes:
        started: how the run began, or None.
        ended: how it ended, or None while it runs or if it was killed.
        time_s: time of the latest event, in seconds since training started.
        images_seen: images that all workers together have seen, over all epochs.
        workers: what every worker did, by its index.
        together: what all workers did, in the order in which they reported it; None before the first report.
        versions: updates applied to the shard of every server, by its index.
        staleness_of: the staleness at every server, by its index.
        server_loads: how busy every server was, by its index.
        timings: what the time of workers' steps went into, where they tell.
        cache: where training images came from, where decoded ones are kept.
        evaluations: all tests of the model, in order.
        absent: workers that are lost, and whose successors have not come.
        notices: all that the user should know, in order; losses of workers among it.
        stragglers: how many times the median time a worker's own steps took at worst, by its index, if it was named.
        checkpoint: the latest, or None.
    """

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.time_s = 0.0
        self.images_seen = 0
        self._furthest: Counter[int] = Counter()
        self.workers: dict[int, Series] = {}
        self.together: Series | None = None
        self.versions: dict[int, int] = {}
        self.staleness_of: dict[int, Staleness] = {}
        self.server_loads: dict[int, ServerLoad] = {}
        self.timings = Timings()
        self.cache = CacheFigures()
        self.evaluations: list[Evaluated] = []
        self.absent: set[int] = set()
        self.notices: list[Notice | WorkerLost | WorkerJoined] = []
        self.stragglers: dict[int, float] = {}
        self.checkpoint: CheckpointSaved | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunFigures:
        """Folds a whole log; one that was resumed becomes one run."""
        figures = cls()
        for event in as_one_run(events):
            figures.add(event)
        return figures

    def add(self, event: Event) -> None:
        """Takes one more event."""
        self.time_s = max(self.time_s, event.time_s)
        match event:
            case RunStarted():
                self._start(event)
            case WorkerProgress():
                self._add_stretch(event)
            case WorkerTimings():
                present = self.started.workers - len(self.absent) if self.started else 1
                self.timings.add(event, present)
            case CacheUsed():
                self.cache.add(event)
            case ServerProgress():
                self.versions[event.server] = event.version
                self.staleness_of.setdefault(event.server, Staleness()).add(event.staleness)
                self.server_loads.setdefault(event.server, ServerLoad()).add(event)
            case Evaluated():
                self.evaluations.append(event)
            case CheckpointSaved():
                self.checkpoint = event
            case WorkerLost() | WorkerJoined() | Notice():
                self._add_notice(event)
            case RunEnded():
                self.ended = event

    def _start(self, event: RunStarted) -> None:
        if self.started is not None and self.started.workers != event.workers:
            self._furthest.clear()  # others count their steps anew
        self.started = event
        self.absent.clear()

    def _add_notice(self, event: WorkerLost | WorkerJoined | Notice) -> None:
        self.notices.append(event)
        if isinstance(event, WorkerLost):
            self.absent.add(event.worker)
        elif isinstance(event, WorkerJoined):
            self.absent.discard(event.worker)
        elif isinstance(event, Straggler):
            worst = max(self.stragglers.get(event.worker, 0.0), event.slowdown)
            self.stragglers[event.worker] = worst

    def _add_stretch(self, event: WorkerProgress) -> None:
        if self.together is None:
            self.images_seen = self._images_seen_before(event)
        self.images_seen += self._new_images(event)
        stretch = Stretch(
            end_s=event.time_s,
            seconds=event.time_s - self._stretch_start_s(event.worker),
            epoch=event.epoch,
            step=event.step,
            steps=event.steps,
            images=event.images,
            images_seen=self.images_seen,
            loss=event.loss,
            learning_rate=event.learning_rate,
            wait_s=event.wait_s,
        )
        if event.worker in self.workers:
            self.workers[event.worker].add(stretch)
        else:
            self.workers[event.worker] = Series(stretch)
        if self.together is None:
            self.together = Series(stretch)
        else:
            self.together.add(stretch)

    def _stretch_start_s(self, worker: int) -> float:
        start_s = self.started.time_s if self.started else 0.0
        return max(start_s, self.workers[worker].last.end_s) if worker in self.workers else start_s

    def _new_images(self, event: WorkerProgress) -> int:
        """Gives the images of those steps that are not taken again, as after a restart from a checkpoint."""
        furthest = self._furthest[event.worker]
        self._furthest[event.worker] = max(furthest, event.step)
        again = min(event.steps, furthest - (event.step - event.steps))
        return event.images if again <= 0 else round(event.images * (1 - again / event.steps))

    def _images_seen_before(self, first: WorkerProgress) -> int:
        # A resumed run whose earlier part is not at hand: every worker did as many such steps.
        steps_before = first.step - first.steps
        if not steps_before or not first.steps or self.started is None:
            return 0
        return round(self.started.workers * steps_before * first.images / first.steps)

    @property
    def present(self) -> list[Series]:
        """What those workers did that are not lost or gone; of all if only others have reported."""
        count = self.started.workers if self.started else len(self.workers)
        found = [
            series for worker, series in self.workers.items() if worker not in self.absent and worker < count
        ]
        return found or list(self.workers.values())

    @property
    def most_reported(self) -> bool:
        """Whether more than half of the workers that are there have reported, so that sums over all mean something."""
        there = self.started.workers - len(self.absent) if self.started else len(self.workers)
        return bool(self.workers) and 2 * len(self.present) > there

    @property
    def staleness(self) -> Staleness:
        """The staleness at all servers together."""
        return Staleness.merged(self.staleness_of.values())

    @property
    def waiting_share(self) -> float:
        """The fraction of all workers' time that was spent waiting; not a number before the first report."""
        return self.together.total.waiting_share if self.together else math.nan

    @property
    def images_per_s(self) -> float:
        """Images per second of all workers together, from the start to the last report."""
        if self.together is None:
            return math.nan
        # A worker's seconds add up to the time from the start to its last report, without pauses of the run.
        seconds = max(series.total.seconds for series in self.workers.values())
        return self.together.total.images / seconds if seconds > 0 else math.nan

    @property
    def recent_images_per_s(self) -> float:
        """Images per second of all workers that still train, each over its last stretch."""
        rates = [series.last.images_per_s for series in self.present if self.steps_left(series)]
        return sum(rates) if rates else self.images_per_s

    @property
    def recent_loss(self) -> float:
        """Mean training loss over the last stretch of every worker; not a number before the first report."""
        return mean_loss([series.last for series in self.present])

    @property
    def steps_per_worker(self) -> int:
        """Steps that every worker takes over all epochs; 0 before the start."""
        if not self.started:
            return 0
        return self.started.steps or self.started.epochs * self.started.steps_per_epoch

    def steps_left(self, series: Series) -> int:
        """Gives the steps that a worker has still to take."""
        return max(0, self.steps_per_worker - series.last.step)

    @property
    def fraction_done(self) -> float:
        """Steps done by all workers that are there, as a fraction of all their steps."""
        if not self.steps_per_worker or not self.started:
            return 0.0
        done = sum(min(series.last.step, self.steps_per_worker) for series in self.present)
        return done / (self.steps_per_worker * max(1, self.started.workers - len(self.absent)))

    @property
    def time_left_s(self) -> float:
        """Seconds until the slowest worker is through, at each one's mean pace; not a number if unknown."""
        paces = [(self.steps_left(series), series.total) for series in self.present]
        left = [steps * total.seconds / total.steps for steps, total in paces if total.steps]
        return max(left, default=math.nan)
