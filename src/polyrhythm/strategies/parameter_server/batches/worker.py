"""The worker of Sandblaster: adds up the gradients of its portions, and pushes their mean when a batch is over.

step     0   1   2   3 ┃ 4   5   6   7 ┃ 8 …        portions = 4
push                 ──┃             ──┃            and goes on with what the servers answer
"""

from __future__ import annotations

from dataclasses import replace

import torch

from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan

_MOST = torch.finfo(torch.float32).max
"""A server refuses a greater rate; with this one, a loss that is not finite says what to mend."""


class BatchWorker(WorkerPart):
    """Contributes portions to batches; between two batches its parameters do not change.

    Args:
        setting: the worker's.
        portions: of a batch, that this worker takes.
    """

    def __init__(self, setting: WorkerSetting, portions: int) -> None:
        super().__init__()
        self._worker = setting.workers.rank
        self._hands_out = self._worker == 0 and not setting.succeeds
        self._flat = setting.flat
        self._still = setting.still
        self._servers = PushPull(setting, without_momentum(setting.plan))
        self._portions = portions
        self._sum = torch.zeros_like(setting.flat.vector) if portions > 1 else None
        self._weight = 0.0
        self._pushed = 0
        self._last: tuple[Step, float] | None = None
        self._stop_requested = False
        self._restored = False

    def start(self, step: int) -> int:
        """Takes the servers' parameters; who is resumed goes on in the middle of its batch, if they are there."""
        if self._hands_out:
            self._servers.initialise()
        known = self._servers.pull()
        if self._restored and known == self._pushed:
            return step
        self._pushed, self._weight = known, 0.0
        if self._sum is not None:
            self._sum.zero_()
        return known

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Adds the gradient to the batch's, and pushes if the batch is over."""
        if self._sum is not None and step.weight > 0 and not self._still:
            self._sum.add_(self._flat.gradients, alpha=step.weight)
        self._weight += step.weight
        self._stop_requested |= step.stop
        self._last = step, learning_rate
        return self._push() if (step.number + 1) % self._portions == 0 else False

    def end(self) -> None:
        """Ends the batch under way and leaves; worker 0 waits for the final parameters."""
        if self._last is not None and self._last[0].number >= self._pushed:
            self._push()
        self._servers.leave()
        if self._worker == 0:
            self._servers.pull(final=True)

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        self._servers.leave()

    def state(self) -> State:
        """Gives the portions of the batch under way."""
        tensors = {} if self._sum is None else {"sum": self._sum}
        facts = {"worker": self._worker, "weight": self._weight, "pushed": self._pushed}
        return tensors, facts | {"last": None if self._last is None else _numbers(*self._last)}

    def load_state(self, state: State) -> None:
        """Takes it back; another worker's, where this one had handed in none, is left alone."""
        tensors, facts = state
        if facts["worker"] != self._worker:
            return
        if self._sum is not None:
            self._sum.copy_(tensors["sum"])
        self._weight, self._pushed = facts["weight"], facts["pushed"]
        if facts["last"] is not None:
            number, rate = facts["last"]
            self._last = Step(number), rate
        self._restored = True

    def _push(self) -> bool:
        assert self._last is not None, "a batch has a step"
        step, learning_rate = self._last
        if self._sum is not None and not self._still:
            if self._weight > 0:
                torch.div(self._sum, self._weight, out=self._flat.gradients)
            self._sum.zero_()
        stop, weight = self._stop_requested, self._weight
        self._weight, self._pushed = 0.0, step.number + 1
        return self._servers.push_and_pull(replace(step, stop=stop), weight, learning_rate)


def without_momentum(plan: OptimizerPlan) -> OptimizerPlan:
    """Gives SGD whose steps are as long as those with momentum become where gradients stay the same.

    Momentum would bend the line that is searched. Other optimisers stay as they are.
    """
    if plan.kind != "SGD":
        return plan
    spans = []
    for span in plan.spans:
        rate, momentum = span.options["lr"], span.options.get("momentum", 0)
        longer = (1 - span.options.get("dampening", 0)) / (1 - momentum) if momentum else 1.0
        rate = min(rate * longer, _MOST)
        without = {"lr": rate, "momentum": 0, "nesterov": False, "dampening": 0}
        options = {key: without.get(key, value) for key, value in span.options.items()}
        spans.append(replace(span, options=options))
    return replace(plan, spans=tuple(spans))


def _numbers(step: Step, learning_rate: float) -> list[float]:
    return [step.number, learning_rate]
