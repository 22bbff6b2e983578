"""Trials: dry runs under faults, watched by invariants, one for each seed; a failure can be repeated.

seed ─▶ faults, step times ─▶ dry run in virtual time ─▶ invariants after every event ─▶ what failed, and when

Faults are a mix drawn from the seed: such as real clusters have, and links of TCP let through. Gradients are
whole numbers (`ExactGradients`) with exact sums and means, so that a lost or doubled one shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from random import Random

import torch
from torch import Tensor

from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.data.seeding import seed_for
from polyrhythm.errors import RunError
from polyrhythm.events import Event
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.world import LEADER, StopRequest
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.injection.fault import Fault
from polyrhythm.simulation.injection.faults.cut import Cut
from polyrhythm.simulation.injection.faults.delay import Delay
from polyrhythm.simulation.injection.faults.kill import Kill
from polyrhythm.simulation.injection.faults.slow import Slow
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.run import program_of
from polyrhythm.simulation.simulated_run import modeled_run
from polyrhythm.simulation.timeline import Timeline
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.training.optimizers.sgd import SGD
from polyrhythm.verification.families import invariants_for
from polyrhythm.verification.invariant import Conditions, Watch

_DRAWS = 15
_STEPS_OF_PATIENCE = 100
_PASSAGES_TO_SETTLE = 10
"""A new server gets its shards while workers push, and a mean of models breaks when one more dies."""


@dataclass(frozen=True)
class Failure:
    """A seed that failed.

    Attributes:
        seed: the seed.
        what: the error.
        at_s: virtual seconds.
        faults: faults that were tried, as text.
        command: repeats it.
    """

    seed: int
    what: str
    at_s: float
    faults: str
    command: str


@dataclass(frozen=True)
class Tried:
    """The outcome of some seeds.

    Attributes:
        seeds: number of seeds tried.
        failures: failures in the order of the seeds.
        seconds: seconds of real time.
    """

    seeds: int
    failures: tuple[Failure, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings of a trial with any seed.

    Attributes:
        layout: the cluster, and which rank is on which of its hosts.
        dry_run: the dry run; its batches are taken to be full, and its gradients to be exact.
        faults: faults in addition to those of the cluster; None draws some from each seed.
        check: whether invariants are checked.
        command: returns the command that repeats a seed, from it and its faults as text.
    """

    layout: Layout
    dry_run: DryRun
    faults: tuple[Fault, ...] | None = None
    check: bool = True
    command: Callable[[int, str], str] = lambda seed, faults: f"--seed {seed} --faults {faults!r}"


def faults_text(faults: Iterable[Fault]) -> str:
    """Return faults as text that reads back as the same."""
    return "; ".join(map(str, faults))


def faults_of(trial: Trial, seed: int) -> tuple[Fault, ...]:
    """Return the faults of a seed next to the cluster's own."""
    if trial.faults is not None:
        return trial.faults
    dry_run = trial.dry_run
    faults = dry_run.faults
    spares = faults.spares
    length_s = dry_run.steps * _step_s(trial.layout)
    settle_s = _PASSAGES_TO_SETTLE * _passage_s(trial.layout, dry_run.sizes.nbytes)
    drawn = drawn_faults(trial.layout.roles, seed, length_s, spares=spares, settle_s=settle_s)
    if faults.leader and leaves_some(drawn, spares, to_pass_on=spares < dry_run.workers):
        drawn += drawn_change_of_lead(seed, dry_run.steps, length_s)
    if dry_run.traits.servers and faults.keeps_shards((0,)):
        drawn += drawn_deaths(trial.layout.roles.servers, seed, length_s, settle_s)
    return drawn


def _step_s(layout: Layout) -> float:
    """Return about how long a step computes."""
    random = Random(0)
    drawn = sorted(layout.cluster.step_time.draw(random) for _ in range(_DRAWS))
    return drawn[_DRAWS // 2] * max(map(layout.step_factor, layout.roles.workers))


def _passage_s(layout: Layout, nbytes: int) -> float:
    """Return the approximate seconds that `nbytes` bytes take from one host to another, over the slowest link."""
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
    """Run one seed to the end; see `prepare`.

    Raises:
        RunError: an invariant does not hold, or no rank can continue; virtual time then stops.
    """
    _, run = prepare(trial, seed, emit, stop=stop, timeline=timeline)
    run()


def prepare(
    trial: Trial,
    seed: int,
    emit: Callable[[Event], None],
    *,
    stop: StopRequest | None = None,
    timeline: Timeline | None = None,
) -> tuple[VirtualTime, Callable[[], None]]:
    """Return the virtual time of one seed's run, and what runs it to the end.

    Args:
        trial: settings of the trial.
        seed: seed of the step times and of the faults.
        emit: receiver of the run's events.
        stop: whether the run is asked to stop.
        timeline: records what ranks do; None: nothing is recorded.

    Raises:
        RequestError: a fault names a rank or host that is not there.
    """
    layout, dry_run = trial.layout, replace(trial.dry_run, seed=seed)
    faults = (*layout.cluster.faults, *faults_of(trial, seed))
    conditions: Conditions | None = None
    if trial.check:
        dry_run, conditions = _watchable(trial, dry_run, faults)
    program = program_of(dry_run, faultless=not faults)
    run = modeled_run(layout, program, emit, seed=seed, stop=stop, timeline=timeline)
    injector = FaultInjector(run, dry_run.strategy, faults, seed=seed, host_of=layout.host_of)
    watch: Watch | None = None
    if conditions is not None:
        invariants = invariants_for(dry_run.strategy, conditions)
        watch = Watch(invariants, layout.roles, run.time.now, lambda: run.cluster.ranks)
        run.observer, injector.links.on_arrival = watch, watch.delivered

    def to_the_end() -> None:
        injector.play()
        if watch is not None and not run.stop.requested:
            watch.ended(dry_run.steps, drawn=dry_run.draws)

    return injector.time, to_the_end


def _watchable(trial: Trial, dry_run: DryRun, faults: tuple[Fault, ...]) -> tuple[DryRun, Conditions]:
    """Return the dry run with exact gradients, where there are such, and what invariants may know of it."""
    workers, numbers = dry_run.workers, dry_run.stand_in.numbers
    gradients = None
    roles, units = trial.layout.roles, dry_run.units if dry_run.draws else ()
    units = tuple(tuple(roles.workers[worker] for worker in unit) for unit in units)
    if ExactGradients.possible(workers, dry_run.steps):
        gradients = ExactGradients(numbers, workers)
        dry_run = replace(dry_run, optimizer=SGD(lr=1, momentum=0), gradient=gradients.fill, epoch_images=0)
    step_s = _step_s(trial.layout)
    quick_s = step_s + _passage_s(trial.layout, dry_run.sizes.nbytes)
    patience_s = _STEPS_OF_PATIENCE * quick_s + sum(fault.holds_up_s(step_s) for fault in faults)
    conditions = Conditions(
        roles=roles,
        numbers=numbers,
        gradient=gradients,
        patience_s=patience_s,
        steps=dry_run.steps,
        units=units,
        buckets=len(dry_run.stand_in.buckets),
    )
    return dry_run, conditions


def try_seeds(
    trial: Trial, seeds: Iterable[int], *, on_failure: Callable[[Failure], bool] = lambda failure: True
) -> Tried:
    """Run seeds one after the other.

    Args:
        trial: settings of the trial.
        seeds: seeds in order.
        on_failure: callback with every failure; returns whether to continue.

    Raises:
        RequestError: a fault names a rank or host that is not there.
    """
    started_s, tried = time.perf_counter(), 0
    failures: list[Failure] = []
    for seed in seeds:
        tried += 1
        virtual_time, run = prepare(trial, seed, lambda event: None)
        try:
            run()
        except RunError as error:
            faults = faults_text(faults_of(trial, seed))
            at_s = virtual_time.now()
            failures.append(Failure(seed, str(error), at_s, faults, trial.command(seed, faults)))
            if not on_failure(failures[-1]):
                break
    return Tried(tried, tuple(failures), time.perf_counter() - started_s)


_MOST = 3
_ALONE, _SETTLED = 0.5, 0.5
"""Share of needed ranks without a replacement; share of a run in which a replacement is spared to get its shards."""


def drawn_faults(
    roles: RoleAssignment, seed: int, length_s: float, *, spares: int, settle_s: float = 0.0
) -> tuple[Fault, ...]:
    """Return one to three faults, drawn.

    Messages are neither dropped, duplicated nor corrupted, since no strategy is meant to survive that.

    Args:
        roles: ranks by role.
        seed: seed of the draw.
        length_s: approximate length of the run in seconds.
        spares: number of workers that may be missing at once; for the coordinator see `drawn_change_of_lead`.
        settle_s: minimum mean time between recurring deaths.
    """
    random = Random(seed_for("fault mix", seed))
    calm = [_slow, _delay, _cut]
    bounded = spares < len(roles.workers) - 1
    kills = [_kill, _kill, _kill if bounded else _kills] if len(roles.workers) > 1 else []
    found: list[Fault] = []
    for _ in range(random.randint(1, _MOST)):
        found.append(random.choice(calm + kills if spares > 0 else calm)(roles, random, length_s))
        if bounded and found[-1].name == Kill.name:
            spares -= 1
    return tuple(_spread_out(fault, settle_s) for fault in found)


def drawn_death(ranks: Sequence[int], seed: int, length_s: float) -> Kill:
    """Return the death of one of some ranks, without a replacement.

    Args:
        ranks: ranks; one of them dies.
        seed: seed of the draw.
        length_s: approximate length of the run in seconds.
    """
    random = Random(seed_for("death", seed))
    return Kill(rank=random.choice(ranks), at_s=_rounded(length_s * random.uniform(0.001, 1)))


def leaves_some(faults: Sequence[Fault], spares: int, *, to_pass_on: bool) -> bool:
    """Return whether worker 0 may be lost next to the workers that these faults kill.

    Args:
        faults: faults that have been drawn.
        spares: number of workers that may be missing at once.
        to_pass_on: whether one of the others must hold the state that a replacement needs, and so must never
            be lost.
    """
    kills = [fault for fault in faults if isinstance(fault, Kill)]
    endless = any(kill.every_s is not None for kill in kills)
    return len(kills) < spares and not (to_pass_on and endless)


def drawn_change_of_lead(seed: int, steps: int, length_s: float) -> tuple[Fault, ...]:
    """Return, for every other seed, the death of worker 0 after some step, with a replacement.

    Args:
        seed: seed of the draw.
        steps: steps that every worker takes.
        length_s: approximate length of the run in seconds.
    """
    random = Random(seed_for("change of lead", seed))
    if steps < 2 or random.random() < 0.5:
        return ()
    restart_s = random.choice([0.0, _rounded(length_s * random.uniform(0, 0.2))])
    return (Kill(rank=LEADER, after_step=random.randrange(1, steps), restart_after_s=restart_s),)


def drawn_deaths(ranks: Sequence[int], seed: int, length_s: float, settle_s: float) -> tuple[Fault, ...]:
    """Return the death of one of some ranks; every other time with a replacement, and another death some time after.

    Args:
        ranks: ranks; one of them dies.
        seed: seed of the draw.
        length_s: approximate length of the run in seconds.
        settle_s: seconds added to the time between both deaths, since a replacement's links are no quicker.
    """
    first = drawn_death(ranks, seed, length_s)
    random = Random(seed_for("deaths", seed))
    if random.random() < _ALONE or first.at_s is None:
        return (first,)
    restart_s = _rounded(length_s * random.uniform(0, 0.2))
    others = [rank for rank in ranks if rank != first.rank]
    later_s = first.at_s + restart_s + settle_s + length_s * random.uniform(_SETTLED, 1)
    again = Kill(
        rank=random.choice(others), at_s=_rounded(later_s), restart_after_s=_restart(random, length_s)
    )
    return first.model_copy(update={"restart_after_s": restart_s}), again


def _rounded(seconds: float) -> float:
    """Return a time short enough for a command line."""
    return float(f"{seconds:.3g}")


def _window(random: Random, length_s: float) -> tuple[float, float]:
    begin = random.uniform(0, length_s)
    return _rounded(begin), _rounded(begin + length_s * random.uniform(0.01, 0.3) + 1e-9)


def _slow(roles: RoleAssignment, random: Random, length_s: float) -> Fault:
    from_s, to_s = _window(random, length_s)
    factor = _rounded(random.uniform(1.5, 10))
    return Slow(rank=random.choice(roles.workers), factor=factor, from_s=from_s, to_s=to_s)


def _delay(roles: RoleAssignment, random: Random, length_s: float) -> Fault:
    seconds = _rounded(length_s * random.uniform(0.001, 0.1))
    return Delay(seconds=seconds, probability=_rounded(random.uniform(0.01, 0.3)))


def _cut(roles: RoleAssignment, random: Random, length_s: float) -> Fault:
    from_s, to_s = _window(random, length_s)
    return Cut(source=random.randrange(roles.size), from_s=from_s, to_s=to_s)


def _kill(roles: RoleAssignment, random: Random, length_s: float) -> Fault:
    rank = random.choice([rank for rank in roles.workers if rank != LEADER])
    at_s = _rounded(length_s * random.uniform(0.001, 1))
    return Kill(rank=rank, at_s=at_s, restart_after_s=_restart(random, length_s))


def _kills(roles: RoleAssignment, random: Random, length_s: float) -> Fault:
    every_s = _rounded(length_s * random.uniform(0.5, 1))  # so that a group gets through a step in between
    return Kill(rank="any", every_s=every_s, restart_after_s=_restart(random, length_s))


def _spread_out(fault: Fault, settle_s: float) -> Fault:
    """Let survivors have the time that the model takes on the links, before the next worker dies."""
    if not isinstance(fault, Kill) or fault.every_s is None or fault.every_s >= settle_s:
        return fault
    return fault.model_copy(update={"every_s": _rounded(settle_s)})


def _restart(random: Random, length_s: float) -> float | None:
    """Return when a replacement starts: never, at once (before any rank has noticed the death), or later."""
    return random.choice([None, 0.0, _rounded(length_s * random.uniform(0, 0.2))])


_ROWS, _LARGEST = 61, 3
_EXACT = 1 << 24
"""Up to here float32 holds every whole number."""


class ExactGradients:
    """A table of random rows, one for each step of each worker.

    Numbers are multiples of all counts up to the number of workers, so the mean of any of them is a whole number.

    Args:
        numbers: numbers of a gradient.
        workers: number of workers.
    """

    def __init__(self, numbers: int, workers: int) -> None:
        generator = torch.Generator().manual_seed(numbers)
        rows = torch.randint(-_LARGEST, _LARGEST, (_ROWS, numbers), generator=generator)
        rows += rows >= 0  # none is zero, so a lost one always shows
        self._rows = rows.float() * lcm(*range(1, workers + 1))

    @staticmethod
    def possible(workers: int, steps: int) -> bool:
        """Return whether all sums stay exact in float32."""
        return workers < 20 and lcm(*range(1, workers + 1)) * _LARGEST * workers * steps < _EXACT

    def __call__(self, worker: int, step: int) -> Tensor:
        """Return a worker's gradient, `(numbers,)`; not to be changed."""
        return self._rows[(17 * worker + step) % _ROWS]

    def fill(self, worker: int, step: int, gradients: Tensor) -> None:
        """Write a worker's gradient into `gradients`."""
        gradients.copy_(self(worker, step))
