"""Communication scheduling: the size of buckets of gradients, their pieces, and the order of transfers.

Peng, Zhu, Chen, Bao, Yi, Lan, Wu, Guo, "A generic communication scheduler for distributed DNN training
acceleration", SOSP 2019 (ByteScheduler), for cutting and for urgency.

    next = the piece used soonest among those with ready[piece] <= t        t: when the link is free again
    t'   = t + latency_s + numbers * seconds_per_number

ready[piece] and the time of its next use are measured by `BucketTimes` on each worker.

Departure from the paper: all ranks must use the same order, and no rank can ask the others at every piece. So
the order is the one that the rule gives for the times of the previous step, which all ranks know.

The size of a bucket is the one that was asked for, or (`tuned`) follows from measured links:

    seconds(n) = latency + n * seconds_per_number        measured for one number and for many
    bytes      = 8 * latency / seconds_per_number * bytes of a number

Then a bucket's latency is a ninth of its time: smaller buckets would start sooner and all arrive later.
Worker 0's measurement counts, so that all workers cut alike. The default is nevertheless fixed: where sums
depend on the cut (gloo over more than 16 hosts), measured sizes would give other bits in every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Clock, Communicator
from polyrhythm.errors import RequestError
from polyrhythm.training.flat_parameters import DEFAULT_BUCKET_BYTES, Bucket


@dataclass(frozen=True)
class Piece:
    """Adjacent gradients that are sent as one message.

    Attributes:
        bucket: index of its bucket.
        start: index of its first element in the vector.
        stop: end index, exclusive.
    """

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class Speed:
    """Cost model of an all-reduce.

    Attributes:
        latency_s: fixed cost, in seconds.
        seconds_per_number: additional seconds per element.
    """

    latency_s: float
    seconds_per_number: float


def cut(buckets: Sequence[Bucket], numbers: float) -> list[Piece]:
    """Cut large buckets into equal pieces, in the order in which buckets are filled, the end of each bucket first.

    Args:
        buckets: buckets of the vector.
        numbers: minimum number of elements of a piece; 0 cuts nothing.
    """
    pieces = []
    for number, bucket in enumerate(buckets):
        length = bucket.stop - bucket.start
        parts = max(1, int(length / numbers)) if numbers else 1
        ends = [bucket.start + length * part // parts for part in range(parts + 1)]
        pieces += [Piece(number, ends[part], ends[part + 1]) for part in reversed(range(parts))]
    return pieces


def seconds(piece: Piece, speed: Speed) -> float:
    """Return the seconds of the all-reduce of a piece."""
    return speed.latency_s + (piece.stop - piece.start) * speed.seconds_per_number


def urgent_first(
    pieces: Sequence[Piece], ready_s: Sequence[float], use_s: Sequence[float], speed: Speed
) -> list[int]:
    """Return the order of transfers, as indices of `pieces`: piece 0 first, then by the rule of this module.

    Args:
        pieces: pieces in the order in which they are filled.
        ready_s: time at which each bucket's gradients are ready, in order, relative to any origin.
        use_s: time of each bucket's next use, relative to any other origin.
        speed: cost model of the link.
    """
    waiting: list[tuple[float, int]] = []
    order, coming = [0], 1
    now_s = ready_s[0] + seconds(pieces[0], speed)
    while len(order) < len(pieces):
        if not waiting:
            now_s = max(now_s, ready_s[pieces[coming].bucket])
        while coming < len(pieces) and ready_s[pieces[coming].bucket] <= now_s:
            heapq.heappush(waiting, (use_s[pieces[coming].bucket], coming))
            coming += 1
        order.append(heapq.heappop(waiting)[1])
        now_s += seconds(pieces[order[-1]], speed)
    return order


BucketBytes = Annotated[int, Field(ge=1)] | Literal["tuned"]
"""Minimum bytes of a bucket, or `tuned`."""

LEAST_BYTES, MOST_BYTES = 256 << 10, 64 << 20
_LATENCIES = 8
_PROBE_NUMBERS = 1 << 18
_TRIES = 3


def bucket_bytes_for(
    asked: BucketBytes, workers: Communicator | None, collective: Collective, like: Tensor
) -> int | None:
    """Return the minimum bytes of a bucket; None for the default. All workers must call it.

    Args:
        asked: value of the option.
        workers: communicator of the all-reduce; None before a dry run.
        collective: all-reduce algorithm.
        like: tensor with the gradients' dtype and device.

    Raises:
        RequestError: there is nothing to measure with.
    """
    if asked != "tuned":
        return None if asked == DEFAULT_BUCKET_BYTES else asked
    if workers is None:
        raise RequestError("bucket_bytes=tuned needs links to measure, which a dry run lacks: give a number")
    if workers.size == 1:
        return None
    sums = AllReduce(collective, workers, "bucket size")
    sums.prepare()
    probe = torch.zeros(_PROBE_NUMBERS, dtype=like.dtype, device=like.device)
    speed = measured_speed(workers, sums, probe)
    if speed.seconds_per_number <= 0:  # noise hides the bytes
        return MOST_BYTES
    wanted = _LATENCIES * speed.latency_s / speed.seconds_per_number * like.element_size()
    return min(MOST_BYTES, max(LEAST_BYTES, round(wanted)))


def measured_speed(workers: Communicator, sums: AllReduce, probe: Tensor) -> Speed:
    """Measure all-reduces of one element and of a whole vector; return worker 0's measurement.

    Args:
        workers: communicator of all workers; all must call this.
        sums: all-reduce over them.
        probe: `(n,)`, zeros; n >= 2.
    """
    few_s, many_s = (_least_seconds(workers, sums, part) for part in (probe[:1], probe))
    found = torch.tensor([few_s, (many_s - few_s) / (probe.numel() - 1)], dtype=torch.float64)
    workers.broadcast(found)
    latency_s, seconds_per_number = found.tolist()
    return Speed(latency_s, max(0.0, seconds_per_number))


def _least_seconds(workers: Communicator, sums: AllReduce, part: Tensor) -> float:
    tries = []
    for _ in range(_TRIES):
        began = workers.clock.now()
        sums.start(part).wait()
        tries.append(workers.clock.now() - began)
    return min(tries)


class BucketTimes:
    """Records the times of one worker's steps without the time spent waiting for transfers.

    Args:
        clock: clock of the worker.
        buckets: number of buckets.

    Attributes:
        use_s: seconds of each bucket's first use since the first use in the latest forward pass.
        ready_s: seconds at which each bucket was ready since the first one in the latest backward pass; never
            decreasing.
    """

    def __init__(self, clock: Clock, buckets: int) -> None:
        self.use_s = [0.0] * buckets
        self.ready_s = [0.0] * buckets
        self._clock = clock
        self._first_use: float | None = None
        self._first_ready = 0.0
        self._waited_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._first_use, self._waited_s = None, 0.0

    def use(self, bucket: int) -> float:
        """A bucket is about to be used; gives the time."""
        now = self._clock.now()
        if self._first_use is None:
            self._first_use = now
        self.use_s[bucket] = now - self._first_use - self._waited_s
        return now

    def waited_since(self, began: float) -> None:
        """The step has waited since a time."""
        self._waited_s += self._clock.now() - began

    def ready(self, bucket: int) -> None:
        """Record that a bucket's gradients are ready; buckets must be announced in order."""
        now = self._clock.now()
        if bucket == 0:
            self._first_ready = now
        self.ready_s[bucket] = now - self._first_ready
