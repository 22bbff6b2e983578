"""How large buckets of gradients are: as asked, or as the links are found to want it.

    seconds(n) = latency + n * seconds_per_number        measured for one number and for many
    bytes      = 8 * latency / seconds_per_number * bytes of a number

Then a bucket's latency is a ninth of its time: smaller buckets would set out sooner and all arrive later. Worker 0's
figures count, so that all cut alike. The default is fixed all the same: where sums depend on the cut (gloo over more
than 16 hosts), measured sizes would give other bits in every run.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.strategies.buckets.transfer_order import Speed
from polyrhythm.training.flat_parameters import DEFAULT_BUCKET_BYTES

BucketBytes = Annotated[int, Field(ge=1)] | Literal["tuned"]
"""Least bytes of a bucket, or `tuned`."""

LEAST_BYTES, MOST_BYTES = 256 << 10, 64 << 20
_LATENCIES = 8
_PROBE_NUMBERS = 1 << 18
_TRIES = 3


def bucket_bytes_for(
    asked: BucketBytes, workers: Communicator | None, collective: Collective, like: Tensor
) -> int | None:
    """Gives the least bytes of a bucket; None for the default. All workers must call it.

    Args:
        asked: by the user.
        workers: who adds up; None before a rehearsal.
        collective: how.
        like: a tensor of the gradients' dtype and device.

    Raises:
        RequestError: there is nothing to measure with.
    """
    if asked != "tuned":
        return None if asked == DEFAULT_BUCKET_BYTES else asked
    if workers is None:
        raise RequestError(
            "bucket_bytes=tuned needs links to measure, which a rehearsal lacks: give a number"
        )
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
    """Measures all-reduces of one number and of all of a vector; gives what worker 0 has found.

    Args:
        workers: all of them must call it.
        sums: over them.
        probe: `(n,)`, of zeros; at least two.
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
