"""Measured steps of a user's own loop, for `polyrhythm profile SCRIPT`.

The script runs as one synchronous worker. Its process ends once enough steps have been measured:

    optimizer's step is over ── model's forward pass begins ── it ends ── optimizer's step begins ── step is over
              │ data                     │ forward                │ backward (with the loss)  │ update │

With several forward passes a step, `forward` lasts to the end of the last one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyrhythm.api.loop.distributed_optimizer import DistributedOptimizer
from polyrhythm.api.loop.loop_report import images_in
from polyrhythm.planning.limits import embedded, measured_limits
from polyrhythm.planning.step import WARM_UP, LayerClocks, watched_steps
from polyrhythm.roles.step_metrics import finish_work

PROFILE_VARIABLE = "POLYRHYTHM_PROFILE"
"""Set by `polyrhythm profile SCRIPT`: the number of steps to measure, and the file for the result."""


class LoopProfile:
    """Measurement of a loop's steps.

    Args:
        steps: number of steps to measure, after a few for warming up.
        file: file to write.
    """

    def __init__(self, steps: int, file: Path) -> None:
        self._file = file
        self._unwatched = WARM_UP + steps
        self._watched = watched_steps(steps)
        self._device = torch.device("cpu")
        self._begun_at: float | None = None  # the first forward pass of the step
        self._examples = 0
        self._passed_at = 0.0
        self._ended_at = 0.0
        self._steps: list[tuple[float, float, float, float]] = []
        self._batches: list[int] = []
        self._shapes: set[tuple[torch.Size, ...]] = set()

    @classmethod
    def requested(cls) -> LoopProfile | None:
        """Return the measurement that this process was started for; None: it is an ordinary run."""
        steps, _, file = os.environ.get(PROFILE_VARIABLE, "").partition(":")
        return cls(int(steps), Path(file)) if file else None

    def watch(self, model: nn.Module, optimizer: DistributedOptimizer) -> None:
        """Measure the steps of a model and its optimizer from now on."""
        self._device = next(model.parameters()).device
        clocks = LayerClocks(model, self._now)
        self._ended_at = self._now()

        def pass_begins(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            if self._begun_at is None:
                self._begun_at = self._now()
            self._examples += images_in(list(given)) or images_in(named)
            tensors = (each for each in (*given, *named.values()) if isinstance(each, torch.Tensor))
            self._shapes.add(tuple(each.shape[1:] for each in tensors))

        def step_ends(*_: object) -> None:
            self._step_ends(model, clocks)

        model.register_forward_pre_hook(pass_begins, with_kwargs=True)
        optimizer.register_step_pre_hook(self._passes_end)
        optimizer.register_step_post_hook(step_ends)

    def _now(self) -> float:
        finish_work(self._device)
        return time.perf_counter()

    def _passes_end(self, *_: object) -> None:
        self._passed_at = self._now()

    def _step_ends(self, model: nn.Module, clocks: LayerClocks) -> None:
        ended_at, forward_at = self._now(), clocks.end_step()
        if self._begun_at is not None:
            self._steps.append(
                (
                    self._begun_at - self._ended_at,
                    forward_at - self._begun_at,
                    self._passed_at - forward_at,
                    ended_at - self._passed_at,
                )
            )
            self._batches.append(self._examples)
        self._begun_at, self._examples = None, 0
        if len(self._steps) == self._unwatched:
            clocks.watch()
        if len(self._steps) == self._unwatched + sum(self._watched):
            self._end(model, clocks)
        self._ended_at = self._now()

    def _end(self, model: nn.Module, clocks: LayerClocks) -> None:
        """Write the measurement, and end the process: the rest of the script would train and save."""
        found = {
            "steps": self._steps[WARM_UP : self._unwatched],
            "batch_size": statistics.median_low(self._batches),
            "layers": [vars(layer) for layer in clocks.read(self._watched[0])],
            "model": type(model).__name__,
            "threads": torch.get_num_threads(),
            "limits": (*measured_limits(len(self._shapes), clocks.varied), *embedded(model)),
        }
        self._file.write_text(json.dumps(found), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
