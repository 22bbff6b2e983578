"""What workers and servers have done since they last said so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyrhythm.events.event import Event


@dataclass(frozen=True, kw_only=True)
class WorkerProgress(Event):
    """What one worker has done since its last such event.

    Attributes:
        worker: its index among the workers, from 0.
        epoch: the epoch it is in, from 0.
        step: steps done since the run began (over all epochs).
        steps: steps done since the last such event.
        images: images seen since the last such event.
        loss: mean training loss of those images.
        learning_rate: the one in use.
        wait_s: seconds of this stretch in which the worker waited for others.
    """

    worker: int
    epoch: int
    step: int
    steps: int
    images: int
    loss: float
    learning_rate: float
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WorkerTimings(Event):
    """What the seconds of one worker's steps went into, since its last such event; said only where it is asked for.

    Attributes:
        worker: its index among the workers, from 0.
        step: steps done since the run began.
        steps: that the seconds are of.
        data_s: waiting for a batch.
        forward_s: forward passes, with the transfer of the batch to the device.
        backward_s: backward passes.
        update_s: the optimiser and the strategy's own arithmetic, and what a server left for the worker to do.
        communication_s: inside the communicator, whatever else was to be done then; waiting for others is in it.
        other_s: the rest of the steps.
        in_step: whether workers take their steps together.
        communication: if so, (step, seconds) of each.
        spans: (what, start, end) in seconds since training started, of the first steps of a real run.
    """

    worker: int
    step: int
    steps: int
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    communication_s: float = 0.0
    other_s: float = 0.0
    in_step: bool = False
    communication: list[list[float]] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CacheUsed(Event):
    """Where a worker's training images came from, since its last such event; said only where decoded ones are kept.

    Attributes:
        worker: its index among the workers, from 0.
        images: that were asked for; a few more than it has learned from, where batches are prepared ahead.
        hits: of these, how many were kept.
        kept_bytes: that its cache holds now; ranks of one host may share it.
    """

    worker: int
    images: int
    hits: int
    kept_bytes: int


@dataclass(frozen=True, kw_only=True)
class ServerProgress(Event):
    """What one server has done since its last such event.

    Attributes:
        server: its index among the servers, from 0.
        version: updates applied to its shard since the run began.
        staleness: how many gradients were applied at which staleness, since the last such event.
        seconds: since the last such event.
        busy_share: of those seconds, the fraction in which it did not wait for messages.
        queue: messages in a row that it found waiting when it looked for one, in the mean; 1: never another.
        dropped: gradients that came too late, since the run began.
        updating_s: of those seconds, spent on what came: looking at it, updating, making answers.
    """

    server: int
    version: int
    staleness: dict[int, int]
    seconds: float = 0.0
    busy_share: float = 0.0
    queue: float = 0.0
    dropped: int = 0
    updating_s: float = 0.0
