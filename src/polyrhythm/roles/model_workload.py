"""The workload of a real run: a network that learns from this worker's share of the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.data.balance import split
from polyrhythm.data.cached_split import CacheUse, left_out_of, placed, use_of
from polyrhythm.data.dealing import StandIn, places_of
from polyrhythm.data.loader import Batch, Loader, PartOfBatch, Share
from polyrhythm.data.seeding import seed_for, seeds_for
from polyrhythm.errors import RequestError, is_out_of_memory
from polyrhythm.evaluation.evaluate import InDtype, PartialEvaluation, batches_for, evaluate_part
from polyrhythm.models.fine_tuning import graded
from polyrhythm.partition.hybrid_pass import Loss
from polyrhythm.partition.ownership import division
from polyrhythm.partition.pipeline_pass import Lap
from polyrhythm.roles.checkpointing.worker_state import Account, WorkerState
from polyrhythm.roles.control_plane import EvaluatesPart
from polyrhythm.roles.deal import DealtBatches
from polyrhythm.roles.job import Calendar, Job, check_network_use, tested_at_once
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.strategies.divided_network import ComputesStages, CutsNetwork, PipelineContext, SharedBatch
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters, is_finite
from polyrhythm.training.forward_pass import (
    Execution,
    Precision,
    by_running_statistics,
    channels_innermost,
    forward_pass,
    use_repeatable_convolutions,
)
from polyrhythm.training.joint_optimizer import JointOptimizer, Pass, random_state, same_random_numbers
from polyrhythm.training.memory import memory_of, peak_memory
from polyrhythm.training.model_sizes import shapes_alone
from polyrhythm.training.noise_scale import GradientNoise, NoiseMeter
from polyrhythm.training.svrg import Anchor

_MOST_SKIPPED = 100
"""Number of steps in a row that are skipped before the run ends."""


class LossNotFinite(RequestError):
    """A loss is infinite or not a number."""


class ModelWorkload:
    """A network and this worker's share of the data; see `Workload`.

    Random numbers of a step (dropout) depend on the seed, the worker and the step alone, so a resumed or a
    simulated run draws the same ones.

    Args:
        job: training job.
        world: context of the rank.

    Attributes:
        replica: replica of the model.
        worker: index of this worker.
        batch_size: images of a full batch of this worker, in the epoch of the last call of `batches`.
        rate_ratio: learning rate of the vector's first element, divided by the optimizer's learning rate.
        report_steps: number of steps between reports; 0: reports are due by time.
        sizes: relative sizes of the present workers' shares of a global batch; empty: equal shares.
        limit: largest number of images that fits into memory at once, if a batch did not fit; 0: unknown.
        dealt_batches: dynamic batches of this worker; None: it has a fixed share.
        skipped: number of steps without this worker's gradients, since its loss or they were not finite.
        anchor: anchor of this worker's gradients, with SVRG after the first call of `batches`; None: none.
    """

    report_steps = 0
    limit = 0
    skipped = 0
    sizes: tuple[float, ...] = ()
    dealt_batches: DealtBatches | None = None
    anchor: Anchor | None = None

    def __init__(self, job: Job, world: World) -> None:
        learning = job.learning
        traits = job.traits
        measured = traits.pipelines > 0 and world.pace is None
        hollows = traits.cuts_network and traits.trunk != "channels" and not world.leads
        hollow = None
        # First on shapes, where memory is measured, because of the modules that it imports: they are no
        # memory of the network.
        if measured or hollows:
            hollow = shapes_alone(job.make_model, job.dataset.image_shape)
        peak = peak_memory(job.device) if measured else None
        # Without a GPU torch.manual_seed would keep its caller's traceback: all of its source files, 1 MB a worker.
        (torch.default_generator if job.device.type == "cpu" else torch).manual_seed(learning.seed)
        if not hollows:
            hollow = None
        made = job.make_model() if hollow is None else hollow
        model = learning.batch_norm.prepare(made)
        if hollow is None:
            model = model.to(job.device)
        self._real = world.pace is None
        self._precision = Precision.choose(learning.precision, job.device)
        use_repeatable_convolutions(job.device, self._precision.dtype)
        optimizer = learning.optimizer.create(graded(model, learning.optimizer.lr, learning.rate_decay))
        # float16 gradients must be unscaled before they are sent
        self._scales = self._precision.dtype == torch.float16
        steps = None if job.draws else job.calendar.total_steps
        # Announced gradients are final, and a compiled network has no layers that could wait for a reply.
        self._skips = job.fault_tolerance.skips_not_finite and not job.traits.cuts_network
        self._skipped_in_a_row = 0
        self._latest_loss = 0.0
        announce = not (
            self._scales or self._skips or (job.learning.execution.compiled and job.traits.overlaps_passes)
        )
        self.replica = Replica(
            model, optimizer, job.strategy, world, announce=announce, steps=steps, joined=self._meet
        )
        self.replica.peak = peak
        self.worker = self.replica.workers.rank
        self._seed_of = seeds_for("step", job.learning.seed, self.worker)
        self._joint = optimizer if isinstance(optimizer, JointOptimizer) else None
        if self._joint is not None:
            self._joint.tie(model)
            if world.pace is not None:
                self._joint.pass_time = world.pace.part
        self._place, self._present = self.worker, job.workers
        self._stand_in: StandIn | None = None
        share = Share(self.worker, job.workers, learning.batch_size, learning.seed)
        self._loader = Loader(
            placed(job.dataset.train, job.device),
            share,
            learning.transform,
            job.ahead,
            learning.mixer,
            learning.label_skew,
        )
        self.batch_size = learning.batch_size
        self._full = learning.batch_size // learning.accumulate
        self.rate_ratio = _rate_of_first(self.replica.flat, optimizer) / learning.optimizer.lr
        self._rescaled = 1.0
        self._forward = forward_pass(model, learning.execution)
        # Checked in every step: calls without effect are avoided.
        self._plain = learning.execution == Execution() and self._precision.dtype == torch.float32
        self._pace, self._timer, self._now = world.pace, world.timer, world.clock.now
        self._cuts_network = job.traits.cuts_network
        self._by_steps = job.balance.by_steps
        self._objective = learning.objective.at(0, learning.planned_epochs)
        self._work = self._gain = 1.0
        check_network_use(job.strategy, job.workers, self._precision.dtype, learning)
        # Workers that exchange inside their passes must all make the same number of passes.
        self._meets = learning.batch_norm.over_workers and job.workers > 1
        if self._meets and world.pace is not None:
            raise RequestError(
                f"batch_norm {learning.batch_norm} exchanges inside the passes, which simulated workers take one after "
                "the other: use ghost or plain, or train for real"
            )
        if self._cuts_network:
            self._cut(model, job)
        self._job = job
        self._rank = world.network.rank
        self._length = job.length
        self._images = job.planned.deck.all_images if job.draws else 0
        self._shares = self.replica.pass_shares(job.time_shares(model, self.replica.flat))
        self._noise: NoiseMeter | None = None
        if world.leads and self.replica.part.holds_mean and self.replica.workers.size > 1:
            self._noise = NoiseMeter()
        model.train()

    @property
    def calendar(self) -> Calendar:
        """Assignment of steps to epochs."""
        return self._job.calendar

    def global_batch(self, epoch: int) -> int:
        """Return the images of an epoch's largest step over all workers; with dynamic batches, over its group."""
        job = self._job
        if self.dealt_batches is None:
            return job.calendar.largest_step(epoch)
        return len(places_of(job.deck.images[epoch], 0, len(self.unit) * job.calendar.batch_size(epoch)))

    @property
    def unit(self) -> tuple[int, ...]:
        """Indices of the workers that draw batches together with this one."""
        return next(unit for unit in self._job.units if self.worker in unit)

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Return this worker's batches of an epoch, starting with a step; see `ComputedWorkload`."""
        job, learning = self._job, self._job.learning
        size = self.batch_size = job.calendar.batch_size(epoch)
        self._work = job.calendar.work(epoch)
        self._gain = learning.batch_schedule.rate_factor(epoch, learning.planned_epochs)
        self._objective = learning.objective.at(epoch, learning.planned_epochs)
        image_size = min(job.dataset.image_shape[1:])
        side = learning.size_schedule.side(epoch, learning.planned_epochs, image_size)
        self._loader.side = None if side == image_size else side
        dealt_batches, together = self.dealt_batches, job.workers * size
        if learning.svrg == "all":
            images = job.calendar.dealt[epoch]
            shares = [
                Share(worker, job.workers, size, learning.seed, together, images=images)
                for worker in range(job.workers)
            ]
            self._drop_anchor(epoch, shares)
        if dealt_batches is not None:
            unit, stand_in = self.unit, self._stand_in
            if stand_in is not None:
                stand_in = replace(stand_in, absent=tuple(unit.index(worker) for worker in stand_in.absent))
            place, largest = unit.index(self.worker), self.global_batch(epoch)
            self._loader.share = Share(
                place, len(unit), size, learning.seed, together, (), stand_in, self.sizes
            )
            own = split(largest, self.sizes)[place] if self.sizes else -(-largest // len(unit))
            self._full = self._pass_of(own)
            return self._loader.drawn(
                epoch, start, dealt_batches.batches(epoch, start), lambda: dealt_batches.ready
            )
        begun = job.begun.epochs.get(epoch, ())
        self._loader.share = Share(
            self._place,
            self._present,
            size,
            learning.seed,
            together,
            begun,
            self._stand_in,
            self.sizes,
            job.calendar.dealt[epoch],
        )
        largest = job.calendar.largest_step(epoch)
        whole = split(largest, self.sizes)[self._place] if self.sizes else -(-largest // job.workers)
        self._full = self._pass_of(whole)
        if pipelines := job.traits.pipelines:
            self._loader.share = replace(self._loader.share, parts=pipelines)
            place, count = self.worker // pipelines, job.workers // pipelines
            return (PartOfBatch.of(batch, place, count) for batch in self._loader.epoch(epoch, start))
        if learning.svrg == "own":
            self._drop_anchor(epoch, [replace(self._loader.share, begun=())])
        return self._loader.epoch(epoch, start)

    def _drop_anchor(self, epoch: int, shares: Sequence[Share]) -> None:
        """Take an anchor at the present model, if the current one is that of other images.

        Args:
            epoch: number of the epoch.
            shares: shares of the epoch's images that the full gradient is the mean of.
        """
        name = f"epoch {epoch}, {shares[0]}"
        if self.anchor is not None and self.anchor.share == name:
            return
        flat, device, total = self.replica.flat, self._job.device, 0
        anchor = Anchor(name, flat.vector.clone(), torch.zeros_like(flat.vector))
        for batch in self._loader.of_shares(shares, epoch):
            if not batch.size:
                continue
            step = Step(self.calendar.start(epoch) + batch.step, 1.0, stop=False)
            if self._pace is not None:
                self._pace.whole(self._work * (batch.size / self.batch_size if self.sizes else 1.0))
            self._seed(step.number)
            images = batch.images.to(device, flat.vector.dtype, non_blocking=True)
            try:
                gradient = self._anchor_gradient(anchor, images, batch.labels.to(device), step)
            except LossNotFinite:
                if not self._skips:
                    raise
                continue
            if not self._skips or is_finite(gradient):
                anchor.gradient.add_(gradient, alpha=batch.size)
                total += batch.size
        anchor.gradient.div_(max(total, 1))
        self.anchor = anchor

    def _anchor_gradient(self, anchor: Anchor, images: Tensor, labels: Tensor, step: Step) -> Tensor:
        """Return the mean gradient of a batch at the anchor, `(n,)`; the flat gradients are zero afterwards."""
        replica, flat = self.replica, self.replica.flat
        replica.defers = self._pace is None
        replica.recount(1)
        # A pass in training changes batch-norm statistics, which are those of the model alone.
        buffers = {name: value.clone() for name, value in replica.buffers.items()}
        try:
            with replica.computing_with(anchor.vector, buffers):
                self._within_memory(images, labels, step, 0.0)
            flat.gather_gradients()
            return flat.gradients.clone()
        finally:
            flat.zero_gradients()

    def _pass_of(self, images: int) -> int:
        """Return the images in the largest pass of a batch of this size."""
        return -(-images // self._job.learning.accumulate)

    def continue_with(self, job: Job) -> None:
        """Continue epochs that others have begun; called before the first batch.

        Args:
            job: the initial job, with the others' progress.
        """
        self._job = job

    def share_out(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Continue without the absent workers: take over a share of their batches, or lower the learning rate.

        Args:
            absent: indices of the absent workers.
            place: position of this worker among the present ones.
            present: number of present workers.
        """
        if self._job.fault_tolerance.rescale:
            self._rescaled = present / self._job.workers
        else:
            self._place, self._present = place, present

    def share_out_apart(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Continue in a group with absent workers: redistribute their batches, or lower the learning rate.

        Args:
            absent: indices of the absent workers of the group.
            place: position of this worker among the present workers of the group.
            present: number of present workers of the group.
        """
        if self._job.fault_tolerance.rescale:
            self._rescaled = present / (present + len(absent))
        else:
            self._stand_in = StandIn(absent, place, present) if absent else None

    def _meet(self, workers: Communicator) -> None:
        """Make layers share their statistics with the workers of the same step."""
        norm = self._job.learning.batch_norm
        if norm.over_workers:
            norm.meet(self.replica.model, workers.subgroup("batch norm", range(workers.size)))

    def gradient_noise(self) -> GradientNoise | None:
        """Return the deviation of this worker's gradients from the mean, if it was measured since the last call."""
        return None if self._noise is None else self._noise.taken()

    def _note_mean(self) -> None:
        assert self._noise is not None, "else no step is compared"
        images = round(self.replica.part.mean_weight * self.batch_size)
        self._noise.note_mean(self.replica.flat.gradients, images)

    def cache_use(self) -> CacheUse | None:
        """Return the use of the cache of decoded images since the last call; None without a cache."""
        return use_of(self._loader.split)

    def input_waits(self) -> tuple[float, float, float]:
        """Return the seconds of waiting for batches and for images of tests, and the processor time in both."""
        if not self._real:
            return 0.0, 0.0, 0.0
        (batches_s, busy_s), (tests_s, busy_in_tests_s) = (
            waits.taken() for waits in (self._loader.waits, self.replica.test_waits)
        )
        return batches_s, tests_s, busy_s + busy_in_tests_s

    def newly_left_out(self) -> list[str]:
        """Return the names of images that could not be read since the last call."""
        return left_out_of(self._loader.split, self._job.dataset.test)

    def restore(self, state: WorkerState) -> None:
        """Continue with what `record` returned, other than the state of the replica."""
        self._precision.load_state_dict(state.loss_scale)
        if state.anchored and self._job.learning.svrg != "none":
            self.anchor = Anchor.restored(state.anchored, state.anchor, self.replica.flat.vector)

    def part_of_test(
        self, place: int, parts: Sequence[int], workers: Communicator | None
    ) -> EvaluatesPart | None:
        """Return the test of this worker's share, where all workers can hold the tested model; else None.

        Batch-norm statistics are tested as the mean over workers, for which they communicate here.
        """
        job, replica = self._job, self.replica
        own = [value for value in replica.buffers.values() if value.is_floating_point()]
        if (
            len(parts) < 2
            or not job.traits.identical
            or job.learning.weight_average
            or job.evaluation.continues
            or (own and workers is None)
        ):
            return None  # only the coordinator has averaged weights, and snapshots
        means = means_of_all(own, workers) if workers is not None else []
        test = InDtype(job.dataset.test, replica.flat.vector.dtype, replica.test_waits)
        batches = batches_for(len(test), place, parts)

        pace, share = self._pace, parts[place] / sum(parts)

        def found() -> PartialEvaluation:
            if pace is not None and pace.evaluation_s:
                pace.clock.sleep(pace.evaluation_s * share, "test")
            with holding(own, means):
                return evaluate_part(
                    replica.model, test, batches, classes=job.dataset.classes, device=job.device
                )

        return found

    def record(self, account: Account) -> WorkerState:
        """Return this worker's state to be sent: with all that resuming needs, if checkpoints are written."""
        if self.replica.peak is not None:
            account = replace(account, peak_bytes=self.replica.peak())
        saves, anchor, calendar = self._job.checkpointing.saves, self.anchor, self.calendar
        state = WorkerState.of(self.replica, account, self._precision.state_dict(), to_resume=saves)
        ends = not self._job.draws and account.step == calendar.start(calendar.epoch_of(account.step))
        if anchor is None or ends or not saves:
            return state
        return replace(state, anchor=anchor.tensors(), anchored=anchor.share)

    def compute(self, step: Step, batch: Batch) -> tuple[float, float, bool]:
        """Fill the gradients of a step.

        Args:
            step: the step given to the strategy.
            batch: batch; may be empty: then this worker only takes part in the exchange.

        Returns:
            The mean training loss (0 for an empty batch), the learning rate, and whether the gradients can be used.
            Else they are zero: float16 has overflowed, or something is not finite and such steps are skipped.

        Raises:
            RequestError: the loss is not finite.
        """
        learning, number, timer = self._job.learning, step.number, self._timer
        length, schedule = self._length, learning.schedule
        if self.dealt_batches is None:
            factor = schedule.factor_at(length.nominal(number), length)
        else:  # progress of the run: this worker's own steps may be many or few
            factor = schedule.factor_at(batch.reached / self._images * length.nominal_steps, length)
        rate = learning.optimizer.lr * factor * self._rescaled * self._gain
        step.learning_rate = rate * self.rate_ratio
        size = batch.labels.shape[0]
        joint = self._joint
        if joint is not None:
            joint.begin(number, seed_for("joint", learning.seed, self.worker, number))
        noise = self._noise
        if noise is not None:
            noise = noise if number % noise.every == noise.first else None
            self.replica.note_mean = None if noise is None else self._note_mean
        if not (size or self._cuts_network or self._meets):
            return 0.0, rate, True
        flat, device = self.replica.flat, self._job.device
        if self._pace is not None:
            work = self._work * (size / self.batch_size if self.sizes else 1.0)
            work *= 2 if self.anchor is not None else 1
            self._pace.forward(self._shares, self.replica.use, work)
        self._seed(number)
        # Values accumulated during the pass no longer belong to this worker.
        compares = joint is not None and joint.compares
        changes = noise is not None or compares or self.anchor is not None
        self.replica.defers = changes and self._pace is None
        images = batch.images
        if not images.is_meta:
            images = images.to(device, flat.vector.dtype, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
        if self._cuts_network:
            return self._compute_together(images, labels, step, rate), rate, True
        if self._skips:
            value, usable = self._unless_not_finite(images, labels, step, rate)
        else:
            value, usable = self._forward_and_backward(images, labels, step, rate), True
        if self._scales and usable:
            usable = self._precision.unscale(flat.gradients)
        flat.gather_gradients()
        if not usable:  # this worker skips the step
            flat.zero_gradients()
        if noise is not None and usable:
            noise.note_own(flat.gradients, size)
        if joint is not None and joint.compares and usable:
            joint.note_own(flat.gradients, size)
        if self._pace is not None:
            self._pace.backward(self._shares, self.replica.announce)
        if timer is not None:
            timer.lap("backward")
        return value, rate, usable

    def _unless_not_finite(
        self, images: Tensor, labels: Tensor, step: Step, rate: float
    ) -> tuple[float, bool]:
        """Run a batch forward and backward; return its loss, and whether this and the gradients are finite.

        If not, the batch-norm statistics are as before, and the loss is that of the step before.

        Raises:
            LossNotFinite: it is so in too many steps in a row.
        """
        buffers, flat = list(self.replica.buffers.values()), self.replica.flat
        before = [buffer.clone() for buffer in buffers]
        finite = False
        try:
            value = self._forward_and_backward(images, labels, step, rate)
            flat.gather_gradients()
            finite = self._scales or is_finite(flat.gradients)  # scaled ones may overflow
        except LossNotFinite:
            if self._skipped_in_a_row >= _MOST_SKIPPED:
                raise
        if finite:
            self._skipped_in_a_row, self._latest_loss = 0, value
        else:
            self._skipped_in_a_row += 1
            self.skipped += 1
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)
        return self._latest_loss, finite

    def _forward_and_backward(self, images: Tensor, labels: Tensor, step: Step, rate: float) -> float:
        if not (self._by_steps and self.sizes):
            return self._corrected(images, labels, step, rate)
        value, last, own = self._steps_before(images, labels, step, rate)
        return value + self._corrected(last, own, step, rate) * (len(own) / len(labels))

    def _corrected(self, images: Tensor, labels: Tensor, step: Step, rate: float) -> float:
        """Run a batch forward and backward, with the correction of its gradient; return its mean loss."""
        anchor, flat, device = self.anchor, self.replica.flat, self._job.device
        if anchor is None:
            return self._within_memory(images, labels, step, rate)
        with same_random_numbers(random_state(device), device):
            there = self._anchor_gradient(anchor, images, labels, step)
        value = self._within_memory(images, labels, step, rate)
        flat.gather_gradients()
        flat.gradients.sub_(there).add_(anchor.gradient)
        return value

    def _steps_before(
        self, images: Tensor, labels: Tensor, step: Step, rate: float
    ) -> tuple[float, Tensor, Tensor]:
        """Take all but the last of this worker's local steps of a global step, of about `batch_size` images each.

        Returns:
            Their contribution to the mean loss, and the images and labels of the last one.
        """
        steps = max(1, int(len(labels) / self.batch_size + 0.5))
        *before, last = zip(images.tensor_split(steps), labels.tensor_split(steps), strict=True)
        value, flat = 0.0, self.replica.flat
        for own in before:
            value += self._corrected(*own, step, rate) * len(own[1]) / len(labels)
            if not self._scales or self._precision.unscale(flat.gradients):
                flat.gather_gradients()
                self.replica.part.local_step(step, rate * self.rate_ratio)
            flat.zero_gradients()
        return value, *last

    def _within_memory(self, images: Tensor, labels: Tensor, step: Step, rate: float) -> float:
        """Run a batch forward and backward, in smaller pieces whenever one does not fit; return its mean loss."""
        learning, joint, size = self._job.learning, self._joint, labels.shape[0]
        while True:
            pieces = -(-size // self.limit) if self.limit else 1
            if learning.accumulate > 1:
                pieces = max(pieces, -(-size // self._pass_of(self.batch_size)))
            try:
                if pieces > 1:
                    return self._pieces(images, labels, pieces, step, rate)
                return self._pass(images, labels, 1.0, step, rate)
            except (RuntimeError, MemoryError) as error:
                if (
                    not is_out_of_memory(error)
                    or size <= pieces
                    or self._meets
                    or not self.replica.recount(1)
                ):
                    raise
            # Outside the handler, where the error no longer holds the tensors of the passes.
            self.limit = -(-size // (2 * pieces))
            self.replica.flat.zero_gradients()
            if joint is not None:
                joint.begin(step.number, seed_for("joint", learning.seed, self.worker, step.number))

    def _seed(self, number: int) -> None:
        seed = self._seed_of(number)
        torch.default_generator.manual_seed(seed)
        if self._job.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _pieces(self, images: Tensor, labels: Tensor, pieces: int, step: Step, rate: float) -> float:
        """Run a batch forward and backward in pieces, as requested or limited by memory; return its mean loss."""
        self.replica.recount(pieces)
        parts = zip(images.tensor_split(pieces), labels.tensor_split(pieces), strict=True)
        value = 0.0
        for number, part in enumerate(parts):
            if number and self._timer is not None:
                self._timer.lap("backward")  # of the previous piece
            value += self._pass(*part, len(part[1]) / len(labels), step, rate)
        return value

    def _pass(self, images: Tensor, labels: Tensor, share: float, step: Step, rate: float) -> float:
        """Run a batch, or a share of it, forward and backward; return its contribution to the mean loss."""
        size = labels.shape[0]
        alone = size == 1 < self._full and not self._meets
        if not size:  # others wait for its exchanges inside the passes
            with self._precision.autocast():
                loss = self._forward(images, False).sum() * 0.0
        elif self._joint is not None and self._joint.observes:
            loss = self._observed(self._joint, images, labels, alone=alone)
        elif self._plain and not alone:
            loss = self._objective(self.replica.model(images), labels, images)
        else:
            full = not alone and abs(size - self._full) <= 1
            normalizing = by_running_statistics(self.replica.model) if alone else nullcontext()
            with self._precision.autocast(), normalizing:
                loss = self._objective(self._forward(images, full), labels, images)
        if share != 1.0:
            loss = loss * share
        value = float(loss.detach())
        if not math.isfinite(value):
            raise self._not_finite(value, step.number, rate)
        if self._timer is not None:
            self._timer.lap("forward")
        if self._scales:
            self._precision.scale(loss).backward()
        else:
            loss.backward()
        return value

    def _observed(self, joint: JointOptimizer, images: Tensor, labels: Tensor, *, alone: bool) -> Tensor:
        """Run a batch, or a piece of it, forward, with the optimizer's observations; return its loss."""
        objective, model, device = self._objective, self.replica.model, self._job.device
        drawn = random_state(device)

        def scores() -> Tensor:
            normalizing = by_running_statistics(model) if alone else nullcontext()
            with self._precision.autocast(), normalizing:
                return self._forward(images, False)

        def scores_again() -> Tensor:
            with same_random_numbers(drawn, device):
                return scores()

        def loss(found: Tensor) -> Tensor:
            with self._precision.autocast():
                return objective(found, labels, images)

        found = scores()
        joint.observe(found, Pass(len(labels), scores_again, loss))
        return loss(found)

    def _compute_together(self, images: Tensor, labels: Tensor, step: Step, rate: float) -> float:
        """Compute the gradients jointly with other workers, after the simulated compute time.

        In a pipeline it passes between their messages.
        """
        pipelines = self._job.traits.pipelines
        if not pipelines:
            if self._pace is not None:
                self._pace.backward(self._shares, self.replica.announce)
            self._seed(step.number)
        objective = self._objective

        def loss(logits: Tensor, place: slice) -> Tensor:
            found = objective(logits, labels[place], images[place])
            value = float(found.detach())
            if not math.isfinite(value):
                raise self._not_finite(value, step.number, rate)
            return found

        inputs = images
        if self._job.learning.execution.channels_last and not images.is_meta:
            inputs = channels_innermost(images)
        with by_running_statistics(self.replica.model) if len(images) == 1 else nullcontext():
            if pipelines:
                value = self.replica.part_as(ComputesStages).compute_stages(
                    step, self._shared(inputs, loss, step, rate)
                )
            else:
                value = self.replica.part_as(CutsNetwork).compute(step, inputs, loss)
        if self._timer is not None:
            self._timer.lap("backward")
        return value

    def _shared(self, images: Tensor, loss: Loss, step: Step, rate: float) -> SharedBatch:
        """Return a batch that the workers of a pipeline compute jointly; random numbers do not depend on the worker."""
        pipelines, pace, timer, job = self._job.traits.pipelines, self._pace, self._timer, self._job

        def seed(microbatch: int, layer: int) -> None:
            pipeline = self.worker % pipelines
            drawn = seed_for("microbatch", job.learning.seed, pipeline, step.number, microbatch, layer)
            torch.default_generator.manual_seed(drawn)
            if job.device.type == "cuda":
                torch.cuda.manual_seed(drawn)

        def pass_time(share: float, what: str) -> None:
            if pace is not None:
                pace.part(share, what)

        def lap(part: Lap, what: str) -> None:
            if timer is not None:
                timer.lap(part, what)

        full = job.workers * self.batch_size // pipelines
        return SharedBatch(images, full, loss, rate * self.rate_ratio, seed, pass_time, lap)

    def _cut(self, model: nn.Module, job: Job) -> None:
        """Give the strategy the network in two parts, or cut by the strategy itself.

        Raises:
            RequestError: the network does not allow it.
        """
        dtype = self.replica.flat.vector.dtype
        image = torch.zeros(1, *job.dataset.image_shape, dtype=dtype, device=job.device)
        if job.traits.pipelines:
            pipelines = job.traits.pipelines
            around = PipelineContext()
            if self._pace is None:  # else the description is of the simulated cluster
                around = PipelineContext(
                    job.workers * job.learning.batch_size // pipelines,
                    tested_at_once(job),
                    saves=job.checkpointing.folder is not None and job.checkpointing.checkpoints > 0,
                    writes=job.checkpointing.folder is not None,
                    room=memory_of(job.device),
                    now=self._now,
                )
            self.replica.part_as(ComputesStages).take_network(model, image, around)
            taught = job.learning.objective.teachers is not None
            self._loader.labels_only = not (taught or self.replica.part.reads_images)
            return
        workers = self.replica.workers
        divided = division(model, self.replica.flat, image, job.traits.trunk, workers.size, workers.rank)
        self.replica.part_as(CutsNetwork).divide(divided)

    def _not_finite(self, value: float, number: int, rate: float) -> LossNotFinite:
        return LossNotFinite(
            f"the loss is {value} at step {number} of worker {self.worker} (rank {self._rank}), "
            f"learning rate {rate:g}: lower the learning rate; what was saved is kept"
        )


def _rate_of_first(flat: FlatParameters, optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the vector's first element, to which all others keep their ratio."""
    first = min(flat.views, key=lambda view: view.start).parameter
    groups = (group for group in optimizer.param_groups if any(each is first for each in group["params"]))
    return float(next(groups)["lr"])


def means_of_all(own: Sequence[Tensor], workers: Communicator) -> list[Tensor]:
    """Return the workers' means of batch-norm statistics, bit for bit as `mean_buffers`.

    Args:
        own: statistics of this worker.
        workers: communicator of the workers; all of them call this.

    Raises:
        PeerLost: one of them has failed.
    """
    if not own:
        return []
    flat = torch.cat([value.detach().reshape(-1).to("cpu", torch.float64) for value in own])
    rows = flat.new_zeros(workers.size, len(flat))
    rows[workers.rank] = flat
    stated = rows.flatten()
    workers.all_reduce(stated)
    parts = stated.view_as(rows).split([value.numel() for value in own], 1)
    return [
        torch.stack([row.to(value.dtype).view(value.shape) for row in part]).mean(0)
        for part, value in zip(parts, own, strict=True)
    ]


@contextmanager
def holding(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Replace the values of buffers within the context; none: leave them unchanged."""
    before = [buffer.clone() for buffer in buffers] if values else []
    for buffer, value in zip(buffers, values, strict=bool(values)):
        buffer.copy_(value)
    try:
        yield
    finally:
        for buffer, kept in zip(buffers, before, strict=bool(values)):
            buffer.copy_(kept)
