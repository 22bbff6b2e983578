"""SlowMo: slow momentum over rounds of local steps.

Wang, Tantia, Ballas, Rabbat, "SlowMo: improving communication-efficient distributed SGD with slow momentum", ICLR
2020, arXiv 1910.00643.

    u <- b * u + (x_0 - mean_i x_i) / lr          after a round of base steps that all began at x_0
    x_0 <- x_0 - a * lr * u

b = `slow_momentum`, a = `slow_lr`, lr = the local learning rate at the end of the round. With a constant rate this is
classical BMUF with z = a and m = b. Batch-norm statistics are never averaged in training.

Base steps are local steps of any optimiser, or those of gossip (`base`). For local steps, `optimizer_state` says what
becomes of the optimiser's state at the end of a round: the paper names the same three ways, and in its runs resets the
momentum of SGD and keeps the state of Adam. Workers of gossip begin each round at x_0 with a mass of 1, and keep their
optimisers' state.

Departure from the paper: with lr = 0 the first term counts as 0 in u, and the step becomes its limit, which leads to
the mean.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.averaging.rounds.averaging import MEET_AGAIN, Averaging
from polyrhythm.strategies.averaging.rounds.local_optimizer import AtAverage
from polyrhythm.strategies.averaging.rounds.resharding import OfRoundsOverBase
from polyrhythm.strategies.averaging.rounds.rounds import Rounds
from polyrhythm.strategies.averaging.rounds.rounds_over_base import RoundsOverBase
from polyrhythm.strategies.averaging.rounds.rounds_worker import RoundsWorker
from polyrhythm.strategies.facts import Facts
from polyrhythm.strategies.paper import Paper
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.quantities import Count, Decay, Positive


class SlowMo(Averaging):
    """Workers train alone for a round; what the round changed then gets a momentum of its own.

    Attributes:
        steps: of each worker in a round.
        slow_momentum: share of the slow buffer that is kept at each round.
        slow_lr: what the slow step is multiplied by, beside the learning rate.
        base: the strategy whose steps a round is made of, such as sgp or d_psgd; None: steps of each worker alone.
        optimizer_state: what becomes of the local momentum and the like after a round: keep, average or reset.
        collective: how models are added up.
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
        use_it="as local SGD, where its model falls behind that of synchronous training",
        when_a_worker_dies=MEET_AGAIN,
    )
    plain_alone: ClassVar[bool] = False

    steps: Count = 12
    slow_momentum: Decay = 0.5
    slow_lr: Positive = 1.0
    base: Annotated[Strategy | None, chosen("base strategy", *FAMILIES)] = None
    optimizer_state: AtAverage = "keep"

    def check(self, workers: int) -> None:
        """Refuses a base whose workers cannot begin anew, and what becomes of nothing over one."""
        super().check(workers)
        if self.base is None:
            return
        self.base.check(workers)
        if not self.base.can_begin_anew:
            raise RequestError(
                f"slowmo: base={self.base} cannot begin rounds anew at a common point: use base=sgp or base=d_psgd, "
                "or leave base out for local steps"
            )
        if self.optimizer_state != "keep":
            raise RequestError(
                f"slowmo: optimizer_state={self.optimizer_state} has no meaning over base={self.base}, whose workers "
                "keep theirs: leave it out"
            )

    def remark(self, workers: int) -> str:
        """Says what the base does."""
        return self.base.remark(workers) if self.base is not None else ""

    def regroups(self, workers: int) -> bool:
        """Over local steps, or as the base does."""
        return super().regroups(workers) if self.base is None else self.base.regroups(workers)

    def resharding(self, before: int, after: int) -> Resharding:
        """Over local steps, or as the base does."""
        if self.base is None:
            return super().resharding(before, after)
        return OfRoundsOverBase(self.base.resharding(before, after))

    def round_steps(self, workers: int) -> int:
        """As asked."""
        return self.steps

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        if self.base is not None:
            outer = SlowMomentum(self.slow_momentum, self.slow_lr)
            return RoundsOverBase(self.base.worker(setting), setting.flat, self.steps, outer)
        rounds = Rounds(
            steps=self.steps,
            collective=self.collective,
            optimizer_state=self.optimizer_state,
            outer=SlowMomentum(self.slow_momentum, self.slow_lr),
        )
        return RoundsWorker(setting, rounds)


class SlowMomentum:
    """The rule of this module; see `Outer`.

    Args:
        momentum: b.
        slow_lr: a.
    """

    def __init__(self, momentum: float, slow_lr: float) -> None:
        self._momentum = momentum
        self._slow_lr = slow_lr
        self._state: dict[str, Tensor] = {}

    def start(self, vector: Tensor) -> None:
        """The first round begins here."""
        self._state = {"beginning": vector.clone(), "buffer": vector.new_zeros(vector.shape)}

    def step(self, vector: Tensor, learning_rate: float) -> None:
        """Turns the mean of all models into the point where the next round begins."""
        beginning, buffer = self._state["beginning"], self._state["buffer"]
        change = beginning - vector
        buffer.mul_(self._momentum)
        if learning_rate > 0:
            buffer.add_(change, alpha=1 / learning_rate)
            beginning.sub_(buffer, alpha=self._slow_lr * learning_rate)
        else:
            beginning.sub_(change, alpha=self._slow_lr)
        vector.copy_(beginning)

    def model(self) -> Tensor | None:
        """Workers begin at the model itself."""
        return None

    def state(self) -> State:
        """Gives x_0 and u."""
        return self._state, {}

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        self._state = {name: value.clone() for name, value in state[0].items()}
