"""Parameter server.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, for sharded servers that own the optimizer; Campos
et al., "Distributed training strategies for a computer vision deep learning algorithm on a distributed GPU
cluster", ICCS 2017, for its two modes.

    synchronous    w' = w - lr * sum_i b_i g_i(w) / sum_i b_i      when all workers' gradients are there
    asynchronous   w' = w - lr * g_i(w_old)                        whenever one arrives

The rule of progress (`consistency`), the treatment of stale gradients (`merge`) and the combination of
several gradients (`aggregator`) are separate choices. Other strategies of the family are compositions with
names of their own. Any optimizer may replace plain SGD. It runs on the servers, each over its shard.

Departure from the papers: workers get the new parameters in answer to their gradient, so a step costs one round trip.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from polyrhythm.specs import chosen
from polyrhythm.strategies.aggregator import AGGREGATORS, Aggregator
from polyrhythm.strategies.aggregators.weighted_mean import WeightedMean
from polyrhythm.strategies.parameter_server.composition.served import Served
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.strategies.parameter_server.rules.merge_rule import MERGE_RULES, MergeRule
from polyrhythm.strategies.parameter_server.serving.gate import CONSISTENCIES, Consistency
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.strategy import Facts, Paper


class ParameterServer(Served):
    """Servers hold the parameters in shards and run the optimizer; workers push gradients and pull parameters.

    Attributes:
        consistency: rule of progress.
        merge: merge rule for stale gradients.
        aggregator: combination of several gradients.
    """

    paper: ClassVar[Paper] = Paper(
        "Dean, Corrado, Monga, Chen, Devin et al.", "Large Scale Distributed Deep Networks", "NIPS", 2012
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M",
        staleness="N-1 (0 if synchronous)",
        use_it="asynchronous: uneven machines that should not wait for each other",
    )

    consistency: Annotated[Consistency, chosen("consistency", CONSISTENCIES)] = Asynchronous()
    merge: Annotated[MergeRule, chosen("merge rule", MERGE_RULES)] = Plain()
    aggregator: Annotated[Aggregator, chosen("aggregator", AGGREGATORS)] = WeightedMean()

    def rules(self) -> tuple[Consistency, Handling]:
        return self.consistency, Handling(self.merge, self.aggregator)
