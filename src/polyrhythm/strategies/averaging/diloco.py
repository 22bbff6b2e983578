"""DiLoCo: an outer optimiser takes what a round of local steps has changed for a gradient.

Douillard, Feng, Rusu, Chhaparia, Donchev et al., "DiLoCo: distributed low-communication training of language models",
2023, arXiv 2311.08105.

    d = w - mean_i w_i                            after H local steps that all began at w
    v <- m * v + d;   w <- w - lr * (d + m * v)   outer SGD with Nesterov's momentum

H = `steps`; lr and m belong to `outer`, which may be any optimiser. The inner optimiser is the run's own. Its state
stays with its worker and is never averaged, as in the paper. Batch-norm statistics are never averaged in training.

With `fragments`, `delay` or `mixing` it is streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512): one part of the
model after the other is averaged while training goes on; see `rounds/streaming.py`.

Departure from the paper: there, H is 500 and runs take 88,000 steps. Here, rounds are short enough for runs of a few
hundred steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.averaging.rounds.averaging import MEET_AGAIN, CompressedAveraging
from polyrhythm.strategies.averaging.rounds.rounds_worker import Rounds, RoundsWorker
from polyrhythm.strategies.averaging.rounds.streaming import Streaming, StreamingWorker, fragments_of
from polyrhythm.strategies.state import Resharding, State, same_for_all
from polyrhythm.strategies.strategy import Facts, Paper, Traits, needs_as_many
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizers.sgd import SGD
from polyrhythm.training.quantities import Count

_OPTIMIZERS = "polyrhythm.training.optimizers"


class DiLoCo(CompressedAveraging):
    """Workers train alone for a round; an outer optimiser then steps along what the round has changed.

    Attributes:
        steps: of each worker in a round.
        outer: the optimiser that takes a round's change for its gradient.
        fragments: into how many parts the model is cut, of which each is averaged once in `steps` steps.
        delay: steps for which the mean of a fragment is on its way while its workers go on.
        mixing: what of a worker's own fragment is kept when its mean is there; 1 would keep all of it.
        collective: how models are added up.
    """

    paper: ClassVar[Paper] = Paper(
        "Douillard, Feng, Rusu, Chhaparia, Donchev et al.",
        "DiLoCo: distributed low-communication training of language models",
        "arXiv",
        2023,
        "2311.08105",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/(NH)",
        staleness="0",
        use_it="machines far from each other, which can meet only every few hundred steps",
        when_a_worker_dies=MEET_AGAIN,
    )
    plain_alone: ClassVar[bool] = False

    steps: Count = 32
    fragments: Count = 1
    delay: int = Field(default=0, ge=0)
    mixing: float = Field(default=0.0, ge=0, le=1)
    outer: Annotated[OptimizerConfig, chosen("outer optimizer", _OPTIMIZERS)] = SGD(
        lr=0.7, momentum=0.9, nesterov=True
    )

    @field_validator("outer", mode="before")
    @classmethod
    def _needs_one(cls, value: Any) -> Any:
        if value is None:
            raise RequestError(
                "diloco needs an outer optimizer: give outer=sgd(lr=0.7, momentum=0.9, nesterov=true), or use local_sgd"
            )
        return value

    @property
    def period(self) -> int:
        return self.steps

    @property
    def streams(self) -> bool:
        """Whether it is streaming DiLoCo."""
        return self.fragments > 1 or self.delay > 0 or self.mixing > 0

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if self.steps % self.fragments:
            raise RequestError(
                f"diloco: {self.fragments} fragments cannot take turns evenly in steps={self.steps}: make steps a "
                "multiple of fragments"
            )
        every = self.steps // self.fragments
        if self.delay >= every:
            raise RequestError(
                f"diloco: a fragment is due every {every} steps (steps over fragments), and a mean that takes "
                f"delay={self.delay} would not be there by then: give delay at most {every - 1}"
            )

    def check_model(self, flat: FlatParameters) -> None:
        super().check_model(flat)
        if self.streams:
            fragments_of(flat, self.fragments)

    def traits(self, workers: int) -> Traits:
        found = super().traits(workers)
        if not self.streams:
            return found
        every = self.steps // self.fragments
        return replace(found, local_models=workers > 1, exchange_every=every)

    def resharding(self, before: int, after: int) -> Resharding:
        if not self.streams:
            return super().resharding(before, after)
        if before != after:
            raise needs_as_many(self, before)
        return same_for_all(after)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        if self.streams:
            terms = Streaming(
                steps=self.steps,
                fragments=self.fragments,
                delay=self.delay,
                mixing=self.mixing,
                outer=self.outer,
                collective=self.collective,
                compress=self.compress,
            )
            return StreamingWorker(setting, terms)
        outer = OuterOptimizer(self.outer, setting.flat)
        rounds = Rounds(steps=self.steps, collective=self.collective, outer=outer, mean=self.mean)
        return RoundsWorker(setting, rounds)


class OuterOptimizer:
    """The rule of this module; see `Outer`.

    Args:
        optimizer: the outer one.
        flat: of the model.
    """

    def __init__(self, optimizer: OptimizerConfig, flat: FlatParameters) -> None:
        self._rate = optimizer.lr
        self._plan = OptimizerPlan.of(optimizer.create([view.parameter for view in flat.views]), flat)
        self._model = flat.vector.new_empty(0)
        self._optimizer: FlatOptimizer

    def start(self, vector: Tensor) -> None:
        """The first round begins here."""
        self._model = vector.clone()
        self._optimizer = self._plan.build(self._model)

    def step(self, vector: Tensor, learning_rate: float) -> None:
        """Turns the mean of all models into the point where the next round begins."""
        self._optimizer.step(self._model - vector, self._rate)
        vector.copy_(self._model)

    def model(self) -> Tensor | None:
        """Workers begin at the model itself."""
        return None

    def state(self) -> State:
        """Return the model at the beginning of the round, and the outer optimizer's state."""
        tensors, facts = self._optimizer.state()
        return {"model": self._model, **tensors}, facts

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        tensors = dict(state[0])
        self.start(tensors.pop("model"))
        self._optimizer.load_state(tensors, state[1])
