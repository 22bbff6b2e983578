"""The gradients of a user's loop: their owner, and the detection of the end of a backward pass.

    STEP    synchronous: the workers' mean, on all of them, from the end of the backward pass on, as in torch's DDP
    ASKED   lockstep with servers, lazy update: like STEP in the first step, and in all if the loop changes gradients
            there; else this worker's own, and the mean once the loop requests it
    OWN     asynchronous, local updates: this worker's own, which it applies or pushes

    backward ─▶ hook of each parameter: it has a gradient ─▶ engine's callback: the pass is over ─▶ mean (STEP)

Changes of gradients before `step` (clipping, unscaling) then mean under STEP what they mean in one process, and under
ASKED, where the mean costs an exchange of its own. Changes are detected by torch's version counter; a change of a
worker's own gradients is reported once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

import polyrhythm
from polyrhythm.roles.trainer import LoopSteps
from polyrhythm.training.flat_parameters import FlatParameters


class Mean(Enum):
    """When a worker holds the mean of all workers' gradients."""

    STEP = "after every backward pass"
    ASKED = "when the loop asks for it"
    OWN = "never"


class Gradients:
    """Records one worker's gradients from one step to the next.

    Args:
        flat: the model's parameters and gradients.
        mean: time at which the worker holds the mean.
        average: function that overwrites the gradients with the workers' mean; unused with `Mean.OWN`.
        optimized: the parameters that the optimizer knows.

    Attributes:
        mean: the argument of that name.
        averaged: whether the gradients are the workers' mean.
        averages: whether every backward pass ends with the mean.
        pass_over: called when a backward pass is over, before anything is averaged.
    """

    def __init__(
        self,
        flat: FlatParameters,
        mean: Mean,
        average: Callable[[], None],
        optimized: Iterable[Tensor] = (),
    ) -> None:
        self.mean = mean
        self.averaged = False
        self.averages = mean is not Mean.OWN
        self.pass_over: Callable[[], None] | None = None
        self._flat = flat
        self._average = average
        self._seen = bytearray(len(flat.views))
        self._had = self._seen
        self._task = -1
        self._fired = False
        self._accumulates = False
        self._version: int | None = None
        known = set(map(id, optimized))
        self._left = [each for each, view in enumerate(flat.views) if id(view.parameter) not in known]
        self._kept: list[tuple[int, int, Tensor]] | None = None
        self._hooks = [self._watch(position, view.parameter) for position, view in enumerate(flat.views)]

    def of(self, optimized: Iterable[Tensor]) -> Gradients:
        """Return a record of other parameters in the same vector, and close this one; no step may be in progress.

        Args:
            optimized: the parameters that the optimizer knows now.
        """
        self.close()
        made = Gradients(self._flat, self.mean, self._average, optimized)
        made.averages, made.pass_over = self.averages, self.pass_over
        return made

    def close(self) -> None:
        """Remove the hooks: the model outlives the loop, and hooks would keep the loop's objects alive."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate the gradients of passes in this context locally; the next pass outside exchanges their sum."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def note_missing(self) -> None:
        """Set which parameters have no gradient, just before gradients are exchanged."""
        missing = []
        for position, view in enumerate(self._flat.views):
            gradient = view.parameter.grad
            if gradient is not None and self._seen[position]:
                continue
            # Set by hand, as by `torch.autograd.grad`, if it is another tensor, or ours and not zero.
            ours = view.holds_gradient() or (
                gradient is not None and gradient.dtype is not view.gradient.dtype
            )
            if gradient is None or (ours and not bool(gradient.any())):
                self._seen[position] = 0
                missing.append(position)
        self._flat.without_gradient = tuple(missing)

    def zero(self, *, to_none: bool) -> None:
        """Set all gradients to zero that the optimizer knows.

        Args:
            to_none: whether they are None to it until there are others; False undoes that for those that are zero.
        """
        self.averaged = False
        self._version = None
        self._flat.gather_gradients()
        views, left = self._flat.views, self._kept
        if left is None:
            left = [(each, self._seen[each], views[each].gradient.clone()) for each in self._left]
        self._kept = None
        if to_none:
            self._had, self._seen = self._seen, bytearray(len(self._seen))
        else:
            self._seen = bytearray(map(max, self._had, self._seen))
        self._flat.zero_gradients()
        for view in self._flat.apart:
            if view.parameter.grad is not None:
                view.parameter.grad.zero_()
        for position, seen, gradient in left:  # torch's `zero_grad` does not know them either
            self._seen[position] = seen
            views[position].gradient.copy_(gradient)
        if left:
            self._flat.spread_gradients()

    @property
    def pending(self) -> bool:
        """Whether the current step has gradients that no optimizer has used."""
        left = set(self._left)
        return any(
            seen
            and position not in left
            and view.parameter.grad is not None
            and bool(view.parameter.grad.any())
            for position, (seen, view) in enumerate(zip(self._seen, self._flat.views, strict=True))
        )

    def keep_left(self) -> None:
        """Keep those that the optimizer does not know until the next `zero`: an exchange in between ends with zeros."""
        if self._left:
            self._flat.gather_gradients()
            views = self._flat.views
            self._kept = [(each, self._seen[each], views[each].gradient.clone()) for each in self._left]

    def changed_by_loop(self) -> bool:
        """Whether they were changed after the backward pass; False where no pass has ended."""
        return self._version is not None and self._flat.gradients._version != self._version

    def mean_of(self, steps: LoopSteps, weight: float) -> None:
        """Overwrite the gradients with the workers' weighted mean, under `Mean.ASKED`; all must call it.

        Args:
            steps: sums over the workers.
            weight: weight of this worker.
        """
        self._flat.gather_gradients()
        if steps.trainer.workers.size > 1:
            self._flat.set_tail(weight, 0.0)
            self._flat.gradients.mul_(weight)
            steps.sum(self._flat.gradients_and_tail)
            if self._flat.tail()[0] > 0:
                self._flat.divide_by_tail()
            self._flat.spread_gradients()
        self.averaged = True

    def _watch(self, position: int, parameter: torch.nn.Parameter) -> RemovableHandle:
        def accumulated(_: Tensor) -> None:
            self._seen[position] = 1
            self._fired = True
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._task = task
                Variable._execution_engine.queue_callback(self._at_end)

        frozen = not parameter.requires_grad
        parameter.requires_grad_(True)  # else torch takes no hook; it stays if the parameter is thawed
        hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(accumulated)
        parameter.requires_grad_(not frozen)
        return hook

    def _at_end(self) -> None:
        """End a backward pass: once, though there is a callback for every graph that it consists of."""
        if not self._fired or _inside_backward(sys._getframe()):
            return
        self._fired, self._task = False, -1
        self.averaged = False
        if self.pass_over is not None:
            self.pass_over()
        if self.averages and not self._accumulates:
            self._average()
        if self.mean is not Mean.STEP:
            self._version = self._flat.gradients._version


def _inside_backward(frame: FrameType | None) -> bool:
    """Return whether a pass is part of another, as of a checkpoint of activations that computes them again."""
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, polyrhythm))
_STANDARD, _INSTALLED = str(Path(threading.__file__).parent), "site-packages"


def line_of_script(frame: FrameType | None) -> str:
    """Return the file and line of the user's program that called, in parentheses; empty if there is none."""
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or (file.startswith(_STANDARD) and _INSTALLED not in file)
