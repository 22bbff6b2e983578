"""Downpour SGD.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and the appendix's client.

    every step s          w = w - local_rate lr g(w);    sum = sum + g
    s mod n_push = 0      push sum; sum = 0              the server: an optimizer's step with the sum
    s mod n_fetch = 0     fetch; w = the fetched parameters, when the gradient in progress is ready

The push follows the addition, so the first push holds one gradient and later ones n_push. The worker computes
on during a push or a fetch. Parameters fetched before a step lack that step, and are as late as its gradient.
Warm start: rank 0 takes its first steps before the others get parameters. The paper's servers run Adagrad
without an epsilon, which is the optimizer `downpour_adagrad` and the default; any other may replace it. The
paper gives no rate, and its first step moves every number by just that, once for each worker; so the default
is 0.0225 over their number. Adagrad's steps only shrink, so that larger networks need several epochs where
small ones need one: with 3 workers `lenet5` reaches a test accuracy of 0.70 on Fashion-MNIST in its first
epoch and 0.77 in its third, and with smaller rates 0.77 in the first (`benchmarks/first-epoch`).

Departure from the paper: the rest of the sum is pushed at the end. Compressed, a push has the compression error of
those before, and a fetch brings the difference to the parameters that this worker fetched before.

Messages, and when they travel:

    worker ── PUSH(sum of gradients) ─▶ server: optimizer step, version + 1         no answer
           ── FETCH ─▶  ◀─ PARAMETERS ──                                            while the worker computes

    step s-1               step s                                         step s+1
    … push, FETCH ──┐      forward, backward at w ─▶ w = fetched   ◀─┐    …
                    └────────────▶ server ───────────────────────────┘
                                                     w -= lr g;  sum += g;  push if due;  FETCH if due

With another number of workers, remaining ones keep their parameters and sums, and new ones begin with the
servers' parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.message import Message
from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.composition.served import ReplicableServers
from polyrhythm.strategies.parameter_server.serving.admission import Configuration, admit_push_of_any_step
from polyrhythm.strategies.parameter_server.serving.gate import Decision, Gate
from polyrhythm.strategies.parameter_server.serving.own_model import FreeLink, OwnModelWorker, of_own_models
from polyrhythm.strategies.parameter_server.serving.rule import Applied, Contribution
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import OptimizedRule
from polyrhythm.strategies.resharding import (
    Resharding,
)
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import OWN, Part, StateField, reset
from polyrhythm.strategies.strategy import Facts, Paper, Traits
from polyrhythm.strategies.worker_part import Step, WorkerPart, WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count, NonNegative


class Downpour(ReplicableServers):
    """Workers step on their own, push sums of gradients and fetch parameters, each now and then and without waiting.

    Attributes:
        n_fetch: steps between two fetches.
        n_push: steps between two pushes.
        local_rate: local rate of a worker's own steps, as a multiple of the run's learning rate; 0: they wait
            for the servers'.
        warm_start_steps: warm-start steps that worker 0 takes before the others begin.
        compress: compressor of pushed sums, and of parameter changes on the way down; None: none.
    """

    paper: ClassVar[Paper] = Paper(
        "Dean, Corrado, Monga, Chen, Devin et al.", "Large Scale Distributed Deep Networks", "NIPS", 2012
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="M/n_push + M/n_fetch",
        staleness="2N-1 where both are 1",
        use_it="slow networks, with transfers hidden behind compute; gradients are late, which must be acceptable",
    )

    n_fetch: Count = 1
    n_push: Count = 1
    local_rate: NonNegative = 1.0
    warm_start_steps: int = Field(default=0, ge=0)

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if self.compress is not None and self.compress.from_passes:
            raise RequestError(
                f"{self.compress.name} are of one backward pass, and a push is a sum: use another compressor, such as "
                "top_k, or parameter_server"
            )

    def traits(self, workers: int) -> Traits:
        return replace(
            super().traits(workers),
            lockstep=False,
            waits_for_slower=False,
            draws=True,
            exchange_every=max(self.n_fetch, self.n_push),
            updates=workers,
            gradients=workers,
            optimizer=f"downpour_adagrad(lr={0.0225 / workers:.3g})",
            exact_sums=self.compress is None,
            sends_by_value=self.compress is not None and self.compress.by_value,
        )

    def resharding(self, before: int, after: int) -> Resharding:
        return of_own_models(SumWorker, after)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return SumWorker(setting, self, self.free_link(setting, setting.plan, setting.steps or 0))

    def server(self, setting: ServerSetting) -> ServerPart:
        workers, session = setting.roles.workers, self.session()
        return self.server_of(setting, lambda shard: sum_session(workers, self.warm_start_steps, session))


class SumWorker(OwnModelWorker[FreeLink]):
    """Steps on its own, pushes sums of its gradients, and takes over what the servers hold."""

    fields = (
        StateField("own", Tensor, OWN, at="_flat.vector"),
        StateField("sum", Tensor, OWN),
        StateField("summed", int, OWN),
        StateField("pushed", int, reset(lambda start: start.step, "worker")),
        StateField("versions", list[int], OWN, at="_link._versions"),
        *OwnModelWorker.fields,
        StateField("", Part, OWN, at="_link"),
    )

    def __init__(self, setting: WorkerSetting, rhythm: Downpour, link: FreeLink) -> None:
        super().__init__(setting, link)
        self._rhythm = rhythm
        self._steps = setting.steps
        self._local = _plain_sgd(setting.plan).build(setting.flat.vector)
        self._sums = torch.zeros_like(setting.flat.vector), torch.zeros_like(setting.flat.vector)
        self._summed = 0
        self._stop = False
        self._rate = setting.plan.rate

    def take_over(self, values: Tensor, known: Sequence[int]) -> None:
        self._flat.vector.copy_(values)
        self._sums[0].zero_()
        self._summed, self._pushed = 0, min(known)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        self._link.note_read()
        self._take()
        if step.weight > 0:
            gradients = self._flat.gradients
            self._sums[0].add_(gradients)
            self._summed += 1
            if self._rhythm.local_rate > 0:
                self._local.step(gradients, learning_rate * self._rhythm.local_rate)
        if step.number % self._rhythm.n_push == 0 or step.number + 1 == self._steps:
            self._push(step, learning_rate)
        self._done, self._rate = step.number + 1, learning_rate
        if (step.number + 1) % self._rhythm.n_fetch == 0:
            self._link.fetch(range(len(self._link.shards)), stop=step.stop)
        return self._stop

    def settle(self) -> None:
        self._take()
        self._link.wait_for_pushes()

    def catch_up(self) -> None:
        if self._rank == 0:
            self._flat.vector.copy_(self._link.pull_whole()[0])

    def depart(self) -> None:
        self.settle()
        if self._summed:
            self._push(Step(self._done - 1), self._rate)
            self._link.wait_for_pushes()
        self._link.leave()

    @property
    def _sum(self) -> Tensor:
        """Gradients that are not pushed yet, `(size,)`."""
        return self._sums[0]

    def _take(self) -> None:
        for position, values, stop in self._link.take():
            if values is not None:
                self._flat.vector[self._link.shards[position]].copy_(values)
            self._stop |= stop

    def _push(self, step: Step, learning_rate: float) -> None:
        self._link.wait_for_pushes()  # the sum is overwritten next
        pushed = replace(step, weight=float(self._summed))
        for position, shard in enumerate(self._link.shards):
            self._link.push(position, self._sums[0][shard], pushed, learning_rate)
        self._sums = self._sums[1], self._sums[0]
        self._sums[0].zero_()
        self._summed, self._pushed = 0, step.number + 1


def _plain_sgd(plan: OptimizerPlan) -> OptimizerPlan:
    """Return SGD without momentum for the same numbers, at the same ratios of learning rates."""
    spans = tuple(replace(span, options={"lr": span.options["lr"]}) for span in plan.spans)
    return replace(plan, kind="SGD", spans=spans)


def sum_session(
    workers: tuple[int, ...],
    warm_start_steps: int,
    session: Callable[..., ServerSession] = ServerSession,
) -> ServerSession:
    """Make the server of a shard that takes sums; `warm_start_steps` are rank 0's; it may take fewer in all."""
    return session(workers, SumRule(SumGate(warm_start_steps)))


class SumRule(OptimizedRule):
    """An optimizer's step with every sum. A contribution's weight is how many gradients are in it.

    Args:
        gate: gate, which is notified of the number of steps that a worker takes.
    """

    admit = staticmethod(admit_push_of_any_step)  # a sum may end at any step

    def __init__(self, gate: SumGate) -> None:
        super().__init__(gate)
        self._sum_gate = gate

    def configure(self, message: Message) -> None:
        super().configure(message)
        if (pushes := Configuration.of(message).pushes) > 0:
            self._sum_gate.shorten(pushes)

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied:
        [entry] = batch
        if entry.weight <= 0:
            return Applied(batch, 0, {})
        self.step(entry.gradient, entry.rate)
        return Applied(batch, 1, {version - entry.read_version: round(entry.weight)})


class SumGate(Gate):
    """A gate that applies every sum without an answer; during a warm start, pulls wait for parameters.

    Args:
        warm_start_steps: warm-start steps of worker 0.
    """

    fetches = True

    def __init__(self, warm_start_steps: int) -> None:
        self._warm_start_steps = warm_start_steps
        self._steps = 0
        """Steps of rank 0."""
        self._first_is_there = True
        self._stopped = False
        self._waiting: list[int] = []

    def shorten(self, steps: int) -> None:
        """Note how many steps worker 0 takes in all."""
        self._warm_start_steps = min(self._warm_start_steps, steps)

    def ask(self, pusher: int, step: int) -> Decision:
        if pusher not in self._waiting:
            self._waiting.append(pusher)
        return Decision(answer=self._free())

    def fetch(self, pusher: int) -> Decision:
        return Decision(answer=(pusher, *self._free()))

    def arrive(self, pusher: int, step: int) -> Decision:
        if pusher == 0:
            self._steps = step + 1
        return Decision(apply=(pusher,), answer=self._free())

    def repeat(self, pusher: int, step: int, due: int) -> Decision:
        """Decide nothing: pushers do not wait for an answer to a push."""
        return Decision()

    def leave(self, pusher: int) -> Decision:
        if pusher in self._waiting:
            self._waiting.remove(pusher)
        self._first_is_there &= pusher != 0
        return Decision(answer=self._free())

    def join(self, pusher: int) -> None:
        self._first_is_there |= pusher == 0

    def stop(self) -> None:
        self._stopped = True

    def know(self, steps: Sequence[int]) -> None:
        self._steps = steps[0]

    def _free(self) -> tuple[int, ...]:
        warm = self._stopped or self._steps >= self._warm_start_steps or not self._first_is_there
        free = tuple(pusher for pusher in self._waiting if warm or pusher == 0)
        self._waiting = [pusher for pusher in self._waiting if pusher not in free]
        return free
