"""A worker's gradients are not finite."""

from __future__ import annotations

import math
import multiprocessing
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from conformance.jobs import perceptron, result_of, strategy
from multiprocess.faults.play import job_of, played
from multiprocess.faults.seen import Seen
from polyrhythm.api.faults import Outcome
from polyrhythm.errors import RequestError

ERRS, AT_STEP = 1, 10


class Erring(nn.Module):
    """A perceptron of which, in the process of worker 1, the gradients of the tenth step are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        self.errs = multiprocessing.current_process().name.endswith(f"rank {ERRS}")
        self.steps = 0

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.inner(images)
        self.steps += self.training
        if self.errs and self.training and self.steps == AT_STEP:
            if not out.requires_grad:  # where workers share the layers, and this is what goes into them
                return out * math.nan
            out.register_hook(lambda gradient: gradient * math.nan)
        return out


def not_finite(spec: str, folder: Path) -> Seen:
    """Lets one step of one worker err: it is left out, or the run ends with it."""
    job = job_of(spec, folder, model=Erring, epochs=4)
    try:
        events = played(job)
    except RequestError as error:
        said = str(error)
    else:
        return _left_out(result_of(events), strategy(spec).shard_count)
    assert re.match(r"^the loss is nan at step \d+ of worker \d \(rank \d\)", said), said
    return Seen(Outcome.ENDS, said)


def _left_out(result: dict[str, Any], shards: int) -> Seen:
    counted = result["gradients_not_finite"], result["workers_ejected"]
    assert counted == (shards, 0), counted
    assert math.isfinite(result["test_loss"])
    return Seen(Outcome.LEFT_OUT, f"gradients_not_finite: {shards}")
