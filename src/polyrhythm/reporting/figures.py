"""Statistics of a run: its events, folded into the numbers that tables and plots need.

They contain the work of workers between two reports (`Stretch`, in series of bounded length), the staleness of
gradients, the load of servers, and the source of training images: files, or decoded images from a cache.

A resumed run appends to the log of the previous part, its clock starts again at 0, and it repeats the work since the
checkpoint that it resumed from. It is read as one run:

    first part    |---epoch 0---|---epoch 1---C--epoch 2--x        C: checkpoint, x: killed
    second part                               |---epoch 2---|---epoch 3---|
    one run       |---epoch 0---|---epoch 1---|---epoch 2---|---epoch 3---|
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polyrhythm.events import (
    BatchesBalanced,
    CacheUsed,
    CheckpointSaved,
    Evaluated,
    Event,
    ImagesLeftOut,
    InputWaited,
    NoiseMeasured,
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
from polyrhythm.reporting.quantities import percent, whole
from polyrhythm.reporting.timings import Timings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class RunFigures:
    """Sums over the events of one run, in bounded memory.

    Attributes:
        time_s: time of the latest event, in seconds since training started.
        images_seen: images seen by all workers together, over all epochs.
        tested_images: images seen before the model of the newest test, over all epochs.
        workers: statistics of every worker, by its index.
        together: statistics of all workers, in the order of their reports; None before the first.
        versions, staleness_of, server_loads: statistics of every server, by its index.
        absent: indices of failed workers without a replacement.
        notices: everything the user should know, losses of workers included.
        stragglers: the worst ratio of a named straggler's step time to the median, by worker.
        left_out: names of images that could not be read.
        testing_s: seconds without steps while the model was tested; without those after the last step.
        input_waits: waiting for batches, by worker.
        balanced: whether shares of batches have followed the workers' speeds.
    """

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.time_s = 0.0
        self.images_seen = self.tested_images = 0
        self._seen_at: deque[tuple[float, int, int]] = deque(maxlen=_MOST_REPORTS)
        """Times and epochs of reports since the newest test, and the images seen by then."""
        self._furthest: Counter[int] = Counter()
        self.workers: dict[int, Series] = {}
        self.together: Series | None = None
        self.versions: dict[int, int] = {}
        self.staleness_of: dict[int, Staleness] = {}
        self.server_loads: dict[int, ServerLoad] = {}
        self.timings = Timings()
        self.cache = CacheFigures()
        self.input_waits: dict[int, InputWaits] = {}
        self.balanced = False
        self.noise: list[NoiseMeasured] = []
        self.evaluations: list[Evaluated] = []
        self.absent: set[int] = set()
        self.notices: list[Notice | WorkerLost | WorkerJoined] = []
        self.stragglers: dict[int, float] = {}
        self.left_out: set[str] = set()
        self.checkpoint: CheckpointSaved | None = None
        self.testing_s = 0.0
        self._testing_s = 0.0  # since the last step
        self._latest_s = 0.0
        self._part: RunFigures | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunFigures:
        """Fold a whole log; one that was resumed becomes one run."""
        figures = cls()
        for event in as_one_run(events):
            figures.add(event)
        return figures

    @property
    def latest(self) -> RunFigures:
        """Figures since the run was resumed with other workers or another strategy, if it was; else of all of it."""
        return self if self._part is None or self._part.together is None else self._part

    def add(self, event: Event) -> None:
        """Handle one more event."""
        self.time_s = max(self.time_s, event.time_s)
        match event:
            case RunStarted():
                self._start(event)
            case WorkerProgress():
                self.testing_s += self._testing_s
                self._testing_s = 0.0
                self._since_latest_s(event)
                self._add_stretch(event)
                self._seen_at.append((event.time_s, event.epoch, self.images_seen))
            case WorkerTimings():
                present = self.started.workers - len(self.absent) if self.started else 1
                self.timings.add(event, present)
            case CacheUsed():
                self.cache.add(event)
            case InputWaited():
                self.input_waits.setdefault(event.worker, InputWaits()).add(event)
            case BatchesBalanced():
                self.balanced = True
            case NoiseMeasured():
                self.noise.append(event)
                if len(self.noise) > _MOST_NOISE:
                    self.noise = _in_pairs(self.noise)
            case ServerProgress():
                self.versions[event.server] = event.version
                self.staleness_of.setdefault(event.server, Staleness()).add(event.staleness)
                self.server_loads.setdefault(event.server, ServerLoad()).add(event)
            case Evaluated():
                self.evaluations.append(event)
                self.tested_images = self._images_at(event)
                if event.snapshot_s is None:
                    self._testing_s += self._since_latest_s(event)
            case CheckpointSaved():
                self.checkpoint = event
            case WorkerLost() | WorkerJoined() | Notice():
                self._add_notice(event)
            case RunEnded():
                self.ended = event
        if self._part is not None:
            self._part.add(event)

    def _images_at(self, event: Evaluated) -> int:
        """Return the images seen before the tested model."""
        if event.snapshot_s is None:
            self._seen_at.clear()
            return self.images_seen
        images, free = self.tested_images, self.started is None or self.started.free_running
        while self._seen_at:
            time_s, epoch, seen = self._seen_at[0]
            # Workers' times have origins of their own; where workers wait for each other, epochs have the order.
            if time_s > event.snapshot_s if free else epoch >= event.epoch:
                break
            images = seen
            self._seen_at.popleft()
        return images

    def _since_latest_s(self, event: Event) -> float:
        """Return the seconds since the latest report of any rank; 0 if steps may have been taken in between."""
        seconds = event.time_s - self._latest_s
        self._latest_s = max(self._latest_s, event.time_s)
        if self.together is None or self.started is None or seconds <= 0:
            return 0.0
        epoch_over = (
            self.started.steps_per_epoch and self.together.last.step % self.started.steps_per_epoch == 0
        )
        return seconds if epoch_over or self.started.deal else 0.0

    def _start(self, event: RunStarted) -> None:
        self._testing_s = 0.0
        self._latest_s = event.time_s
        before = self.started
        if before is None or _are_others(before, event):
            self._furthest.clear()  # others count their steps from the start
            if event.images_before is not None:  # earlier reports may contain more than counts
                self.images_seen = event.images_before
            if before is not None and self.together is not None:
                self._part = RunFigures()
        self.started = event
        self.absent.clear()

    def _add_notice(self, event: WorkerLost | WorkerJoined | Notice) -> None:
        self.notices.append(event)
        if isinstance(event, WorkerLost):
            self.absent.add(event.worker)
        elif isinstance(event, WorkerJoined):
            self.absent.discard(event.worker)
        elif isinstance(event, ImagesLeftOut):
            self.left_out.update(event.files)
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
            stage_s=event.stage_s,
            exchange_s=event.exchange_s,
            exchange_processor_s=event.exchange_processor_s,
            processor_s=event.processor_s,
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
        """Return the images of those steps that are not taken again, as after a restart from a checkpoint."""
        furthest = self._furthest[event.worker]
        self._furthest[event.worker] = max(furthest, event.step)
        again = min(event.steps, furthest - (event.step - event.steps))
        return event.images if again <= 0 else round(event.images * (1 - again / event.steps))

    def _images_seen_before(self, first: WorkerProgress) -> int:
        # A resumed run without its earlier part: every worker has done this many steps.
        steps_before = first.step - first.steps
        if self.started is None or self.started.images_before is not None:
            return self.images_seen
        if not steps_before or not first.steps:
            return 0
        return round(self.started.workers * steps_before * first.images / first.steps)

    @property
    def present(self) -> list[Series]:
        """Series of the workers that have not failed or left; of all workers if only those have reported."""
        count = self.started.workers if self.started else len(self.workers)
        found = [
            series for worker, series in self.workers.items() if worker not in self.absent and worker < count
        ]
        return found or list(self.workers.values())

    @property
    def most_reported(self) -> bool:
        """Whether more than half of the present workers have reported, so that sums over all are meaningful."""
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
        drawn = self.started is not None and self.started.images > 0
        rates = [series.last.images_per_s for series in self.present if drawn or self.steps_left(series)]
        return sum(rates) if rates else self.images_per_s

    @property
    def sustained_images_per_s(self) -> float:
        """Images per second while all workers were at work: between the last first report of one, and the first last.

        Not a number where there is no such time.
        """
        every = [series.stretches for series in self.present]
        start_s = max((stretches[0].end_s for stretches in every), default=math.nan)
        end_s = min((stretches[-1].end_s for stretches in every), default=math.nan)
        if not end_s > start_s:
            return math.nan
        images = sum(stretch.images_between(start_s, end_s) for stretches in every for stretch in stretches)
        return images / (end_s - start_s)

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
        """Return the steps that a worker has still to take."""
        return max(0, self.steps_per_worker - series.last.step)

    @property
    def fraction_done(self) -> float:
        """Progress as a fraction of the run: of its images with dynamic batches, else of the workers' steps."""
        if self.started and self.started.images:
            return min(1.0, self.images_seen / self.started.images)
        if not self.steps_per_worker or not self.started:
            return 0.0
        done = sum(min(series.last.step, self.steps_per_worker) for series in self.present)
        return done / (self.steps_per_worker * max(1, self.started.workers - len(self.absent)))

    @property
    def time_left_s(self) -> float:
        """Seconds until the slowest worker is through, at each one's mean pace; not a number if unknown.

        Where workers draw their batches, all are through at once.
        """
        if self.started and self.started.images:
            left_images = max(0, self.started.images - self.images_seen)
            return left_images / self.images_per_s if self.images_per_s > 0 else math.nan
        paces = [(self.steps_left(series), series.total) for series in self.present]
        left = [steps * total.seconds / total.steps for steps, total in paces if total.steps]
        return max(left, default=math.nan)


def as_one_run(events: Iterable[Event]) -> list[Event]:
    """Drop the steps and tests that a resumed run repeated, and shift every part in time to follow the previous one.

    Of parts with equal workers, the last one's start is that of all.
    """
    kept: list[Event] = []
    shift_s, resumed = 0.0, False
    for event in events:
        if isinstance(event, RunStarted) and kept:
            resumed = True
            checkpoint = _resumed_from(kept, event)
            again = not _continues_after(kept[-1], event)
            kept = [
                old
                for old in kept
                if not isinstance(old, RunEnded)
                and (not isinstance(old, RunStarted) or _are_others(old, event))
                and not (again and not _counts(old, checkpoint))
            ]
            shift_s = max(0.0, checkpoint.time_s - event.time_s)
        kept.append(_shifted(event, shift_s) if shift_s else event)
    newest = {(event.epoch, event.step): event for event in kept if isinstance(event, Evaluated)}
    return [
        event
        for event in kept
        if not (resumed and isinstance(event, Evaluated)) or newest[event.epoch, event.step] is event
    ]


def _shifted(event: Event, seconds: float) -> Event:
    """Return an event with all its times later by `seconds`."""
    if isinstance(event, Evaluated) and event.snapshot_s is not None:
        event = replace(event, snapshot_s=event.snapshot_s + seconds)
    return replace(event, time_s=event.time_s + seconds)


def _continues_after(last: Event, start: RunStarted) -> bool:
    """Whether a run begins where the one before had ended well."""
    if not isinstance(last, RunEnded) or last.outcome != "done":
        return False
    return bool(last.result.get("epochs", math.inf) <= start.start_epoch)


def _are_others(before: RunStarted, after: RunStarted) -> bool:
    """Return whether a run was resumed with another number of workers or strategy."""
    return (before.workers, before.strategy) != (after.workers, after.strategy)


def _resumed_from(events: list[Event], start: RunStarted) -> CheckpointSaved:
    saved = [event for event in reversed(events) if isinstance(event, CheckpointSaved)]
    of_epoch = [event for event in saved if event.epoch == start.start_epoch]
    for event in of_epoch:
        if event.step == start.resumed_step:  # else other workers resume, with other counts of steps
            return event
    if of_epoch:
        return of_epoch[0]
    # No checkpoint of that epoch was logged: cut where that epoch began, as closely as step counts allow.
    step = start.start_step or start.start_epoch * start.steps_per_epoch
    done = [event.time_s for event in events if isinstance(event, WorkerProgress) and event.step <= step]
    return CheckpointSaved(time_s=max(done, default=0.0), path="", epoch=start.start_epoch, step=step)


def _counts(event: Event, checkpoint: CheckpointSaved) -> bool:
    match event:
        case WorkerProgress():  # a slower worker's steps behind the checkpoint are below its step
            return event.step <= checkpoint.step and event.time_s <= checkpoint.time_s
        case WorkerTimings() | NoiseMeasured():
            return event.step <= checkpoint.step
        case Evaluated():
            return event.epoch <= checkpoint.epoch
        case ServerProgress() | CacheUsed() | InputWaited():
            return event.time_s <= checkpoint.time_s
        case _:
            return True


@dataclass(kw_only=True, slots=True)  # frozen ones take thrice as long to make, and a long log makes many
class Stretch:
    """One period of training; immutable.

    Attributes:
        end_s: end, in seconds since training started.
        epoch: epoch in which it ended, from 0.
        step: steps done at its end, since the run began; `steps`: steps in it.
        images_seen: images seen by all workers together at its end.
        loss: mean training loss of its images.
        learning_rate: learning rate at its end.
        wait_s: seconds of it that were spent waiting for others.
        stage_s: seconds of `wait_s` spent waiting for other stages of a pipeline.
        exchange_s: seconds of `wait_s` that the exchanges themselves took; 0: unknown.
        exchange_processor_s: seconds of these in which the processor was busy with others.
        processor_s: seconds of it, without `wait_s`, in which the processor was busy with others.
    """

    end_s: float
    seconds: float
    epoch: int
    step: int
    steps: int
    images: int
    images_seen: int
    loss: float
    learning_rate: float
    wait_s: float
    stage_s: float = 0.0
    exchange_s: float = 0.0
    exchange_processor_s: float = 0.0
    processor_s: float = 0.0

    @property
    def images_per_s(self) -> float:
        """Images seen per second; not a number if no time passed."""
        return self.images / self.seconds if self.seconds > 0 else math.nan

    def images_between(self, start_s: float, end_s: float) -> float:
        """Return its images in a span of time, if it took them at one rate."""
        overlap = min(end_s, self.end_s) - max(start_s, self.end_s - self.seconds)
        return self.images * overlap / self.seconds if overlap > 0 else 0.0

    @property
    def waiting_share(self) -> float:
        """The fraction of the time that was spent waiting; not a number if no time passed."""
        return self.wait_s / self.seconds if self.seconds > 0 else math.nan


def mean_loss(stretches: Sequence[Stretch]) -> float:
    """Return the mean loss of all images of some stretches; not a number if there are none."""
    images = sum(stretch.images for stretch in stretches)
    # An empty stretch is ignored, even if its loss is NaN.
    total = sum(stretch.loss * stretch.images for stretch in stretches if stretch.images)
    return total / images if images else math.nan


def merged(first: Stretch, *others: Stretch) -> Stretch:
    """Return the union of adjacent stretches; exact, since rates and means follow from the sums."""
    if not others:
        return first
    every, last = (first, *others), others[-1]
    return Stretch(
        end_s=last.end_s,
        seconds=sum([each.seconds for each in every]),
        epoch=last.epoch,
        step=last.step,
        steps=sum([each.steps for each in every]),
        images=sum([each.images for each in every]),
        images_seen=last.images_seen,
        loss=mean_loss(every),
        learning_rate=last.learning_rate,
        wait_s=sum([each.wait_s for each in every]),
        stage_s=sum([each.stage_s for each in every]),
        exchange_s=sum([each.exchange_s for each in every]),
        exchange_processor_s=sum([each.exchange_processor_s for each in every]),
        processor_s=sum([each.processor_s for each in every]),
    )


class Series:
    """The stretches of one worker, or of several; adjacent ones are merged if there are more than `limit`.

    Attributes:
        added: number of added stretches, merged ones included.
    """

    def __init__(self, first: Stretch, limit: int = 600) -> None:
        self.stretches = [first]
        self.last = first
        self.added = 1
        self._limit = limit
        self._total = first
        self._since: list[Stretch] = []

    @property
    def total(self) -> Stretch:
        """All stretches in one."""
        if self._since:
            self._total = merged(self._total, *self._since)
            self._since.clear()
        return self._total

    def add(self, stretch: Stretch) -> None:
        """Append a stretch."""
        self.last = stretch
        self.added += 1
        self._since.append(stretch)
        self.stretches.append(stretch)
        # A run of days must neither fill the memory of its progress display nor make a report of 100 MB.
        if len(self.stretches) > self._limit:
            self.stretches = grouped(self.stretches, 2)
            self._total, self._since = self.total, []


def grouped(stretches: list[Stretch], size: int) -> list[Stretch]:
    """Merge every `size` neighbors into one stretch; the last group may hold fewer."""
    return [merged(*stretches[start : start + size]) for start in range(0, len(stretches), size)]


class Staleness:
    """How many gradients were applied at which staleness (versions between read and apply; fresh = 0)."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, counts: Mapping[int, int]) -> None:
        """Add more gradients, counted by staleness."""
        self.counts.update(counts)

    @classmethod
    def merged(cls, parts: Iterable[Staleness]) -> Staleness:
        """Put the counts of several servers into one."""
        whole = cls()
        for part in parts:
            whole.add(part.counts)
        return whole

    @property
    def histogram(self) -> dict[int, int]:
        """The counts in rising order of staleness."""
        return dict(sorted(self.counts.items()))

    @property
    def mean(self) -> float:
        """The mean over all gradients; not a number if there are none."""
        gradients = self.counts.total()
        return (
            sum(staleness * count for staleness, count in self.counts.items()) / gradients
            if gradients
            else math.nan
        )

    @property
    def max(self) -> int:
        """The largest that occurred; 0 if there were no gradients."""
        return max((staleness for staleness, count in self.counts.items() if count), default=0)


class ServerLoad:
    """Sums over the reports of a server.

    Attributes:
        updating_s: seconds of `busy_s` spent on updates.
        held_s: seconds for which workers' gradients waited for others'.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.dropped = 0
        self.gradients = 0
        self.busy_s = 0.0
        self.updating_s = self.held_s = 0.0
        self._queue_s = 0.0

    def add(self, event: ServerProgress) -> None:
        """Add one more stretch."""
        self.seconds += event.seconds
        self.dropped = event.dropped
        self.gradients += sum(event.staleness.values())
        self.busy_s += event.busy_share * event.seconds
        self.updating_s += event.updating_s
        self.held_s += event.held_s
        self._queue_s += event.queue * event.seconds

    @property
    def busy_share(self) -> float:
        """Fraction of its time in which it did not wait for messages; 0 before its first report."""
        return self.busy_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def queue(self) -> float:
        """Mean number of waiting messages; 0 before its first report."""
        return self._queue_s / self.seconds if self.seconds > 0 else 0.0


_MOST_NOISE = 512
_MOST_REPORTS = 1 << 14


def _in_pairs(measured: Sequence[NoiseMeasured]) -> list[NoiseMeasured]:
    """Add every two neighbors up; of an odd number the last stays."""
    pairs = [
        replace(
            later,
            measured=one.measured + later.measured,
            noise=one.noise + later.noise,
            signal=one.signal + later.signal,
        )
        for one, later in zip(measured[::2], measured[1::2], strict=False)
    ]
    return [*pairs, *measured[len(measured) // 2 * 2 :]]


_ENOUGH = 10
"""Minimum number of comparisons for a noise scale to be reported."""


def noise_scale(measured: Sequence[NoiseMeasured]) -> dict[str, Any] | None:
    """Return the gradient noise scale of the latter half of a run, JSON-able; None where too little is known of it.

    It grows while a network learns: a run's first steps would make it too small.
    """
    half = measured[-1].step / 2 if measured else 0.0
    late = [event for event in measured if event.step >= half]
    signal, noise = sum(event.signal for event in late), sum(event.noise for event in late)
    if sum(event.measured for event in late) < _ENOUGH or not (signal > 0 and noise > 0):
        return None
    scale, images = noise / signal, late[-1].images
    return {
        "images": scale,
        "batch": images,
        "text": f"larger batches stop paying at about {float(f'{scale:.2g}'):,.0f} images (gradient noise scale; this "
        f"run's steps have {images:,})",
    }


@dataclass
class InputWaits:
    """Sums over what a worker reports of its waiting for batches; attributes are those of the event."""

    seconds: float = 0.0
    busy_s: float = 0.0
    testing_s: float = 0.0

    def add(self, event: InputWaited) -> None:
        """Add a report."""
        self.seconds += event.seconds
        self.busy_s += event.busy_s
        self.testing_s += event.testing_s


class CacheFigures:
    """Sums over what workers report of their caches: images requested, and how many of them were kept."""

    def __init__(self) -> None:
        self.images = 0
        self.hits = 0
        self._kept_bytes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return self.images > 0

    def add(self, event: CacheUsed) -> None:
        """Add a worker's report."""
        self.images += event.images
        self.hits += event.hits
        self._kept_bytes[event.worker] = event.kept_bytes

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict; `kept_bytes` is what the worker that keeps most has, or shares with others."""
        return {
            "images": self.images,
            "hits": self.hits,
            "hit_share": self.hits / self.images if self.images else 0.0,
            "kept_bytes": max(self._kept_bytes.values(), default=0),
        }


def cache_line(cache: Mapping[str, Any]) -> str:
    """Write `CacheFigures.to_json` for people."""
    return (
        f"{percent(cache['hit_share'])} of the {whole(cache['images'])} requested training images were served "
        f"decoded from memory ({cache['kept_bytes'] / 1e6:,.1f} MB)"
    )
