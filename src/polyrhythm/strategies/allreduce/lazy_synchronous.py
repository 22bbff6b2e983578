"""Synchronous SGD with lazy update.

Wu, Yan, Shan, Dang, Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv 1501.02876, section 3.2.

    backward of layer l         ─▶ its gradients set out at once
    forward of layer l (next)   ─▶ waits for them;  w_l' = w_l - lr * sum_i b_i g_i,l / sum_i b_i

Nothing is stale: the numbers are those of `synchronous`, to the bit. But the transfer of a layer may take until its
parameters are used again.

    synchronous   | forward |  backward  |·transfer·| forward | …
    lazy          | forward |  backward  | forward |  …                the first layers' transfer has come first
                       transfers: ──last layers──▶◀first▶◀──last layers──▶

It cannot take a mean over all gradients before the first update, such as clipping by their common norm. It can use
float16, because each worker knows before it sends whether its step overflowed.

A lost worker may leave a step half made: some buckets have come, to all workers or to some. Sums end in one order, so
the worker that has most of them has what the others have, and hands it on. Those who are left take the step again for
the other buckets only. So each bucket gets one update per step, and all who made it agree.

Departures from the paper:

- Layers are gathered into buckets, and large ones are cut into pieces. The piece that is used soonest goes first (see
  `transfer_order`).
- Gradients are weighted with their samples.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator
from polyrhythm.specs import chosen
from polyrhythm.strategies.buckets.bucket_size import BucketBytes, bucket_bytes_for
from polyrhythm.strategies.buckets.lazy_worker import LazyWorker
from polyrhythm.strategies.facts import Facts
from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.late_replicas import LateReplicas
from polyrhythm.strategies.paper import Paper
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.flat_parameters import DEFAULT_BUCKET_BYTES


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
        when_a_worker_dies="the others regroup at each layer's last whole update and go on; a successor joins them",
    )

    begins_again: ClassVar[bool] = True
    waits_between_layers: ClassVar[bool] = True

    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES
    piece_bytes: int = Field(default=DEFAULT_BUCKET_BYTES, ge=0)

    def in_step(self, workers: int) -> bool:
        """Always."""
        return True

    def goes_on(self, workers: int) -> bool:
        """By regrouping."""
        return self.regroups(workers)

    def regroups(self, workers: int) -> bool:
        """If there is more than one worker, and a successor need not measure what the others have measured before."""
        return workers > 1 and self.bucket_bytes != "tuned"

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
        return [*super().invariants(conditions), LateReplicas(conditions)]

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        return LazyWorker(setting, self.collective, self.piece_bytes)
