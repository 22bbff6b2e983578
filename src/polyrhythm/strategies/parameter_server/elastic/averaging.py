"""The configuration that all forms of elastic averaging share; they differ in a worker's own step."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from polyrhythm.errors import RequestError
from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.answers import Answers
from polyrhythm.strategies.invariants.elastic import Elastic
from polyrhythm.strategies.paper import Paper
from polyrhythm.strategies.parameter_server.elastic.centre_server import CentreServer
from polyrhythm.strategies.parameter_server.elastic.local_step import LocalStep
from polyrhythm.strategies.parameter_server.elastic.resharding import OfCentre
from polyrhythm.strategies.parameter_server.elastic.rule import ElasticRule
from polyrhythm.strategies.parameter_server.elastic.worker import ElasticWorker
from polyrhythm.strategies.parameter_server.serving.with_servers import WithServers
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.quantities import Count, NonNegative

PAPER = Paper(
    "Zhang, Choromanska, LeCun", "Deep learning with Elastic Averaging SGD", "NIPS", 2015, "1412.6651"
)
WHEN_A_WORKER_DIES = "the others go on, and a successor begins at the centre with the steps that are left"


class ElasticAveraging(WithServers):
    """Workers train alone, and every few steps they and a centre pull at each other.

    Attributes:
        mode: whether a worker exchanges by itself, or all together.
        tau: steps of a worker between two exchanges.
        beta: what all workers' pulls at the centre add up to.
        alpha: share of the difference by which both sides move; None: beta / N.
        servers: how many hold the centre, each an equal shard.
        placement: where servers run.
    """

    paper: ClassVar[Paper] = PAPER
    plain_alone: ClassVar[bool] = False
    plain_steps: ClassVar[bool]

    mode: Literal["asynchronous", "synchronous"] = "asynchronous"
    tau: Count = 4
    beta: NonNegative = 0.9
    alpha: NonNegative | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if self.alpha is not None and "beta" in self.model_fields_set:
            raise RequestError(f"strategy {self.name}: alpha is beta / N, so give only one of them")
        return self

    def rule(self, workers: int) -> ElasticRule:
        """Gives the numbers for so many workers."""
        alpha = self.beta / workers if self.alpha is None else self.alpha
        return ElasticRule(alpha=alpha, tau=self.tau, together=self.mode == "synchronous")

    def caution(self, workers: int, learning_rate: float) -> str:
        """Warns where alpha is out of the stable range."""
        return self.rule(workers).caution(workers, learning_rate)

    def in_step(self, workers: int) -> bool:
        """As the mode has it."""
        return self.mode == "synchronous"

    def waits_for_slower(self, workers: int) -> bool:
        """As the mode has it."""
        return self.in_step(workers)

    def agrees(self, workers: int) -> bool:
        """Never: every worker has parameters of its own."""
        return False

    def round_steps(self, workers: int) -> int:
        """As asked."""
        return self.tau

    def goes_on(self, workers: int) -> bool:
        """Always."""
        return True

    def spares_leader(self, workers: int) -> bool:
        """Wherever they go on: the centre is what a run has come to."""
        return self.goes_on(workers)

    def gradients_per_step(self, workers: int) -> int:
        """All: the centre hears of each once, in the difference that it first went into."""
        return workers

    def resharding(self, before: int, after: int) -> Resharding:
        """The centre stays."""
        return OfCentre(after)

    def updates_per_step(self, workers: int) -> int:
        """One: every worker makes its own step on its own parameters."""
        return 1

    def invariants(self, conditions: Conditions) -> list[Invariant]:
        """What one side loses, the other gains."""
        alpha = self.rule(len(conditions.cast.workers)).alpha
        elastic = Elastic(conditions, alpha, plain=self.plain_steps)
        return [*super().invariants(conditions), Answers(conditions.cast), elastic]

    @abstractmethod
    def local_step(self, setting: WorkerSetting) -> LocalStep:
        """Makes a worker's own step."""

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        return ElasticWorker(setting, self.rule(setting.workers.size), self.local_step(setting))

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server."""
        workers = setting.cast.workers
        return CentreServer(workers, self.rule(len(workers)))
