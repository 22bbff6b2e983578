"""Stale synchronous parallel (SSP) with cached reads.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.

    worker i may begin step c_i          iff  c_i - s <= min_j c_j        c_j = steps that j has completed
    parameters travel to i before it     iff  its copy may lack an update of a step before c_i - s

s = `s`. Steps in progress differ by at most s; completed ones may differ by s + 1 while the quickest waits.
Between two reads a worker applies its own gradients to its own copy. The consistency `bounded_staleness`,
with the departures in its text, gives the same bound with a fresh read at every step:
parameter_server(consistency=bounded_staleness(s=3)).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polyrhythm.strategies.parameter_server.composition.served import Served
from polyrhythm.strategies.parameter_server.consistency.bounded_staleness import BoundedStaleness
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.strategy import Facts, Paper


class SSP(Served):
    """Workers may be at most s steps ahead of the slowest, and read again only when their copy is older than that.

    Attributes:
        s: largest difference between the workers' steps in progress; 0 is lockstep.
    """

    paper: ClassVar[Paper] = Paper(
        "Ho, Cipar, Cui, Lee, Kim et al.",
        "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
        "NIPS",
        2013,
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="M + M/(s+1) at best, 2M at worst",
        staleness="up to (2s+1)(N-1)",
        use_it="temporary stragglers, or a network that carries few reads; staleness has a bound",
    )

    s: int = Field(default=3, ge=0)

    def rules(self) -> tuple[Consistency, Handling]:
        return BoundedStaleness(s=self.s, cached_reads=True), Handling()
