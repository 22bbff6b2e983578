"""n-softsync, by default with a staleness-aware learning rate.

Zhang, Gupta, Lian, Liu, "Staleness-aware async-SGD for Distributed Deep Learning", IJCAI 2016, arXiv 1511.05950.

    w' = w - (1/c) * sum of lr(tau_l) * g_l over the next c gradients      c = floor(N/n), lr(tau) = lr / max(1, tau)

n = `n`, N workers. There are no waits, and mean staleness is about n, whatever the number of workers.
merge=plain gives all gradients the same rate. The texts of the consistency `softsync` and of the merge rule
`staleness_aware` have details and departures.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from polyrhythm.specs import chosen
from polyrhythm.strategies.parameter_server.composition.served import Served
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync as Gathering
from polyrhythm.strategies.parameter_server.merge.staleness_aware import StalenessAware
from polyrhythm.strategies.parameter_server.rules.merge_rule import MERGE_RULES, MergeRule
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.strategy import Facts, Paper


class Softsync(Served):
    """Servers update with the mean of the next N/n gradients to arrive; workers do not wait for them.

    Attributes:
        n: updates while every worker takes one step; 1 gathers the most.
        merge: merge rule for stale gradients.
    """

    paper: ClassVar[Paper] = Paper(
        "Zhang, Gupta, Lian, Liu",
        "Staleness-aware async-SGD for Distributed Deep Learning",
        "IJCAI",
        2016,
        "1511.05950",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M",
        staleness="n",
        use_it="many uneven workers: staleness stays about n, whatever their number",
    )

    n: int = Field(default=1, ge=1)
    merge: Annotated[MergeRule, chosen("merge rule", MERGE_RULES)] = StalenessAware()

    def rules(self) -> tuple[Consistency, Handling]:
        return Gathering(n=self.n), Handling(self.merge)
