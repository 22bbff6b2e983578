"""Trials: rehearsals under faults, watched by invariants, one a seed; whatever fails can be repeated.

seed ─▶ faults, step times ─▶ rehearsal in virtual time ─▶ invariants after every event ─▶ what failed, and when
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from polyrhythm.errors import RunError
from polyrhythm.events import Event
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.world import StopRequest
from polyrhythm.simulation.exact_gradients import ExactGradients
from polyrhythm.simulation.injection.fault import Fault
from polyrhythm.simulation.injection.fault_mix import (
    drawn_change_of_lead,
    drawn_deaths,
    drawn_faults,
    leaves_some,
)
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.rehearse import piece_of
from polyrhythm.simulation.scene import Scene
from polyrhythm.simulation.stage import modelled_stage
from polyrhythm.simulation.timeline import Timeline
from polyrhythm.simulation.watch import Watch
from polyrhythm.strategies.invariant import Conditions
from polyrhythm.training.optimizers.sgd import SGD

_DRAWS = 15
_STEPS_OF_PATIENCE = 100
_PASSAGES_TO_SETTLE = 10
"""A new server gets its shards while workers push, and a mean of models breaks when one more dies."""


@dataclass(frozen=True)
class Failure:
    """A seed that failed.

    Attributes:
        seed: which.
        what: the error.
        at_s: virtual seconds.
        faults: that were tried, as text.
        command: repeats it.
    """

    seed: int
    what: str
    at_s: float
    faults: str
    command: str


@dataclass(frozen=True)
class Tried:
    """What became of some seeds.

    Attributes:
        seeds: how many were tried.
        failures: in the order of the seeds.
        seconds: of real time.
    """

    seeds: int
    failures: tuple[Failure, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Gives it as a JSON-able dict."""
        return {
            "seeds": self.seeds,
            "failures": [asdict(entry) for entry in self.failures],
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried.

    Attributes:
        layout: the cluster, and which rank is on which of its hosts.
        rehearsal: what is rehearsed; its batches are taken to be full, and its gradients to be exact.
        faults: what goes wrong beside the faults of the cluster; None draws some from each seed.
        check: whether invariants watch.
        command: gives the command that repeats a seed, from it and its faults as text.
    """

    layout: Layout
    rehearsal: Rehearsal
    faults: tuple[Fault, ...] | None = None
    check: bool = True
    command: Callable[[int, str], str] = lambda seed, faults: f"--seed {seed} --faults {faults!r}"


def faults_text(faults: Iterable[Fault]) -> str:
    """Gives faults as the text that reads back as the same."""
    return "; ".join(map(str, faults))


def faults_of(trial: Trial, seed: int) -> tuple[Fault, ...]:
    """Gives the faults of a seed beside the cluster's own."""
    if trial.faults is not None:
        return trial.faults
    rehearsal = trial.rehearsal
    spares = rehearsal.strategy.spares(rehearsal.workers)
    length_s = rehearsal.steps * _step_s(trial.layout)
    settle_s = _PASSAGES_TO_SETTLE * _passage_s(trial.layout, rehearsal.sizes.nbytes)
    drawn = drawn_faults(trial.layout.cast, seed, length_s, spares=spares, settle_s=settle_s)
    bears = rehearsal.strategy.spares_leader(rehearsal.workers)
    if bears and leaves_some(drawn, spares, to_hand_on=spares < rehearsal.workers):
        drawn += drawn_change_of_lead(seed, rehearsal.steps, length_s)
    if rehearsal.strategy.server_count and rehearsal.strategy.spares_servers((0,)):
        drawn += drawn_deaths(trial.layout.cast.servers, seed, length_s, settle_s)
    return drawn


def _step_s(layout: Layout) -> float:
    """Gives about what a step takes to compute."""
    random = Random(0)
    drawn = sorted(layout.cluster.step_time.draw(random) for _ in range(_DRAWS))
    return drawn[_DRAWS // 2] * max(map(layout.step_factor, layout.cast.workers))


def _passage_s(layout: Layout, nbytes: int) -> float:
    """Gives about what so many bytes take from one host to another, over the slowest link."""
    machines = (layout.cluster.machines[host] for host in layout.hosts_used)
    links = [machine.nic or layout.cluster.nic for machine in machines]
    return max(link.latency_s + nbytes / link.bandwidth_bytes_per_s for link in links)


def play(
    trial: Trial,
    seed: int,
    emit: Callable[[Event], None],
    *,
    stop: StopRequest | None = None,
    timeline: Timeline | None = None,
) -> None:
    """Plays one seed.

    Args:
        trial: what is tried.
        seed: of the step times and of the faults.
        emit: takes the run's events.
        stop: whether someone wants the run to stop.
        timeline: notes what ranks do, if it is wanted.

    Raises:
        RequestError: a fault names nothing of this run.
        RunError: an invariant does not hold, or no rank can go on.
    """
    layout, rehearsal = trial.layout, replace(trial.rehearsal, seed=seed)
    faults = (*layout.cluster.faults, *faults_of(trial, seed))
    watch: Watch | None = None
    if trial.check:
        rehearsal, watch = _watched(trial, rehearsal, faults)
    piece = piece_of(rehearsal, faultless=not faults)
    stage = modelled_stage(layout, piece, emit, seed=seed, stop=stop, timeline=timeline)
    scene = Scene(stage, rehearsal.strategy, faults, seed=seed, host_of=layout.host_of)
    if watch is not None:
        watch.attend(scene)
    try:
        scene.play()
        if watch is not None and not (stop is not None and stop.requested):
            watch.ended(rehearsal.steps)
    except RunError as error:
        error.at_s = scene.time.now()  # type: ignore[attr-defined]
        raise


def _watched(trial: Trial, rehearsal: Rehearsal, faults: tuple[Fault, ...]) -> tuple[Rehearsal, Watch]:
    """Gives the rehearsal with exact gradients, where there are such, and who watches it."""
    workers, numbers = rehearsal.workers, rehearsal.stand_in.numbers
    strategy = rehearsal.strategy
    gradients = None
    if ExactGradients.possible(workers, rehearsal.steps):
        gradients = ExactGradients(numbers, workers)
        rehearsal = replace(
            rehearsal, optimizer=SGD(lr=1, momentum=0), gradient=gradients.fill, epoch_images=0
        )
    step_s = _step_s(trial.layout)
    quick_s = step_s + _passage_s(trial.layout, rehearsal.sizes.nbytes)
    patience_s = _STEPS_OF_PATIENCE * quick_s + sum(fault.holds_up_s(step_s) for fault in faults)
    conditions = Conditions(
        cast=trial.layout.cast,
        numbers=numbers,
        gradient=gradients,
        patience_s=patience_s,
        steps=rehearsal.steps,
    )
    watch = Watch(strategy.invariants(conditions))
    return replace(rehearsal, strategy=watch.watched(strategy)), watch


def try_seeds(
    trial: Trial, seeds: Iterable[int], *, on_failure: Callable[[Failure], bool] = lambda failure: True
) -> Tried:
    """Tries seeds one after the other.

    Args:
        trial: what is tried.
        seeds: in order.
        on_failure: is told every failure; says whether to go on.

    Raises:
        RequestError: a fault names nothing of this run.
    """
    started_s, tried = time.perf_counter(), 0
    failures: list[Failure] = []
    for seed in seeds:
        tried += 1
        try:
            play(trial, seed, _ignore)
        except RunError as error:
            faults = faults_text(faults_of(trial, seed))
            at_s = float(getattr(error, "at_s", 0.0))
            failures.append(Failure(seed, str(error), at_s, faults, trial.command(seed, faults)))
            if not on_failure(failures[-1]):
                break
    return Tried(tried, tuple(failures), time.perf_counter() - started_s)


def _ignore(event: Event) -> None:
    """Takes an event that nobody wants."""
