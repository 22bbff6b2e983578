"""The worker part of lazy update: each bucket's update just before its parameters are used again.

    step s     | … gradients_ready |
    step s + 1                     | use bucket 2: update | use bucket 1: update | lost ┃ regroup
    step s, again                                              ┃ … gradients_ready | bucket 2, 1: made, 0: update | …

Members whose sums break have the updates of the first few buckets in the order of the sums, some a few more than
others.
"""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar

import torch

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import PeerLost, RequestError
from polyrhythm.strategies.buckets.late_mean import LateMean
from polyrhythm.strategies.buckets.transfer_order import Speed
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.optimizing.sliced_optimizer import SlicedOptimizer

_NONE = -1
_HALF_MADE = "half_made"


class LazyWorker(WorkerPart):
    """Lets buckets travel while it goes on, and updates each just before its parameters are used again."""

    replicated: ClassVar[bool] = True
    uses_bucket_ready: ClassVar[bool] = True
    uses_before_use: ClassVar[bool] = True

    def __init__(self, setting: WorkerSetting, collective: Collective, piece_bytes: int) -> None:
        super().__init__()
        flat = setting.flat
        self._workers = setting.workers
        self._flat = flat
        self._piece_bytes = piece_bytes
        self._mean = LateMean(setting.workers, flat, collective, piece_bytes)
        places = [slice(bucket.start, min(bucket.stop, flat.size)) for bucket in flat.buckets]
        self._places = places
        self._optimizer = SlicedOptimizer(setting.plan, flat.vector, places)
        self._pending: set[int] = set()
        self._latest = self._half_made = _NONE
        self._goes_back = False
        self._made: frozenset[int] = frozenset()
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
        self._latest = step.number
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

    def break_off(self) -> None:
        """Makes the updates that have come; the step is half made if some have not."""
        under_way = bool(self._pending)
        for bucket in sorted(self._pending, reverse=True):
            with suppress(PeerLost):
                self._update(bucket)
        missing = self._pending - self._made_before()
        self._goes_back = under_way and bool(missing)
        if self._goes_back:
            self._half_made, self._made = self._latest, frozenset(range(len(self._places))) - missing
        elif under_way:
            self._half_made, self._made = _NONE, frozenset()
        self._pending = set()
        self._mean.break_off()

    def begun_again(self, step: int) -> int:
        """With the step that is half made."""
        return self._half_made if self._goes_back else step

    def meetings(self, step: int) -> int:
        """Counts buckets: who has the update of one more is further."""
        made = len(self._made) if step == self._half_made else 0
        return step * len(self._places) + made

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Averages over others from now on."""
        known = self._mean.speed
        told = torch.zeros(workers.size, 2, dtype=torch.float64, device=self._flat.vector.device)
        told[workers.rank] = told.new_tensor([known.latency_s, known.seconds_per_number])
        workers.all_reduce(told)
        latency_s, seconds_per_number = told.amax(0).tolist()  # of whoever has looked, which nobody new has
        self._workers = workers
        self._mean = LateMean(workers, self._flat, self._mean.passed_on(), self._piece_bytes)
        self._mean.prepare(Speed(latency_s, seconds_per_number))

    def end(self) -> None:
        """Finishes what is under way."""
        self.settle()

    def state(self) -> State:
        """Gives the optimiser's state, once nothing is under way; bucket by bucket, if some have one update more."""
        self.settle()
        if not self._made:
            return self._optimizer.state()
        tensors, facts = self._optimizer.pieces()
        return tensors, {_HALF_MADE: self._half_made, "made": sorted(self._made), **facts}

    def load_state(self, state: State) -> None:
        """Takes back the optimiser's state."""
        tensors, facts = state
        if _HALF_MADE in facts:
            self._half_made, self._made = facts[_HALF_MADE], frozenset(facts["made"])
            self._optimizer.load_pieces(tensors, facts)
        else:
            self._half_made, self._made = _NONE, frozenset()
            self._optimizer.load_state(tensors, facts)

    def _made_before(self) -> frozenset[int]:
        """Gives the buckets that have had the latest step's update already, when it was begun before."""
        return self._made if self._latest == self._half_made else frozenset()

    def _update(self, bucket: int) -> None:
        with torch.inference_mode(False):  # else what an optimiser keeps could not be changed in training
            gradient = self._mean.take(bucket)
            self._pending.discard(bucket)
            if self._weight > 0 and bucket not in self._made_before():
                self._optimizer.step(bucket, gradient, self._learning_rate)
        if not self._pending and self._latest == self._half_made:
            self._half_made, self._made = _NONE, frozenset()

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
