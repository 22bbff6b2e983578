"""Sandblaster L-BFGS.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.2 and the appendix's coordinator.

    g = mean of a batch's gradients, of `portions` steps of every worker, all at w
    r = H g, by the two-loop recursion over the latest `memory` pairs (s, y) = (w' - w, g' - g) with s'y > 0
    w' = w + t s, s = an optimiser's step with r;  t = 1, then slope(0) / (slope(0) - slope(1)), slope(t) = g(w + t s)'s

Servers keep w and all pairs in shards. Scalar products travel between them, once a batch. The two-loop recursion runs
on coefficients (Chen, Wang, Zhou, NIPS 2014).

The first step along a line is that of the user's optimiser, with r in place of g. So learning rate, schedule and weight
decay mean what they always do. SGD's momentum m would bend the line; here it makes that step 1/(1-m) times as long.
Optimisers that scale every number by itself (Adam) undo what r knows: use SGD.

Departures from the paper:

- Every worker takes equally many portions of a batch, since its data are its own. So the slowest decides how long a
  batch takes. A lost worker's portions are dealt anew to its successor, in later batches; until then others have
  smaller batches.
- There is no coordinator: all servers decide the same from the same numbers.
- The paper's line search needs the loss. This one needs the slope, which the next batch's gradient gives, so each trial
  costs a batch.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.averaging.rounds.rounds import every
from polyrhythm.strategies.facts import Facts
from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.answers import Answers
from polyrhythm.strategies.invariants.meetings import Meetings, Undisturbed
from polyrhythm.strategies.invariants.replicas import Replicas
from polyrhythm.strategies.paper import Paper
from polyrhythm.strategies.parameter_server.batches.curvature import Search
from polyrhythm.strategies.parameter_server.batches.invariant import Batches
from polyrhythm.strategies.parameter_server.batches.resharding import OfBatches
from polyrhythm.strategies.parameter_server.batches.server import BatchServer
from polyrhythm.strategies.parameter_server.batches.worker import BatchWorker
from polyrhythm.strategies.parameter_server.serving.with_servers import WithServers
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.quantities import Count, NonNegative


class Sandblaster(WithServers):
    """Workers add up gradients of a large batch, and servers take an L-BFGS step with it, each on its shard.

    Attributes:
        portions: steps of every worker that make a batch.
        memory: pairs that estimate the curvature; 0: none, r is g.
        trials: corrections of a step along its line, at most; each costs a batch.
        tolerance: what part of the slope may be left when a line is over.
        servers: how many, each with an equal shard.
        placement: where servers run.
    """

    paper: ClassVar[Paper] = Paper(
        "Dean, Corrado, Monga, Chen, Devin et al.", "Large Scale Distributed Deep Networks", "NIPS", 2012
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M/portions",
        staleness="0",
        use_it="large batches and a network that is much slower than computing",
        when_a_worker_dies="the others go on, and a successor takes over the portions that are left",
    )
    plain_alone: ClassVar[bool] = False

    portions: Count = 2
    memory: int = Field(default=10, ge=0)
    trials: int = Field(default=1, ge=0)
    tolerance: NonNegative = 0.9

    def in_step(self, workers: int) -> bool:
        """Always: a batch is everybody's."""
        return True

    def goes_on(self, workers: int) -> bool:
        """Always: a batch is of those who are there."""
        return True

    def spares_leader(self, workers: int) -> bool:
        """Always: servers hold all that a run has come to."""
        return True

    def round_steps(self, workers: int) -> int:
        """Those of a batch."""
        return self.portions

    def resharding(self, before: int, after: int) -> Resharding:
        """Batches that are whole count."""
        return OfBatches()

    def updates_per_step(self, workers: int) -> int:
        """One, at most."""
        return 1

    def gradients_per_step(self, workers: int) -> int:
        """All."""
        return workers

    def invariants(self, conditions: Conditions) -> list[Invariant]:
        """Every portion is in one batch, every question is answered once, and replicas agree after every batch."""
        replicas = Replicas(conditions, [conditions.cast.workers], alone=False)
        answers = Answers(conditions.cast, (Kind.PULL, Kind.PUSH))
        together = Undisturbed(Meetings(replicas, every(self.portions)))
        return [*super().invariants(conditions), answers, Batches(conditions.cast), together]

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        return BatchWorker(setting, self.portions)

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server."""
        search = Search(memory=self.memory, trials=self.trials, tolerance=self.tolerance)
        return BatchServer(setting, search)
