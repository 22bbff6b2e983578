"""Downpour SGD.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and the appendix's client.

    every step s          w = w - local_rate lr g(w);    sum = sum + g
    s mod n_push = 0      push sum; sum = 0              the server: an optimiser's step with the sum
    s mod n_fetch = 0     fetch; w = what came, when the gradient under way is ready

The push comes after the addition, so the first push holds one gradient and later ones n_push. The worker computes on
while a push or a fetch travels. What was fetched before a step lacks that step, and is as late as its gradient. Warm
start: worker 0 takes its first steps before the others get parameters. The paper's servers run Adagrad without an
epsilon, which is the optimiser `downpour_adagrad`; any other may take its place.

Departure from the paper: what is left in the sum is pushed at the end.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.facts import Facts
from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.answers import Answers
from polyrhythm.strategies.invariants.sums import Sums
from polyrhythm.strategies.paper import Paper
from polyrhythm.strategies.parameter_server.serving.with_servers import WithServers
from polyrhythm.strategies.parameter_server.sums.resharding import OfSums
from polyrhythm.strategies.parameter_server.sums.server import SumServer
from polyrhythm.strategies.parameter_server.sums.worker import Rhythm, SumWorker
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.quantities import Count, NonNegative


class Downpour(WithServers):
    """Workers step on their own, push sums of gradients and fetch parameters, each now and then and without waiting.

    Attributes:
        n_fetch: steps between two fetches.
        n_push: steps between two pushes.
        local_rate: of a worker's own steps, as a multiple of the run's learning rate; 0: they wait for the servers'.
        warm_start_steps: that worker 0 takes before the others begin.
        servers: how many, each with an equal shard.
        placement: where servers run.
    """

    paper: ClassVar[Paper] = Paper(
        "Dean, Corrado, Monga, Chen, Devin et al.", "Large Scale Distributed Deep Networks", "NIPS", 2012
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="M/n_push + M/n_fetch",
        staleness="2N-1 where both are 1",
        use_it="slow networks, whose transfers hide behind computing; gradients are late, which must be acceptable",
        when_a_worker_dies=("the others go on, and a successor takes over the steps that are left"),
    )
    plain_alone: ClassVar[bool] = False

    n_fetch: Count = 1
    n_push: Count = 1
    local_rate: NonNegative = 1.0
    warm_start_steps: int = Field(default=0, ge=0)

    def in_step(self, workers: int) -> bool:
        """Never."""
        return False

    def waits_for_slower(self, workers: int) -> bool:
        """Never."""
        return False

    def goes_on(self, workers: int) -> bool:
        """Always: nobody waits for anybody."""
        return True

    def resharding(self, before: int, after: int) -> Resharding:
        """The servers' parameters stay."""
        return OfSums(after)

    def round_steps(self, workers: int) -> int:
        """The longer of the two."""
        return max(self.n_fetch, self.n_push)

    def updates_per_step(self, workers: int) -> int:
        """One a worker: a sum of n_push gradients counts for as many."""
        return workers

    def invariants(self, conditions: Conditions) -> list[Invariant]:
        """Every gradient is in one sum."""
        found = super().invariants(conditions)
        found.append(Answers(conditions.cast, (Kind.PULL, Kind.FETCH)))
        if conditions.gradient is not None:
            found.append(Sums(conditions))
        return found

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        rhythm = Rhythm(n_fetch=self.n_fetch, n_push=self.n_push, local_rate=self.local_rate)
        return SumWorker(setting, rhythm)

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server."""
        return SumServer(setting.cast.workers, self.warm_start_steps)
