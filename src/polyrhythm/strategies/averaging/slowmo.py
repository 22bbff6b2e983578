"""SlowMo: slow momentum over rounds of local steps.

Wang, Tantia, Ballas, Rabbat, "SlowMo: improving communication-efficient distributed SGD with slow momentum",
ICLR 2020, arXiv 1910.00643.

    u <- b * u + (x_0 - mean_i x_i) / lr          after a round of base steps that start at x_0 on all workers
    x_0 <- x_0 - a * lr * u

b = `slow_momentum`, a = `slow_lr`, lr = the local learning rate at the end of the round. With a constant rate
this is classical BMUF with z = a and m = b. Batch-norm statistics are never averaged in training.

Base steps are local steps of any optimizer, or those of a gossip strategy (`base`). For local steps, `optimizer_state`
selects the treatment of the optimizer state at the end of a round. The paper has the same three choices; its runs reset
the momentum of SGD and keep the state of Adam, as is the default here. Gossip workers start each round at x_0 with a
mass of 1, and keep their optimizer state.

    worker 0   step ⇄ step ⇄ step ┃ exact mean, outer rule ┃ step ⇄ step …
    worker 1   step ⇄ step ⇄ step ┃ exact mean, outer rule ┃ step ⇄ step …      ⇄ messages of the base

After a failure, the base's workers restart from a common point in the middle of the round, and x_0 stays the same.
If the mean at the end of a round failed on some workers only, the others send them the result of the outer rule.

Departure from the paper: with lr = 0 the second term of u is omitted, and the step is its limit,
x_0 <- x_0 + a * (mean_i x_i - x_0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.averaging.rounds.averaging import CompressedAveraging, over_base
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage
from polyrhythm.strategies.averaging.rounds.rounds_worker import Outer, Rounds, RoundsWorker, every
from polyrhythm.strategies.gossip.mixing.turns import InTurns, TurnsWorker
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.state import OWN, Part, State, StateField
from polyrhythm.strategies.strategy import Facts, Paper, Remarks, Strategy, Traits
from polyrhythm.strategies.worker_part import Logged, Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count, Decay, Positive


class SlowMo(CompressedAveraging, Remarks):
    """Workers take local steps for a round; a slow momentum is then applied to the change of the round.

    Attributes:
        steps: number of steps of each worker in a round.
        slow_momentum: momentum coefficient of the slow buffer.
        slow_lr: factor of the slow step, in addition to the learning rate.
        base: strategy of the steps in a round, such as sgp or d_psgd; None: local steps.
        optimizer_state: treatment of the local optimizer state (momentum etc.) after a round: keep, average or reset;
            None: the momentum of SGD is reset, the state of other optimizers is kept.
        collective: algorithm that sums the models.
        compress: compressor of each worker's change in a round; None: none.
    """

    paper: ClassVar[Paper] = Paper(
        "Wang, Tantia, Ballas, Rabbat",
        "SlowMo: improving communication-efficient distributed SGD with slow momentum",
        "ICLR",
        2020,
        "1910.00643",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/(NH)",
        staleness="0",
        use_it="as local SGD, where its accuracy falls behind synchronous training",
    )

    steps: Count = 12
    slow_momentum: Decay = 0.5
    slow_lr: Positive = 1.0
    base: Annotated[Strategy | None, chosen("base strategy", *FAMILIES)] = None
    optimizer_state: AtAverage | None = None

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        """Reject a base that cannot start rounds at a common point, and options that have no effect with a base."""
        super().check(workers, plan)
        if self.base is None:
            return
        self.base.check(workers)
        if self.compress is not None:
            raise RequestError(
                f"slowmo: with base={self.base} it sends no vectors itself: leave compress out, or give it to a base "
                "that can be compressed, such as d_psgd(compress=top_k)"
            )
        if not isinstance(self.base, InTurns):
            raise RequestError(
                f"slowmo: base={self.base} cannot start rounds at a common point: use base=sgp or base=d_psgd, "
                "or leave base out for local steps"
            )
        if self.optimizer_state not in (None, "keep"):
            raise RequestError(
                f"slowmo: optimizer_state={self.optimizer_state} has no effect with base={self.base}, which keeps "
                "the optimizer state: leave it out"
            )

    def remark(self, workers: int) -> str:
        return self.base.remark(workers) if isinstance(self.base, Remarks) else ""

    @property
    def period(self) -> int:
        return self.steps

    def traits(self, workers: int) -> Traits:
        found = super().traits(workers)
        if self.base is None:
            return found
        return replace(found, local_steps=False, counts_samples=self.base.traits(workers).counts_samples)

    def resharding(self, before: int, after: int) -> Resharding:
        if self.base is None:
            return super().resharding(before, after)
        return over_base(self.base.resharding(before, after))

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        if self.base is not None:
            outer = SlowMomentum(self.slow_momentum, self.slow_lr)
            return RoundsOverBase(self.base.worker(setting), setting.flat, self.steps, outer)
        rounds = Rounds(
            steps=self.steps,
            collective=self.collective,
            optimizer_state=self.optimizer_state or ("reset" if setting.plan.kind == "SGD" else "keep"),
            outer=SlowMomentum(self.slow_momentum, self.slow_lr),
            mean=self.mean,
        )
        return RoundsWorker(setting, rounds)


class SlowMomentum(Outer):
    """Update rule of this module; see `Outer`.

    Args:
        momentum: b.
        slow_lr: a.
    """

    fields = StateField("beginning", Tensor), StateField("buffer", Tensor)

    def __init__(self, momentum: float, slow_lr: float) -> None:
        self._momentum = momentum
        self._slow_lr = slow_lr
        self._beginning = self._buffer = torch.empty(0)

    def start(self, vector: Tensor) -> None:
        """Start the first round at `vector`, `(size,)`."""
        self._beginning, self._buffer = vector.clone(), torch.zeros_like(vector)

    def step(self, vector: Tensor, learning_rate: float) -> None:
        """Replace the mean of all models in `vector` by the starting point of the next round, in place."""
        beginning, buffer = self._beginning, self._buffer
        change = beginning - vector
        buffer.mul_(self._momentum)
        if learning_rate > 0:
            buffer.add_(change, alpha=1 / learning_rate)
            beginning.sub_(buffer, alpha=self._slow_lr * learning_rate)
        else:
            beginning.sub_(change, alpha=self._slow_lr)
        vector.copy_(beginning)


class RoundsOverBase(Logged):
    """Takes the base's steps, and ends a round with a mean and the outer rule, like all averaging strategies.

    Args:
        base: the base's worker part, a `TurnsWorker`.
        flat: parameters of this worker.
        steps: number of steps in a round.
        outer: rule that computes the next starting point from the mean.
    """

    fields = (
        StateField("outer", Part),
        StateField("apart", bool),
        StateField("rate", float),
        StateField("base", Part, OWN, under=""),
    )

    def __init__(self, base: WorkerPart, flat: FlatParameters, steps: int, outer: Outer) -> None:
        super().__init__()
        assert isinstance(base, TurnsWorker), "others are refused"
        self._base = base
        self.exchanger = base.exchanger
        base.on_missed_mean = self._end_round
        self._flat = flat
        self._steps = steps
        self._ends = every(steps)
        self._outer = outer
        self._apart = False
        self._rate = 0.0
        self.staleness = base.staleness

    def start(self, step: int) -> int:
        if not self.restored:
            self._outer.start(self._flat.vector)  # initial values, before any exchange can fail
        step = self._base.start(step)
        if not self.restored:
            self._outer.start(self._flat.vector)
        return step

    def begin(self, step: Step) -> None:
        self._base.begin(step)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        stop = self._base.gradients_ready(step, learning_rate)
        self._apart, self._rate = True, learning_rate
        if self._ends(step.number):
            self._base.settle()
            self._end_round(self._base.common_model())
        return stop

    def _end_round(self, mean: Tensor) -> None:
        """Start the next round, unless this worker has done so already, before it restarted with the others."""
        if self._apart:
            start = mean.clone()  # the log keeps the mean
            self._outer.step(start, self._rate)
            self._base.begin_at(start)
            self._apart = False

    def settle(self) -> None:
        self._base.settle()

    def present(self) -> Tensor | None:
        return self._base.present()

    def end(self) -> None:
        self._base.end()
        if self._apart:
            self._outer.step(self._flat.vector, self._rate)
            self._apart = False

    @property
    def has_stopped(self) -> bool:
        return self._base.has_stopped

    def to_enter_with(self) -> State:
        (tensors, facts), base = super().to_enter_with(), self._base.to_enter_with()
        return base[0] | tensors, facts | {"base": base[1]}

    def enter(self, state: State, step: int) -> None:
        super().enter(state, step)
        self._base.enter((state[0], state[1]["base"]), step)

    def load_fields(self, fields: Sequence[StateField], state: State) -> None:
        self._outer.start(self._flat.vector)
        super().load_fields(fields, state)

    def model_in(self, state: State) -> Tensor | None:
        return self._base.model_in((state[0], state[1]["base"]))
