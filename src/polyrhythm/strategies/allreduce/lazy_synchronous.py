"""Synchronous SGD with lazy update.

Wu, Yan, Shan, Dang, Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv 1501.02876, section 3.2.

    backward of layer l         ─▶ its gradients set out at once
    forward of layer l (next)   ─▶ waits for them;  w_l' = w_l - lr * sum_i b_i g_i,l / sum_i b_i

Nothing is stale: the same numbers as `synchronous`, to the bit, only that a layer's transfer has until its parameters
are used again. Departures: layers are gathered into buckets, and large ones cut into pieces, of which the one that is
used soonest goes first (see `transfer_order`); gradients are weighted with their samples.

    synchronous   | forward |  backward  |·transfer·| forward | …
    lazy          | forward |  backward  | forward |  …                the first layers' transfer has come first
                       transfers: ──last layers──▶◀first▶◀──last layers──▶

A mean over all gradients before the first update (clipping by their common norm) is what it cannot have. float16 can be
had: whether a step overflowed is each worker's own business, and known before it sends.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.bucket_size import BucketBytes, bucket_bytes_for
from polyrhythm.strategies.facts import Facts
from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.replicas import Replicas
from polyrhythm.strategies.late_mean import LateMean
from polyrhythm.strategies.paper import Paper
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import DEFAULT_BUCKET_BYTES
from polyrhythm.training.sliced_optimizer import SlicedOptimizer


class LazySynchronous(Strategy):
    """All workers average their gradients at every step, and wait for each layer's only before its next use.

    Attributes:
        collective: how gradients are added up; `ring`, `recursive_doubling`, `auto`, … or the `library`'s own.
        bucket_bytes: least bytes of a bucket, which travels as one; `tuned`: as the links are measured to want it.
        piece_bytes: larger buckets are cut into pieces of about so much, so that what is used sooner can go between
            them; 0: buckets go as they are and in their order, as those of `synchronous`.
    """

    paper: ClassVar[Paper] = Paper(
        "Wu, Yan, Shan, Dang, Sun",
        "Deep Image: Scaling up Image Recognition",
        "arXiv",
        2015,
        "1501.02876",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/N",
        staleness="0",
        use_it="as synchronous, where the network takes longer than the backward pass; one more copy of the gradients",
    )

    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES
    piece_bytes: int = Field(default=DEFAULT_BUCKET_BYTES, ge=0)

    def in_step(self, workers: int) -> bool:
        """Always."""
        return True

    def bucket_bytes_for(self, workers: Communicator | None, like: Tensor) -> int | None:
        """As asked, or as measured."""
        return bucket_bytes_for(self.bucket_bytes, workers, self.collective, like)

    def updates_per_step(self, workers: int) -> int:
        """One: that of the mean gradient."""
        return 1

    def slices(self, workers: int) -> int:
        """One a worker."""
        return workers

    def invariants(self, conditions: Conditions) -> list[Invariant]:
        """All replicas are equal, and hold all gradients but those of the latest step."""
        workers = conditions.cast.workers
        replicas = Replicas(conditions, [workers], alone=True, behind=0 if len(workers) == 1 else 1)
        return [*super().invariants(conditions), replicas]

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        return LazyWorker(setting, self.collective, self.piece_bytes)


class LazyWorker(WorkerPart):
    """Lets buckets travel while it goes on, and updates each just before its parameters are used again."""

    replicated: ClassVar[bool] = True
    hears_buckets: ClassVar[bool] = True
    hears_use: ClassVar[bool] = True

    def __init__(self, setting: WorkerSetting, collective: Collective, piece_bytes: int) -> None:
        super().__init__()
        flat = setting.flat
        self._workers = setting.workers
        self._flat = flat
        self._mean = LateMean(setting.workers, flat, collective, piece_bytes)
        places = [slice(bucket.start, min(bucket.stop, flat.size)) for bucket in flat.buckets]
        self._places = places
        self._optimizer = SlicedOptimizer(setting.plan, flat.vector, places)
        self._pending: set[int] = set()
        self._weight = 0.0
        self._learning_rate = 0.0

    def start(self, step: int) -> int:
        """Takes worker 0's parameters."""
        self._workers.broadcast(self._flat.vector)
        self._mean.prepare()
        return step

    def begin(self, step: Step) -> None:
        """Readies the mean; buckets of the last step may still be on their way."""
        self._mean.begin(step)

    def before_use(self, bucket: int) -> None:
        """Waits for the bucket's gradients of the last step, and updates it."""
        if bucket in self._pending:
            self._update(bucket)

    def bucket_ready(self, bucket: int) -> None:
        """Starts to average a bucket."""
        if bucket in self._pending:
            self._update_unused(bucket)
        self._mean.start(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Starts what is left; what has come is for later.

        Raises:
            RequestError: parameters have been used that were not announced, and so were not up to date.
        """
        for bucket in sorted(self._pending):
            self._update_unused(bucket)
        weight, stop = self._mean.finish(step)
        self._weight, self._learning_rate = weight, learning_rate
        self._pending = set(range(len(self._places)))
        if weight > 0:
            self.staleness[0] += 1
        if self._workers.size == 1:  # nothing is on its way, and the gradients are about to be zeroed
            self.settle()
        return stop

    def settle(self) -> None:
        """Waits for all buckets and updates them, the soonest used first."""
        for bucket in sorted(self._pending, reverse=True):
            self._update(bucket)

    def end(self) -> None:
        """Finishes what is under way."""
        self.settle()

    def state(self) -> State:
        """Gives the optimiser's state, once nothing is under way."""
        self.settle()
        return self._optimizer.state()

    def load_state(self, state: State) -> None:
        """Takes back the optimiser's state."""
        self._optimizer.load_state(*state)

    def _update(self, bucket: int) -> None:
        self._pending.discard(bucket)
        with torch.inference_mode(False):  # else what an optimiser keeps could not be changed in training
            gradient = self._mean.take(bucket)
            if self._weight > 0:
                self._optimizer.step(bucket, gradient, self._learning_rate)

    def _update_unused(self, bucket: int) -> None:
        """Updates a bucket that no forward pass of this step has announced, which must then have no gradient."""
        place = self._places[bucket]
        if bool(self._flat.gradients[place].any()):
            views = [self._flat.views[at] for at in self._flat.buckets[bucket].parameters]
            name = next(view.name for view in views if bool(view.gradient.any()))
            raise RequestError(
                f"lazy_synchronous: {name} was used without calling its module, before its update had come: call the "
                "module, or use synchronous"
            )
        self._update(bucket)
