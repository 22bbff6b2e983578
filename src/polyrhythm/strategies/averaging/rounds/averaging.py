"""Base of all strategies that average models in rounds, and its resharding.

A run resumed with another number of workers continues from the mean of all current models, with the weights that they
would have had at the end of the round:

    round    starts at w ── step step ┃ mean of N ── step step, K workers ┃ mean of K, outer rule
    └ checkpoint: the round and the state of the outer rule continue
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, ClassVar

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.averaging.rounds.model_mean import ModelMean
from polyrhythm.strategies.averaging.rounds.rounds_worker import RoundsWorker
from polyrhythm.strategies.compressing import Compressible
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.resharding import Held, Resharding, by_fields
from polyrhythm.strategies.state import State, without
from polyrhythm.strategies.strategy import GroupOutput, Strategy, Traits
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


class Averaging(Strategy):
    """Workers take local steps and synchronize at means of their models.

    Attributes:
        sums_gradients: whether plain SGD's change of the model in a round is a weighted sum of all gradients.
        output: see `Traits`.
        local_steps: see `Traits`.
        collective: algorithm that sums the models.
    """

    sums_gradients: ClassVar[bool] = False
    output: ClassVar[GroupOutput] = GroupOutput.NOTHING
    local_steps: ClassVar[bool] = True

    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()

    @property
    def period(self) -> int:
        """Number of steps between two means of all models; 0: one mean at the end."""
        raise NotImplementedError

    def traits(self, workers: int) -> Traits:
        """Return the traits of rounds; stop requests are exchanged at a mean, and after an epoch."""
        return Traits(
            local_models=self.period != 1 and workers > 1,
            exchange_every=self.period,
            output=self.output,
            slices=workers,
            local_steps=self.local_steps,
        )

    def faults(self, workers: int) -> FaultPolicy:
        return FaultPolicy.regrouping(workers)

    def resharding(self, before: int, after: int) -> Resharding:
        return by_fields(RoundsWorker.fields, after)


class CompressedAveraging(Averaging, Compressible):
    """Base of averaging strategies with optional compression of each worker's change in a round.

    Attributes:
        compress: compressor of each worker's change in a round; None: none.
    """

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        made = self.compress
        if made is not None and (made.votes or made.own_momentum or made.from_passes):
            raise RequestError(
                f"{made.name} is made for gradients, and {self.name} sends changes of models: use top_k, "
                "power_sgd or int8"
            )

    def traits(self, workers: int) -> Traits:
        plain = super().traits(workers)
        if self.compress is None:
            return plain
        by_value = self.compress.by_value
        return replace(plain, output=GroupOutput.NOTHING, exact_sums=False, sends_by_value=by_value)

    @property
    def mean(self) -> Callable[[Communicator, FlatParameters], ModelMean] | None:
        """Constructor of the mean of compressed changes; None: whole models are averaged."""
        if self.compress is None:
            return None
        from polyrhythm.strategies.averaging.rounds.compressed_mean import CompressedModelMean

        made, collective = self.compress, self.collective
        return lambda group, flat: CompressedModelMean(group, flat, collective, made)


_OUTER = "outer."


def over_base(base: Resharding) -> Resharding:
    """Return the resharding of rounds of another strategy's steps: its own, with the state of the outer rule.

    Args:
        base: resharding of the other strategy.
    """

    def bare(held: Held) -> Held:
        return replace(held, workers={index: inner(state) for index, state in held.workers.items()})

    def inner(state: State) -> State:
        tensors, facts = state
        return without(_OUTER, tensors), facts["base"]

    def workers(held: Held, step: int) -> dict[int, State]:
        tensors, facts = held.workers[0]
        outer = {name: value for name, value in tensors.items() if name.startswith(_OUTER)}
        noted = {name: facts[name] for name in ("outer", "apart", "rate")}
        return {
            worker: (own | outer, noted | {"base": stated})
            for worker, (own, stated) in base.worker_states(bare(held), step).items()
        }

    return replace(base, workers=workers, remark=lambda held: base.remark(bare(held)))
