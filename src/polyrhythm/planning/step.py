"""Where the time of a training step goes: data, forward, backward, update, and layer by layer."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, Rendezvous
from polyrhythm.communication.transports.torch_distributed.transport import connect
from polyrhythm.data.loader import Batch
from polyrhythm.planning.layer_clocks import Layer, LayerClocks
from polyrhythm.roles.job import Job
from polyrhythm.roles.learner import Learner
from polyrhythm.roles.world import World
from polyrhythm.strategies.cast import Cast

WARM_UP = 3
"""Steps that are not measured: the first ones find memory and kernels still to be made."""


@dataclass(frozen=True)
class StepProfile:
    """A model's step on one worker.

    Attributes:
        step_s: seconds of every measured step, without waiting for data.
        data_s: median seconds in which the step's batch was waited for.
        forward_s: median seconds, the copying of the batch to the device included.
        backward_s: median seconds, the loss included.
        update_s: median seconds of the optimiser, and of all else that comes after the backward pass.
        layers: in the order of the forward pass.
    """

    step_s: tuple[float, ...]
    data_s: float
    forward_s: float
    backward_s: float
    update_s: float
    layers: tuple[Layer, ...]

    @property
    def median_s(self) -> float:
        """Of the steps."""
        return statistics.median(self.step_s)

    @property
    def sigma(self) -> float:
        """How much the steps spread: the standard deviation of their logarithms."""
        return statistics.pstdev(map(math.log, self.step_s))

    def to_json(self) -> dict[str, Any]:
        """Gives its facts, JSON-able."""
        parts = {name: getattr(self, name) for name in ("data_s", "forward_s", "backward_s", "update_s")}
        return {
            "steps": len(self.step_s),
            "step_s": self.median_s,
            **parts,
            "layers": [dict(vars(layer)) for layer in self.layers],
        }


class WatchedPace:
    """Time passes by itself, and when the two passes begin and end is noted.

    Args:
        device: whose work must be over before its time is taken.

    Attributes:
        forward_at: when the latest forward pass began.
        backward_at: when the latest backward pass ended.
    """

    live = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forward_at = 0.0
        self.backward_at = 0.0

    def now(self) -> float:
        """Gives the time once the device has done what it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def forward(self, shares: Sequence[float], use: Callable[[int], None], work: float = 1.0) -> None:
        """Notes the time."""
        self.forward_at = self.now()

    def backward(self, shares: Sequence[float], ready: Callable[[int], None]) -> None:
        """Notes the time."""
        self.backward_at = self.now()


def profile_step(job: Job, steps: int) -> StepProfile:
    """Trains some steps on one worker alone, as a run would, and takes the time of their parts.

    Args:
        job: what to learn, with a strategy of one worker and no server.
        steps: how many to measure; some more come first, to warm up.

    Raises:
        RequestError: the loss is not finite.
    """
    pace = WatchedPace(job.device)
    home, network = connect(Rendezvous(dist.HashStore(), 0, 1, LOOPBACK))
    try:
        learner = Learner(job, World(network, Cast((0,)), pace=pace))
        learner.replica.part.start(0)
        layers = LayerClocks(learner.replica.model, pace.now)
        batches = chain.from_iterable(learner.epoch(epoch, 0) for epoch in count())
        parts = [_parts(learner, batches, pace, layers) for _ in range(WARM_UP + steps)]
    finally:
        home.close()
    kept = parts[WARM_UP:]
    data, forward, backward, update = (statistics.median(times) for times in zip(*kept, strict=True))
    whole = tuple(sum(times[1:]) for times in kept)
    return StepProfile(whole, data, forward, backward, update, layers.read(WARM_UP))


def _parts(
    learner: Learner, batches: Iterator[Batch], pace: WatchedPace, layers: LayerClocks
) -> tuple[float, float, float, float]:
    """Does a step; gives the seconds of data, forward, backward and update."""
    asked_at = pace.now()
    batch = next(batches)
    begun_at = pace.now()
    learner.step(batch, batch.step)
    ended_at = pace.now()
    forward_end = layers.end_step()
    return (
        begun_at - asked_at,
        forward_end - begun_at,
        pace.backward_at - forward_end,
        ended_at - pace.backward_at,
    )
