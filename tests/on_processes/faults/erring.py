"""A worker's gradients are not finite, while the others are under way."""

from __future__ import annotations

import math
import multiprocessing
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from conformance.jobs import perceptron, result_of, strategy
from on_processes.brake import Brake
from on_processes.faults.play import job_of, played
from on_processes.faults.seen import Seen
from polyrhythm.api.faults import Outcome
from polyrhythm.errors import RequestError

ERRS, AT_STEP = 1, 10


class Erring(nn.Module):
    """A perceptron of which, in the process of worker 1, the gradients of the tenth step are not finite.

    Args:
        brake: on the others, until worker 1 has gone on from there.
    """

    def __init__(self, brake: Brake) -> None:
        super().__init__()
        self.inner = perceptron()
        self.errs = multiprocessing.current_process().name.endswith(f"rank {ERRS}")
        self.steps = 0
        self._brake = brake
        if not self.errs:
            brake.on(self)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.inner(images)
        self.steps += self.training
        if self.errs and self.steps == AT_STEP + 1:
            self._brake.release()
        if self.errs and self.training and self.steps == AT_STEP:
            if not out.requires_grad:  # where workers share the layers, and this is what goes into them
                return out * math.nan
            out.register_hook(lambda gradient: gradient * math.nan)
        return out


def erring_layer() -> nn.Module:
    """Makes a perceptron whose last layer errs at its tenth pass; stages of a pipeline run each layer by itself."""
    made, passes = perceptron(), count(1)

    def err(_layer: nn.Module, _inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        if outputs.requires_grad and next(passes) == AT_STEP:
            outputs.register_hook(lambda gradient: gradient * math.nan)

    next(reversed(list(made.children()))).register_forward_hook(err)
    return made


def not_finite(spec: str, folder: Path) -> Seen:
    """Lets one step of one worker err: it is left out, or the run ends with it."""
    brake = Brake(folder / "brake", AT_STEP)
    pipelined = strategy(spec).traits(ERRS + 1).pipelines
    make = erring_layer if pipelined else lambda: Erring(brake)
    job = replace(job_of(spec, folder / "run", epochs=4), make_model=make)
    try:
        events = played(job)
    except RequestError as error:
        said = str(error)
    else:
        return _left_out(result_of(events), strategy(spec).traits(1).shards)
    assert re.match(r"^the loss is nan at step \d+ of worker \d \(rank \d\)", said), said
    return Seen(Outcome.ENDS, said)


def _left_out(result: dict[str, Any], shards: int) -> Seen:
    counted, ejected = result["gradients_not_finite"], result["workers_ejected"]
    dropped = counted == 0 and result["images_not_seen"] > 0  # where nobody looks at what comes late
    assert counted == shards or dropped, result
    assert not ejected, result
    assert math.isfinite(result["test_loss"])
    return Seen(Outcome.LEFT_OUT, f"gradients_not_finite: {counted}")
