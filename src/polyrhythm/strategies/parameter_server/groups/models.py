"""Models inside a group: its workers go on as a strategy says, and what they have moved by is for the servers.

    a round    members go from w to one model x, as the inside strategy has it, with the user's optimiser
    servers    w' = w - (w_read - x)        SGD of rate 1; in between, other groups may have moved w

What is pushed is the way back, so that servers do with it what they do with a gradient; a merge rule that takes
something off a stale one makes the way shorter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.groups.inside_part import Contribution
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizing.spans import Span

_PART, _READ, _VECTOR = "part.", "read", "vector"


class Models:
    """One member's side; see `InsidePart`. Every round is a contribution.

    Checkpoints may be made in the middle of a round; it is gone on with if all members have one of the same step, and
    the servers have not heard of the round.

    Args:
        setting: this worker's.
        group: whose member it is.
        inside: how the group goes on.
    """

    def __init__(self, setting: WorkerSetting, group: Communicator, inside: Strategy) -> None:
        self.plan = OptimizerPlan("SGD", (Span(0, setting.flat.size, {"lr": 1.0}),), 1.0)
        self.steps = inside.round_steps(group.size)
        self.apart = False
        self._flat = setting.flat
        self._group = group
        self._part = inside.worker(replace(setting, workers=group))
        self._read = torch.zeros_like(setting.flat.vector)
        self._done = 0
        self._stop_requested = False
        self._saved: State | None = None

    def start(self, step: int) -> None:
        """Lets the members start from the servers' parameters, with the optimiser that a checkpoint held."""
        shown = self._flat.vector.clone()
        self._part.start(step)
        self._flat.vector.copy_(shown)
        self._done = step
        self.refresh()

    def resume(self, step: int, contributions: int) -> bool:
        """Goes on where it was, if all members were at the same step of the round that the servers wait for."""
        saved = self._saved
        mine = saved is not None and saved[1]["apart"] and step // self.steps == contributions
        if not self._all_are_at(step, mine) or saved is None:
            return False
        self._part.start(step)
        self._flat.vector.copy_(saved[0][_VECTOR])
        self._read.copy_(saved[0][_READ])
        self._done, self.apart = step, True
        return True

    def begin(self, step: Step) -> None:
        """A step begins."""
        self._part.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        """The gradients of this bucket are final."""
        self._part.bucket_ready(bucket)

    def contribute(self, step: Step, learning_rate: float) -> Contribution | None:
        """Takes a step; at the end of a round all members hold the same, and the way back is in their gradients."""
        self._stop_requested |= self._part.gradients_ready(step, learning_rate) or step.stop
        self._done, self.apart = step.number + 1, True
        return None if self._done % self.steps else self._way_back()

    def refresh(self) -> None:
        """Keeps what has been read."""
        self._read.copy_(self._flat.vector)
        self.apart = False

    def break_off(self) -> None:
        """Gives up what its part has under way."""
        self._part.break_off()

    def regroup(self, group: Communicator) -> None:
        """Refuses: in the middle of a round members hold different models, of which the servers know none.

        Raises:
            RunError: always; a strategy with such groups does not regroup (`Mixed.regroups_apart`).
        """
        raise RunError("groups that push rounds do not regroup")

    def rest(self) -> Contribution | None:
        """Ends the round under way."""
        if not self.apart:
            return None
        self._part.settle()
        self._part.end()
        return self._way_back()

    def present(self) -> Tensor | None:
        """Gives the mean of the members' models in the middle of a round."""
        return self._part.present()

    def state(self) -> State:
        """Gives the state of the inside strategy's part, and what was read last."""
        tensors, facts = self._part.state()
        named = {_PART + name: tensor for name, tensor in tensors.items()}
        if self.apart:
            named |= {_VECTOR: self._flat.vector, _READ: self._read}
        noted: dict[str, Any] = {"part": facts, "apart": self.apart}
        return named, noted

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        tensors, facts = state
        self._saved = {name: tensor.clone() for name, tensor in tensors.items()}, facts
        inner = {name.removeprefix(_PART): value for name, value in tensors.items() if name.startswith(_PART)}
        self._part.load_state((inner, facts["part"]))

    def _all_are_at(self, step: int, mine: bool) -> bool:
        """Whether all members say yes, at the same step; all get the same answer."""
        told = self._flat.vector.new_tensor([float(mine), step, step * step], dtype=torch.float64)
        self._group.all_reduce(told)
        count, steps, squares = told.tolist()
        return bool(count == self._group.size and self._group.size * squares == steps * steps)

    def _way_back(self) -> Contribution:
        torch.sub(self._read, self._flat.vector, out=self._flat.gradients)
        number = (self._done - 1) // self.steps
        stop, self._stop_requested = self._stop_requested, False
        return Contribution(Step(number, float(self._group.size), stop), 1.0)
