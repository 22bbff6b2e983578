"""One worker's training: takes the batches of its share of the data, and makes steps of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.data.cached_split import CacheUse, placed, use_of
from polyrhythm.data.dealing import StandIn
from polyrhythm.data.loader import Batch, Loader, Share
from polyrhythm.data.seeding import seed_for
from polyrhythm.errors import RequestError
from polyrhythm.models.fine_tuning import graded
from polyrhythm.partition.cut import cut
from polyrhythm.roles.job import Job, check_network_use
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.forward_pass import ForwardPass, Precision, by_running_statistics, channels_innermost
from polyrhythm.training.objective import Objective


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step.

    Attributes:
        images: in its batch.
        loss: their mean training loss; 0 for an empty batch.
        learning_rate: used.
        wait_s: seconds spent on exchanging and updating.
        stop: whether this worker must stop now.
    """

    images: int
    loss: float
    learning_rate: float
    wait_s: float
    stop: bool


class Learner:
    """A replica with its share of the data.

    Random numbers of a step (dropout) depend on the seed, the worker and the step alone, so a resumed or a
    simulated run draws the same ones.

    Args:
        job: what to learn.
        world: where this rank is.

    Attributes:
        replica: the model.
        worker: this worker's index.
    """

    def __init__(self, job: Job, world: World) -> None:
        learning = job.learning
        torch.manual_seed(learning.seed)
        model = job.make_model().to(job.device)
        self._precision = Precision.choose(learning.precision, job.device)
        optimizer = learning.optimizer.create(graded(model, learning.optimizer.lr, learning.rate_decay))
        # float16 gradients must be scaled back before anyone sends them
        scales = self._precision.dtype == torch.float16
        steps = job.length.total_steps
        self.replica = Replica(model, optimizer, job.strategy, world, announce=not scales, steps=steps)
        self.worker = self.replica.workers.rank
        self._place, self._present = self.worker, job.workers
        self._stand_in: StandIn | None = None
        share = Share(self.worker, job.workers, learning.batch_size, learning.seed)
        self._loader = Loader(placed(job.dataset.train, job.device), share, learning.transform, job.ahead)
        self._first_share = _rate_of_first(self.replica.flat, optimizer) / learning.optimizer.lr
        self._rescaled = 1.0
        self._forward = ForwardPass(model, learning.execution)
        check_network_use(job.strategy, job.workers, self._precision.dtype, learning)
        if job.traits.cuts_network:
            self._cut(model, job)
        self._job = job
        self._world = world
        self._length = job.length
        self._shares = self.replica.pass_shares(job.time_shares(model, self.replica.flat))
        model.train()

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """Gives this worker's batches of an epoch, from step `start` of it on."""
        size = self._job.calendar.batch_size(epoch)
        together = self._job.workers * size
        begun, seed = self._job.begun.epochs.get(epoch, ()), self._job.learning.seed
        self._loader.share = Share(self._place, self._present, size, seed, together, begun, self._stand_in)
        learning, image_size = self._job.learning, min(self._job.dataset.image_shape[1:])
        side = learning.size_schedule.side(epoch, learning.epochs, image_size)
        self._loader.side = None if side == image_size else side
        return self._loader.epoch(epoch, start)

    def go_on(self, job: Job) -> None:
        """Goes on where others have begun epochs; before the first batch.

        Args:
            job: as given at first, with what they have done of the data.
        """
        self._job = job

    def deal(self, place: int, present: int) -> None:
        """Goes on among other workers than all: shares their batches out, or lowers the learning rate.

        Args:
            place: of this worker among those who are there.
            present: how many are.
        """
        if self._job.losses.rescale:
            self._rescaled = present / self._job.workers
        else:
            self._place, self._present = place, present

    def stand_in(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Goes on in its group without some of it: shares their batches out, or lowers the learning rate.

        Args:
            absent: indices of the group's workers that are not there.
            place: of this worker among those of the group who are there.
            present: how many are.
        """
        if self._job.losses.rescale:
            self._rescaled = present / (present + len(absent))
        else:
            self._stand_in = StandIn(absent, place, present) if absent else None

    def _objective(self, epoch: int) -> Objective:
        learning = self._job.learning
        return learning.objective.at(epoch, learning.epochs)

    def cache_use(self) -> CacheUse | None:
        """Says what the cache of decoded images did since the last call; None where there is none."""
        return use_of(self._loader.split)

    @property
    def loss_scale(self) -> dict[str, Any]:
        """The scale of float16 losses and its history, JSON-able; empty where nothing is scaled."""
        return self._precision.state_dict()

    @loss_scale.setter
    def loss_scale(self, state: dict[str, Any]) -> None:
        self._precision.load_state_dict(state)

    def step(self, batch: Batch, number: int) -> Outcome:
        """Learns from a batch.

        Args:
            batch: may be empty: then this worker only takes part in the exchange.
            number: steps that this worker has done before.

        Raises:
            RequestError: the loss is not finite.
        """
        learning = self._job.learning
        rate = learning.optimizer.lr * learning.schedule.factor(number, self._length) * self._rescaled
        images = len(batch.labels)
        step = Step(number, images / self._job.calendar.batch_size(batch.epoch), self._world.stop.requested)
        self.replica.begin(step)
        loss, usable = (
            self._gradients(batch, step, rate) if images or self._job.traits.cuts_network else (0.0, True)
        )
        computed_at = self._world.clock.now()
        stop = self.replica.finish(rate * self._first_share, weightless=not usable)
        self._world.timer.lap("update")
        return Outcome(images, loss, rate, self._world.clock.now() - computed_at, stop)

    def _gradients(self, batch: Batch, step: Step, rate: float) -> tuple[float, bool]:
        """Fills the gradients; gives the loss, and whether they can be used."""
        flat, device = self.replica.flat, self._job.device
        self._world.pace.forward(self._shares, self.replica.use, self._job.calendar.work(batch.epoch))
        seed = seed_for("step", self._job.learning.seed, self.worker, step.number)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        images = batch.images.to(device, flat.vector.dtype, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
        if self._job.traits.cuts_network:
            return self._gradients_together(images, labels, step, rate), True
        full = len(images) == self._job.calendar.batch_size(batch.epoch)
        with self._precision.autocast(), self._normalising(len(images), full=full):
            objective = self._objective(batch.epoch)
            loss = objective(self._forward(images, full=full), labels, images)
        value = float(loss.detach())
        self._check_finite(value, step, rate)
        self._world.timer.lap("forward")
        self._precision.scale(loss).backward()
        usable = self._precision.unscale(flat.gradients)
        if not usable:  # float16 overflowed: this worker sits the step out
            flat.zero_gradients()
        self._world.pace.backward(self._shares, self.replica.announce)
        self._world.timer.lap("backward")
        return value, usable

    def _normalising(self, images: int, *, full: bool = False) -> AbstractContextManager[None]:
        """Gives the way in which a batch is normalised: a single picture, where that is not usual, by what is known."""
        return by_running_statistics(self.replica.model) if images == 1 and not full else nullcontext()

    def _gradients_together(self, images: Tensor, labels: Tensor, step: Step, rate: float) -> float:
        """Lets the workers compute their gradients together, once the time of computing has passed."""
        self._world.pace.backward(self._shares, self.replica.announce)
        torch.default_generator.manual_seed(
            seed_for("step", self._job.learning.seed, self.worker, step.number)
        )
        objective = self._objective(self._job.calendar.epoch_of(step.number))

        def loss(logits: Tensor, place: slice) -> Tensor:
            found = objective(logits, labels[place], images[place])
            self._check_finite(float(found.detach()), step, rate)
            return found

        inputs = channels_innermost(images) if self._job.learning.execution.channels_last else images
        with self._normalising(len(images)):
            value = self.replica.part.compute(step, inputs, loss)
        self._world.timer.lap("backward")
        return value

    def _cut(self, model: nn.Module, job: Job) -> None:
        """Gives the strategy the network in two parts.

        Raises:
            RequestError: the network does not allow it.
        """
        vector = self.replica.flat.vector
        image = vector.new_zeros(1, *job.dataset.image_shape)
        self.replica.part.take_parts(cut(model, image))

    def _check_finite(self, value: float, step: Step, rate: float) -> None:
        if not math.isfinite(value):
            raise RequestError(
                f"the loss is {value} at step {step.number} of worker {self.worker} (rank {self._world.network.rank}), "
                f"learning rate {rate:g}: lower the learning rate; what was saved is kept"
            )


def _rate_of_first(flat: FlatParameters, optimizer: torch.optim.Optimizer) -> float:
    """Gives the learning rate of the vector's first number, to which all others keep their ratio."""
    first = min(flat.views, key=lambda view: view.start).parameter
    groups = (group for group in optimizer.param_groups if any(each is first for each in group["params"]))
    return float(next(groups)["lr"])
