"""Asynchronous periodic averaging: every few steps a worker and a running mean at the servers become one.

Xie, Koyejo, Gupta, "Asynchronous federated optimization", 2019, arXiv 1903.03934.

    c' = (1 - a) c + a x_i,   x_i' = c'           whenever worker i has taken H steps of its own; no worker waits
    x_i <- x_i - lr g_i                           in between, and while the exchange is in progress

H = `steps`, a = `share` (1/N if not given, so that c is a running mean of the latest model of each worker). The rule is
that of elastic averaging with different pulls: a at the center, 1 - a at the worker. At the end every worker adds its
model once more. Batch-norm statistics stay each worker's own in training, and a model that is tested or saved has their
mean.

Departures from the paper:

- Any optimizer takes the place of SGD, and keeps its state.
- The gradient of the step in which the mean arrives is that of the model before it, so that the exchange hides behind
  it.
- a does not fall with staleness, and there is no proximal term.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from polyrhythm.strategies.parameter_server.composition.served import WithServers
from polyrhythm.strategies.parameter_server.elastic.averaging import (
    ElasticRule,
    ElasticWorker,
    PlainStep,
    center_session,
)
from polyrhythm.strategies.parameter_server.serving.own_model import of_own_models
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.strategy import Facts, Paper, Traits
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.quantities import Count, InnerFraction


class PeriodicAveraging(WithServers):
    """Workers train alone, and every few steps take over a running mean that their model has gone into.

    Attributes:
        steps: steps of a worker between two exchanges.
        share: share of the worker's model in the mean after an exchange; None: 1/N.
        servers: number of servers of the mean, each with an equal shard.
    """

    paper: ClassVar[Paper] = Paper(
        "Xie, Koyejo, Gupta", "Asynchronous federated optimization", "arXiv", 2019, "1903.03934"
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M/H",
        staleness="N-1",
        use_it="slow networks and uneven machines that should not wait; simpler than elastic averaging",
    )
    why_not_compressed: ClassVar[str] = (
        "servers average whole models, and do not know where a worker's began: use local_sgd or diloco"
    )

    steps: Count = 4
    share: InnerFraction | None = None

    def rule(self, workers: int) -> ElasticRule:
        """Return the rule for `workers` workers."""
        share = 1 / workers if self.share is None else self.share
        return ElasticRule(alpha=share, tau=self.steps, together=False)

    def traits(self, workers: int) -> Traits:
        return replace(
            super().traits(workers),
            lockstep=False,
            waits_for_slower=False,
            draws=True,
            exchange_every=self.steps,
            gradients=workers,
        )

    def resharding(self, before: int, after: int) -> Resharding:
        return of_own_models(ElasticWorker, after)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        local = PlainStep(setting.flat.vector, setting.plan)
        return ElasticWorker(setting, self.rule(setting.workers.size), local)

    def server(self, setting: ServerSetting) -> ServerPart:
        workers = setting.roles.workers
        rule = self.rule(len(workers))
        return center_session(workers, rule, pull=(1 - rule.alpha) / rule.alpha)
