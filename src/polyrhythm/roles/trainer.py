"""The training loop: one for real runs, dry runs, and loops that users write.

A `Trainer` keeps one worker among the others; what it trains is its `Workload`. `TrainingRun` drives it through
a run, with a network and data (`ModelWorkload`) or with a model that weighs nothing (`DryWorkload`). The loop
that a user writes drives it by `LoopSteps`.

    TrainingRun                                  a user's loop
      open                                         open                 at the model's first use in training
      ( begin ─▶ compute ─▶ exchange ─▶ check )…   ( begin ─▶ exchange )…     gradients are there already
      settle, present, catch_up    each epoch      settle, catch_up     each epoch
      close                                        close

Where workers regroup, a step that is interrupted by a failure is repeated among the remaining workers:

    contributions kept:        exchange ✝ ─▶ regroup ─▶ the same exchange, or its result from another worker
    sums in place:             exchange ✝ ─▶ regroup ─▶ batches from the present position

A user's loop cannot compute its gradients again, so its contributions are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from polyrhythm.communication.activity import Blocked
from polyrhythm.communication.communicator import Communicator, all_ranks
from polyrhythm.communication.exchanger import Again
from polyrhythm.data.cached_split import CacheUse
from polyrhythm.errors import PeerLost
from polyrhythm.events import (
    BatchesBalanced,
    CacheUsed,
    ImagesLeftOut,
    InputWaited,
    NoiseMeasured,
    Notice,
)
from polyrhythm.roles.balance import Balancer
from polyrhythm.roles.checkpointing.worker_state import Account, WorkerState
from polyrhythm.roles.control_plane import Boundary, ControlPlane, EvaluatesPart
from polyrhythm.roles.deal import MOST_STEPS, DealtBatches
from polyrhythm.roles.digests import DigestSender
from polyrhythm.roles.regroup import NEVER, GroupRegroup, Participant, Regroup
from polyrhythm.roles.replica import FlatReplica
from polyrhythm.roles.step_metrics import ProcessorWait, Tally
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import Logged, Step
from polyrhythm.training.noise_scale import GradientNoise

_Result = TypeVar("_Result")


class Workload(Protocol):
    """Model and data of a worker, as far as they concern the other workers."""

    @property
    def replica(self) -> FlatReplica:
        """Parameters, and the strategy's side of this worker."""

    def share_out(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Continue among other workers: called after each regrouping of all workers.

        Args:
            absent: indices of the absent workers.
            place: place of this worker among those present.
            present: number of present workers.
        """

    def share_out_apart(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Continue in a group among other workers: called after each regrouping of this worker's group alone.

        Args:
            absent: indices of the group's absent workers.
            place: place of this worker among those of the group that are present.
            present: number of present workers of the group.
        """


class Calendar(Protocol):
    """Assignment of steps to epochs."""

    @property
    def epochs(self) -> int:
        """Number of epochs of the run."""

    @property
    def total_steps(self) -> int:
        """Number of steps that every worker takes."""

    def start(self, epoch: int) -> int:
        """Return the number of steps before an epoch; before the one after the last, of all."""

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step; the number of epochs, if the step is beyond the end."""


class ComputedWorkload(Workload, Protocol):
    """A workload that `Trainer.run` trains.

    Attributes:
        batch_size: images of a full batch, in the epoch of the batches requested last.
        rate_ratio: ratio of the strategy's learning rate to the reported one.
        sizes: relative shares of a global batch, of the present workers; empty: all equal. For the batches that
            are requested next.
        limit: images that this worker's memory holds at once, where more did not fit; 0: no limit is known.
        skipped: number of steps without this worker's gradients, since its loss or they were not finite.
        report_steps: number of steps between two reports; one more is due at the end of the run. 0: after some time,
            and at the end of every epoch.
    """

    batch_size: int
    rate_ratio: float
    sizes: tuple[float, ...]
    limit: int
    skipped: int
    report_steps: int

    @property
    def calendar(self) -> Calendar:
        """Assignment of steps to epochs, where each worker has a fixed share."""

    @property
    def dealt_batches(self) -> DealtBatches | None:
        """Batches that this worker draws; None where it has a fixed share."""

    @property
    def unit(self) -> tuple[int, ...]:
        """Indices of the workers that draw batches together with this one, where batches are drawn."""

    def global_batch(self, epoch: int) -> int:
        """Return the images of a full step of all workers in an epoch."""

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Return this worker's batches of an epoch, a step each; the `size` of one without images is 0.

        Args:
            epoch: number of the epoch.
            start: first step, counted within the epoch, or within the run where batches are drawn.
        """

    def compute(self, step: Step, batch: Any) -> tuple[float, float, bool]:
        """Fill the gradients of a step.

        Args:
            step: step as given to the strategy.
            batch: one of `batches`.

        Returns:
            The mean training loss, the learning rate, and whether the gradients can be used.
        """

    def part_of_test(
        self, place: int, parts: Sequence[int], workers: Communicator | None
    ) -> EvaluatesPart | None:
        """Return a function that runs this worker's part of a test; None where the coordinator tests all of it.

        Args:
            place: place of this worker among those present.
            parts: relative shares of all present workers.
            workers: communicator of these, if all of them call this and may exchange something.

        Raises:
            PeerLost: another worker has failed.
        """

    def record(self, account: Account) -> WorkerState:
        """Return the state that this worker hands in at an epoch's end."""

    def cache_use(self) -> CacheUse | None:
        """Return the use of a cache of images since the last call; None where there is none."""

    def input_waits(self) -> tuple[float, float, float]:
        """Return the seconds of waiting since the last call, for batches and in tests, and the processor time in them.

        Returns:
            Seconds for batches, for the images of tests, and of processor time in both.
        """

    def newly_left_out(self) -> list[str]:
        """Return the names of images that could not be read since the last call."""

    def gradient_noise(self) -> GradientNoise | None:
        """Return the measured noise of this worker's gradients relative to the mean of all; None if unmeasured."""


class Trainer:
    """Keeps one worker among the others through failures and joins.

    Args:
        world: context of this rank.
        strategy: strategy, which decides whether workers regroup, all together or each group apart.
        workload: model and data of the worker.
        control: control plane of this worker.
        digest_every: number of steps between two comparisons of the state that all members hold alike; 0: none.

    Attributes:
        replica: replica of the workload.
        worker: index of this worker.
        identical: whether all workers are equal after every step.
        regroup: regrouping of all workers together; None elsewhere.
        regrouping: regrouping of all workers, or of this worker's group, where groups regroup on their own.
        digests: sender of digests to the coordinator; None where none are compared.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        workload: Workload,
        control: ControlPlane,
        digest_every: int = 0,
    ) -> None:
        self.replica = workload.replica
        self.worker = self.replica.workers.rank
        self.regroup: Regroup | None = None
        self.regrouping: Regroup | None = None
        self.digests: DigestSender | None = None
        self._world = world
        self._part = self.replica.part
        self._control = control
        workers, flat = self.replica.workers, self.replica.flat
        faults, traits = strategy.faults(workers.size), strategy.traits(workers.size)
        self.identical = traits.identical
        self.meets_each_step = traits.exchange_every == 1 and not traits.servers
        if faults.regroups or faults.regroups_apart:
            takes_place = workload.share_out if faults.regroups else workload.share_out_apart
            member = Participant(self.worker, self.replica.part_as(Logged), flat, takes_place)
            if faults.regroups:
                self.regrouping = self.regroup = Regroup(world, control, member, all_ranks(workers.size))
            else:
                group = next(group for group in traits.groups if self.worker in group)
                self.regrouping = GroupRegroup(world, control, member, group, faults)
            control.wait_with(self.regrouping)
        if digest_every and self.regroup is not None and workers.size > 1:
            part, identical = self.replica.part_as(Logged), traits.identical
            if DigestSender.applies(part, identical=identical):
                self.digests = DigestSender(
                    self.worker,
                    part,
                    flat,
                    digest_every,
                    identical=identical,
                    regroup=self.regroup,
                    report=control.report,
                )

    @property
    def members(self) -> tuple[int, ...] | None:
        """Indices of the workers that train in lockstep now; None where not all workers regroup together."""
        return None if self.regroup is None else self.regroup.members

    @property
    def workers(self) -> Communicator:
        """All workers; where all regroup together, those of the present view."""
        return self.replica.workers if self.regroup is None else self.regroup.workers

    @property
    def admit(self) -> bool:
        """Whether this worker is an admitted replacement where all workers regroup together."""
        return self.regroup is not None and self._world.rejoins

    @property
    def over(self) -> bool:
        """Whether the others have ended the run."""
        return self.regrouping is not None and self.regrouping.over

    @property
    def stops(self) -> bool:
        """Whether no step remains: the others have ended, or stopped at this worker's step."""
        return self.over or self._part.has_stopped

    @property
    def step(self) -> int:
        """Steps that this worker has done; the last may have been taken over from another worker."""
        assert self.regrouping is not None, "kept only where workers regroup"
        return self.regrouping.step

    @step.setter
    def step(self, step: int) -> None:
        if self.regrouping is not None:
            self.regrouping.step = step

    def open(self, step: int) -> int:
        """Start the strategy's part with the others, or enter as a replacement; return the step to begin with.

        Args:
            step: step at which this worker would start by itself.
        """
        if self.regrouping is None:
            return self._retrying_with_new_leader(lambda: self._part.start(step))
        if self._world.rejoins:
            self.regrouping.enter()
            return self.step
        if self._world.leads and self.regroup is not None:  # the others receive its parameters
            self.step = step
        started = self.guard(lambda: self._part.start(step))
        if started is not None:
            self.step = started
        if self.digests is not None:  # of two workers, they may have to return to this state
            self.digests.after_step(self.step)
        return self.step

    def guard(self, act: Callable[[], _Result]) -> _Result | None:
        """Call `act`, which communicates with the others; return its result, or None after regrouping instead.

        Raises:
            PeerLost: a rank has failed without which the run cannot continue.
        """
        try:
            return act()
        except Again:  # the next view was made inside an exchange
            return None
        except PeerLost as loss:
            if self.regrouping is None or not self.regrouping.recovers_from(loss):
                raise
        self.regrouping.reform()  # out here, where the error no longer references the interrupted step
        return None

    def stop(self) -> None:
        """Note that this worker stops early; where all have one model, replacements then find the run over."""
        if self.regroup is not None and self.identical:
            self.regroup.over = True

    def close(self) -> None:
        """End the strategy's part; with the remaining members, if some fail during that."""
        if self.regrouping is None:
            self._retrying_with_new_leader(self._part.end)
            return
        while (self.regroup is None or not self.regroup.over) and not self.guard(self._ended):
            pass

    def _ended(self) -> bool:
        assert self.regrouping is not None, "kept only where workers regroup"
        self._part.end()
        self.regrouping.over = True
        return True

    def _retrying_with_new_leader(self, act: Callable[[], _Result]) -> _Result:
        """Call `act`, which waits for the coordinator; repeat it with a replacement, if the coordinator fails."""
        while True:
            try:
                return act()
            except PeerLost as loss:
                if not self._control.await_leader(loss):
                    raise


class TrainingRun:
    """Takes one worker through the steps of a run, and reports on the way.

    Args:
        trainer: trainer of this worker.
        workload: model and data of this worker.
        control: control plane of this worker.
        world: context of this rank.
        in_step: whether workers are synchronous; for reports.
        balancer: balancer of this worker; None: all have equal shares of a global batch.
        blocked: time that this worker is blocked in its communicators inside its passes; else None.
        staged: whether it then waits for other stages of a pipeline.
    """

    __slots__ = (
        "_activity",
        "_asked",
        "_balancer",
        "_blocked",
        "_calendar",
        "_compute",
        "_control",
        "_dealt_batches",
        "_in_step",
        "_limit",
        "_now",
        "_processor_wait",
        "_rate",
        "_replica",
        "_skipped",
        "_staged",
        "_tally",
        "_timer",
        "_trainer",
        "_view",
        "_workload",
        "_world",
    )

    def __init__(
        self,
        trainer: Trainer,
        workload: ComputedWorkload,
        control: ControlPlane,
        world: World,
        *,
        in_step: bool,
        balancer: Balancer | None = None,
        blocked: Blocked | None = None,
        staged: bool = False,
    ) -> None:
        self._balancer, self._blocked, self._staged = balancer, blocked, staged
        self._view = self._limit = self._skipped = 0
        self._trainer = trainer
        self._workload = workload
        self._control = control
        self._world = world
        self._in_step = in_step
        self._calendar = workload.calendar
        self._dealt_batches = workload.dealt_batches
        self._replica = trainer.replica
        # In virtual time there is no waiting for the processor.
        real = world.pace is None
        self._processor_wait: Callable[[], float] = ProcessorWait() if real else float
        workers = len(world.roles.workers)
        last_of = workers if in_step and trainer.meets_each_step else 0
        processor_wait = self._processor_wait if real else None
        self._tally = Tally(trainer.worker, world.clock, processor_wait, last_of, workers)
        self._rate = 0.0
        # Local references for the hot path.
        self._compute, self._now = workload.compute, world.clock.now
        self._asked, self._timer, self._activity = world.stop, world.timer, world.activity

    def run(self, start: int, elapsed_s: float) -> None:
        """Take all steps, or fewer if a stop is requested from a rank; then leave the others.

        Args:
            start: the step to begin with, as `Trainer.open` returned it.
            elapsed_s: seconds for which the other workers have been training.
        """
        step, stopped = self._train(start, elapsed_s)
        if self._balancer is not None and not (self._in_step or self._balancer.group):
            self._balancer.leave()  # others may have more of their steps before them
        part: dict[str, Any] = {}
        if stopped:
            self._trainer.stop()
            record = self._record(step, stopped=True)
            part = {"part": record.part, "part_facts": record.part_facts}
            self._control.boundary(Boundary.STOP, record)
        self._trainer.close()
        # The coordinator may have both before it saves: the end of a part must not change what resumes.
        self._control.leave(replace(self._record(step, stopped=stopped, final=True), **part))
        self._replica.part.close()

    def _train(self, start: int, elapsed_s: float) -> tuple[int, bool]:
        """Return the number of steps done, and whether this worker was stopped early."""
        trainer, calendar = self._trainer, self._calendar
        takes_over = self._world.leads and self._world.rejoins
        if trainer.over and not takes_over:  # the others had stopped when it was admitted
            return start, self._dealt_batches is not None or start < calendar.total_steps
        first = (
            calendar.epoch_of(start) if self._dealt_batches is None else self._dealt_batches.advance_to(start)
        )
        self._control.begin(first)
        through = first == calendar.epochs  # when the others were saved
        if trainer.admit or takes_over or through:
            self._control.boundary(Boundary.ENTERED, self._record(start, through=through))
        if trainer.stops:
            return start, not through
        self._tally.begin(elapsed_s)
        if self._balancer is not None and self._balancer.sizes:
            self._report_sizes(start)
        if self._timer is not None:
            self._timer.start(elapsed_s)
        done, epoch, ended_epochs = start, first, first
        through_epoch = self._through_fixed if self._dealt_batches is None else self._run_dealt_epoch
        while epoch < calendar.epochs:
            self._tally.begin_epoch()
            done, following, stopped = through_epoch(epoch, done)
            last = following == calendar.epochs
            if stopped:
                return done, True
            if last and self._finds_more(done):
                epoch = following = self._dealt_batches.epoch(done)  # type: ignore[union-attr]
                continue
            # Several epochs at once, where others have drawn all batches of those between.
            for ended in range(ended_epochs + 1, following + 1):
                self._end_epoch(ended, done)
            epoch, ended_epochs = following, max(following, ended_epochs)
        return (done if self._dealt_batches is not None else max(done, calendar.total_steps)), False

    def _end_epoch(self, epochs: int, done: int) -> None:
        """Have the model tested and saved at an epoch's end, and catch up with the others' steps during that.

        Args:
            epochs: number of finished epochs.
            done: steps done by this worker.
        """
        trainer, part = self._trainer, self._replica.part
        if trainer.regroup is not None:
            trainer.regroup.repeats_from = NEVER
        last = epochs == self._calendar.epochs
        presented = None if last else trainer.guard(part.present)
        test = None if last or presented is not None else trainer.guard(self._part_of_test)
        record = self._record(done, through=last)
        self._control.boundary(Boundary.EPOCH, record, epochs, presented, test, together=self._together)
        if not last:
            trainer.guard(part.catch_up)
            if trainer.regrouping is not None:
                check = trainer.regrouping.check
                trainer.guard(lambda: check(done))

    @property
    def _together(self) -> bool:
        """Whether all members of a view end an epoch after the same step, with the same exchanges behind them."""
        trainer = self._trainer
        return trainer.identical and trainer.regroup is not None and self._dealt_batches is None

    def _finds_more(self, done: int) -> bool:
        """Whether workers that failed at the run's end have left batches to this one, the coordinator."""
        dealt_batches = self._dealt_batches
        # Workers of a group cannot take any more steps without each other, and the others have found no batches.
        if (
            dealt_batches is None
            or len(self._workload.unit) > 1
            or self._control.work_done(self._record(done, through=True))
        ):
            return False
        dealt_batches.ask_again()
        return dealt_batches.epoch(done) < self._calendar.epochs

    def _part_of_test(self) -> EvaluatesPart | None:
        trainer, replica, balancer = self._trainer, self._replica, self._balancer
        # With servers, replacements that are behind do not take part.
        members = trainer.members if trainer.members is not None else tuple(range(replica.workers.size))
        by_speed = balancer is not None and balancer.sizes and not balancer.group
        parts = [balancer.images[member] if by_speed else 1 for member in members]  # type: ignore[union-attr]
        exchanger = replica.part.exchanger
        met = trainer.members is not None and (exchanger is None or not exchanger.keeps)
        workers = trainer.workers if met else None  # a test's exchanges are no entries of a log
        return self._workload.part_of_test(members.index(trainer.worker), parts, workers)

    def _through_fixed(self, epoch: int, done: int) -> tuple[int, int, bool]:
        """Take the steps of this worker's share of an epoch.

        Args:
            epoch: number of the epoch.
            done: steps done by this worker.

        Returns:
            Steps done, the following epoch, and whether this worker stops before the run is over.
        """
        trainer, calendar = self._trainer, self._calendar
        done, end, stopped = max(done, calendar.start(epoch)), calendar.start(epoch + 1), False
        if trainer.regroup is not None:
            trainer.regroup.repeats_from = done
        while done < end and not stopped:
            taken = trainer.guard(lambda: self._stretch(epoch, done, end))  # noqa: B023 (called at once)
            done, stopped = taken or (trainer.step, trainer.stops)
        last = epoch + 1 == calendar.epochs
        return done, epoch + 1, stopped and not (last and done >= end)

    def _run_dealt_epoch(self, epoch: int, done: int) -> tuple[int, int, bool]:
        """Take the steps of this worker's drawn batches of an epoch; see `_through_fixed`."""
        trainer, dealt_batches = self._trainer, self._dealt_batches
        assert dealt_batches is not None
        # Batches returned by a failed worker may be of an earlier epoch.
        while (following := dealt_batches.epoch(done)) <= epoch:
            taken = trainer.guard(lambda: self._drawn_stretch(following, done))  # noqa: B023 (called at once)
            done, stopped = taken or (trainer.step, trainer.stops)
            if stopped:
                return done, epoch, True
        return done, following, False

    def _drawn_stretch(self, epoch: int, done: int) -> tuple[int, bool]:
        """Take the steps of this worker's drawn batches of an epoch, until there are none or a stop is requested."""
        workload, take, next_step = self._workload, self._take, self._replica.part.next_step
        due, balancer = self._next_due(done, MOST_STEPS), self._balancer
        if self._timer is not None:
            self._timer.begin()
        if balancer is not None:
            self._share_out(balancer, epoch, done)
        self._save(done)
        for batch in workload.batches(epoch, done):
            stop = take(batch, done)
            before, done = done, next_step(done)
            if stop or done >= due:
                self._follow_up(epoch, before, done, stops=stop, ends=stop)
                if stop:
                    return done, True
                self._save(done)
                due = self._next_due(done, MOST_STEPS)
            if done != before + 1 or (balancer is not None and self._balance(balancer, before, done)):
                break
        self._replica.settle()
        if self._tally.unsaid:
            self._report(epoch, done)
        return done, False

    def _stretch(self, epoch: int, done: int, end: int) -> tuple[int, bool]:
        """Take steps until the epoch is over or a stop is requested; call it inside `Trainer.guard`.

        Args:
            epoch: number of the epoch.
            done: steps done by this worker.
            end: steps that it will have done at the end of the epoch.

        Returns:
            Steps done, and whether to stop.

        Raises:
            PeerLost: a worker has failed, or one waits for admission.
        """
        workload, take, next_step = self._workload, self._take, self._replica.part.next_step
        epoch_start, due = self._calendar.start(epoch), self._next_due(done, end)
        balancer, regroup = self._balancer, self._trainer.regroup
        while True:
            if self._timer is not None:
                self._timer.begin()
            if balancer is not None:
                self._share_out(balancer, epoch, done)
            view = 0 if regroup is None else regroup.number
            self._save(done)
            for batch in workload.batches(epoch, done - epoch_start):
                stop = take(batch, done)
                before, done = done, next_step(done)
                if stop or done >= due:
                    done = min(done, self._calendar.total_steps)
                    self._follow_up(epoch, before, done, stops=stop, ends=stop or done >= end)
                    if stop or done >= end:
                        if not stop and balancer is not None:
                            self._balance(balancer, before, done)
                        return done, stop
                    self._save(done)
                    due = self._next_due(done, end)
                if done != before + 1:  # the part leaves steps out
                    if balancer is not None:
                        self._balance(balancer, before, done)
                    break
                if balancer is not None and (self._begins_again or self._balance(balancer, before, done)):
                    break
                if (
                    regroup is not None and regroup.number != view
                ):  # since an exchange others share the batches
                    break

    def _share_out(self, balancer: Balancer, epoch: int, done: int) -> None:
        """Set the workload's shares to those of the present workers, and of the epoch's global batch."""
        regroup, regrouping = self._trainer.regroup, self._trainer.regrouping
        batch = self._workload.global_batch(epoch)
        if balancer.group and isinstance(regrouping, GroupRegroup) and regrouping.number != self._view:
            self._view = regrouping.number
            before = balancer.sizes
            balancer.lose(regrouping.members)
            if balancer.sizes != before:
                self._report_sizes(done)
        if regroup is not None and self._begins_again:
            self._view = regroup.number
            balancer.regroup(regroup.workers, regroup.members, batch, done)
            self._report_sizes(done)
        before = balancer.sizes
        balancer.resize(batch, done)
        if balancer.sizes != before:
            self._report_sizes(done)
        self._workload.sizes = balancer.sizes
        if (
            regroup is not None and regroup.number != self._view
        ):  # parts are those of others, for a few steps yet
            self._workload.sizes, balancer.share = (), 1.0
        if balancer.whole_steps:  # tests and checkpoints are no part of a step
            balancer.since_s = balancer.compute_time()

    @property
    def _begins_again(self) -> bool:
        """Whether shares are to be measured again, for other members; with the same entry of a log on all."""
        regroup, exchanger = self._trainer.regroup, self._replica.part.exchanger
        if regroup is None or regroup.number == self._view:
            return False
        return exchanger is None or not exchanger.keeps or exchanger.log.merged >= exchanger.begins

    def _balance(self, balancer: Balancer, before: int, done: int) -> bool:
        """Have all workers decide on their shares, if due after this step; return whether they have changed.

        Raises:
            PeerLost: a worker has failed.
        """
        if self._dealt_batches is None and done >= self._calendar.total_steps:
            return False
        part, meetings = self._replica.part, done - before
        if part.exchanger is not None and self._begins_again:
            return False
        if balancer.group:
            meetings = balancer.meetings(before, done)
        elif part.exchanger is not None and self._trainer.regroup is not None:
            meetings = int(not part.exchanger.keeps or part.exchanger.since == done)
        if not meetings or not balancer.after(done, meetings):
            return False
        if balancer.unevenness and self._reports_parts:
            which = "workers" if not balancer.group else f"workers {', '.join(map(str, balancer.group))}"
            text = (
                f"{which} are uneven: the slowest takes {100 * balancer.unevenness:.0f} % longer for an image than the "
                "fastest, so batches follow their speeds from here on (--balance off keeps them equal)"
            )
            self._control.report(Notice(time_s=self._tally.elapsed_s, text=text))
        self._report_sizes(done)
        return True

    @property
    def _reports_parts(self) -> bool:
        """Whether this worker reports its shares and the others': worker 0, or the first of a group."""
        balancer = self._balancer
        return balancer is not None and (balancer.speaks if balancer.group else self._world.leads)

    def _report_sizes(self, step: int) -> None:
        if self._balancer is not None and self._reports_parts:
            sizes = self._balancer.images
            self._control.report(BatchesBalanced(time_s=self._tally.elapsed_s, step=step, sizes=list(sizes)))

    def _take(self, batch: Any, number: int) -> bool:
        """Take a step; return whether to stop. The simulator's hot path."""
        # A call through a method of this class would be looked up again each time.
        replica, workload, timer, now = self._replica, self._workload, self._timer, self._now
        if timer is not None:
            timer.lap("data")
        images, compute, balancer, blocked = batch.size, self._compute, self._balancer, self._blocked
        step = Step(number, images / workload.batch_size, self._asked.requested)
        if balancer is not None:
            step.share = balancer.share
        inside_s = blocked.seconds if blocked is not None else 0.0
        replica.begin(step)
        if balancer is not None and not balancer.whole_steps:
            balancer.since_s = balancer.compute_time()
        loss, self._rate, usable = compute(step, batch)
        if not usable:
            step = Step(number, 0.0, step.stop, step.share)
        if balancer is not None and not balancer.whole_steps:
            balancer.note(images, balancer.compute_time() - balancer.since_s)
        computed_at_s = now()
        if blocked is not None:
            inside_s = blocked.seconds - inside_s
        queued_s = self._processor_wait()
        stop = replica.exchange(step, self._rate * workload.rate_ratio)
        queued_s = self._processor_wait() - queued_s
        if timer is not None:
            timer.lap("update")
        wait_s = now() - computed_at_s + inside_s
        self._tally.add(images, loss, wait_s, inside_s if self._staged else 0.0, queued_s)
        if balancer is not None:
            balancer.limit = workload.limit
            if balancer.whole_steps:
                ended_s = balancer.compute_time()
                balancer.note(images, ended_s - balancer.since_s)
                balancer.since_s = ended_s
        return stop

    def _next_due(self, done: int, end: int) -> int:
        """Return the number of steps after which more is due than the next step."""
        every = self._workload.report_steps
        if self._timer is not None or self._trainer.regrouping is not None or not every:
            return done + 1
        return min(end, every * (done // every + 1))

    def _follow_up(self, epoch: int, before: int, done: int, *, stops: bool, ends: bool) -> None:
        """Do the work that follows a step.

        Args:
            epoch: number of the epoch.
            before: steps done before it.
            done: steps done now.
            stops: whether a stop is requested.
            ends: whether it is the last one of the epoch, or of the run.
        """
        regrouping, timer = self._trainer.regrouping, self._timer
        if regrouping is not None:
            regrouping.step = done
        self._activity.step_done(done)
        if (digests := self._trainer.digests) is not None:
            digests.after_step(done)
        self._control.after_step()
        if ends:
            self._replica.settle()
        if timer is not None:
            timer.end_step(done)
        if every := self._workload.report_steps:
            over = self._dealt_batches is None and done >= self._calendar.total_steps
            due = stops or over or done // every > before // every
        else:
            due = ends or self._tally.due
        if due:
            self._report(epoch, done, before_state=ends and self._together)
        if ends:
            return
        if regrouping is not None:
            regrouping.check(done)
        if timer is not None:
            timer.begin()

    def _save(self, done: int) -> None:
        """Send this worker's state if a checkpoint is due between two steps."""
        if self._control.state_due(done):
            self._replica.settle()
            self._control.boundary(Boundary.CHECKPOINT, self._record(done), together=self._together)

    def _report(self, epoch: int, step: int, *, before_state: bool = False) -> None:
        report = partial(self._control.report, before_state=before_state)
        progress = self._tally.report(epoch, step, self._rate)
        report(progress)
        if self._workload.limit != self._limit:
            self._limit = self._workload.limit
            text = (
                f"worker {progress.worker}: batches do not fit into its memory at once, and are computed in pieces of "
                f"{self._limit} images from here on"
            )
            report(Notice(time_s=progress.time_s, text=text))
        if self._workload.skipped > self._skipped:
            steps, self._skipped = self._workload.skipped - self._skipped, self._workload.skipped
            count = f"{steps} step{'s' * (steps > 1)}"
            text = f"worker {progress.worker} took no part in {count}: its loss or gradients were not finite"
            report(Notice(time_s=progress.time_s, text=text))
        if files := self._workload.newly_left_out():
            report(ImagesLeftOut.of_worker(progress.worker, files, progress.time_s))
        waited_s, testing_s, busy_s = self._workload.input_waits()
        if waited_s > 0 or testing_s > 0:
            report(
                InputWaited(
                    time_s=progress.time_s,
                    worker=progress.worker,
                    seconds=waited_s,
                    busy_s=busy_s,
                    testing_s=testing_s,
                )
            )
        if cached := self._workload.cache_use():
            report(CacheUsed(time_s=progress.time_s, worker=progress.worker, **asdict(cached)))
        if noise := self._workload.gradient_noise():
            report(NoiseMeasured(time_s=progress.time_s, step=step, **asdict(noise)))
        if self._timer is not None:
            report(self._timer.report(progress, in_step=self._in_step))

    def _record(
        self, step: int, *, stopped: bool = False, final: bool = False, through: bool = False
    ) -> WorkerState:
        tally, arrivals = self._tally, self._world.arrivals
        account = Account(
            worker=self._trainer.worker,
            step=step,
            session_steps=tally.steps,
            session_images=tally.images,
            epoch_images=tally.epoch_images,
            epoch_loss=tally.epoch_loss,
            bytes_sent=self._replica.bytes_sent,
            staleness={str(key): count for key, count in self._replica.part.staleness.items()},
            stopped=stopped,
            final=final,
            through=through or (final and not stopped),
            arrivals=arrivals.to_json() if final and arrivals else {},
            bytes_inside=self._replica.bytes_inside,
        )
        return self._workload.record(account)


class LoopSteps:
    """Takes the steps of a user's loop. Logged exchanges keep the gradients: a failure does not end an exchange.

    Args:
        trainer: trainer of this worker.

    Attributes:
        trainer: the given trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._replica = trainer.replica
        self._exchanger = trainer.replica.part.exchanger
        if self._exchanger is not None:
            self._exchanger.keeps, self._exchanger.repeats = True, False

    def take(self, step: Step, learning_rate: float) -> None:
        """Exchange the gradients and update the parameters.

        Raises:
            PeerLost: a rank has failed without which the run cannot continue.
        """
        self._replica.flat.gather_gradients()
        self.trainer.step = step.number
        with suppress(Again):  # the run of this worker's group is over
            self._replica.begin(step)
            self._replica.exchange(step, learning_rate)
        self._done(step.number + 1)

    def average(self, step: Step, place: int = 0) -> None:
        """Overwrite the gradients with the workers' mean, where the part holds it; `update` follows.

        Args:
            step: see `WorkerPart.average`.
            place: see `WorkerPart.average`.

        Raises:
            OutOfStep: this worker is not where the others are.
            PeerLost: a rank has failed without which the run cannot continue.
        """
        self._replica.flat.gather_gradients()
        self.trainer.step = step.number
        self._replica.average(step, place)

    def update(self, step: int, learning_rate: float) -> None:
        """Update with gradients that were averaged."""
        self._replica.update(step, learning_rate)
        self._done(step + 1)
        if self._exchanger is not None:
            self._exchanger.since = step + 1

    def _done(self, steps: int) -> None:
        self.trainer.step = steps
        if self.trainer.digests is not None:
            self.trainer.digests.after_step(steps)

    def sum(self, vector: Tensor) -> None:
        """Overwrite a vector with the sum of all workers'."""
        if self._exchanger is None or self.trainer.regroup is None:
            self.trainer.workers.all_reduce(vector)
        else:
            vector.copy_(self._exchanger.sum(vector))

    def share_again(self, name: str) -> None:
        """Continue with a flat vector of another size, made equal to worker 0's.

        All workers call it between two steps, when the last one is complete everywhere.

        Args:
            name: unique name of this occasion.
        """
        workers, exchanger = self.trainer.workers, self._exchanger
        assert exchanger is not None, "only workers with the mean of all gradients do"
        anew = workers.subgroup(name, range(workers.size))
        anew.broadcast(self._replica.flat.vector)
        exchanger.log.forget()  # its results are of the size before, and all have merged them
        exchanger.over(anew, exchanger.members)
        if self.trainer.regroup is not None:
            self.trainer.regroup.forget_states()

    def regroup(self) -> None:
        """Regroup with the present workers, between two steps.

        Raises:
            PeerLost: a rank has failed without which the run cannot continue.
        """
        self.guard(_called)

    def guard(self, act: Callable[[], object]) -> None:
        """Call `act`, which communicates between two steps; if a worker fails during that, regroup and leave it out.

        Gradients that the next step has computed already are kept.

        Raises:
            PeerLost: a rank has failed without which the run cannot continue.
        """
        regrouping, flat = self.trainer.regrouping, self._replica.flat
        try:
            act()
            return
        except Again:
            return
        except PeerLost as loss:
            if regrouping is None or not regrouping.recovers_from(loss):
                raise
        flat.gather_gradients()
        kept = flat.gradients.clone()  # of the next step, or a mean before its update
        regrouping.reform()
        flat.gradients.copy_(kept)


def _called() -> None:
    raise PeerLost(LEADER, "continuing with the others")
