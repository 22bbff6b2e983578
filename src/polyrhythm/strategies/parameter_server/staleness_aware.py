"""Staleness-aware asynchronous SGD.

Zhang, Gupta, Lian, Liu, "Staleness-aware async-SGD for Distributed Deep Learning", IJCAI 2016, arXiv 1511.05950.

    w' = w - lr / max(1, tau) * g_i(w_old)        whenever one arrives; tau updates after its worker read

The rate is divided here, so it is not divided among the workers beforehand.

Departure from the paper: a fresh gradient (tau = 0) has the full rate.
"""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.strategies.parameter_server.composition.served import Served
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.merge.staleness_aware import StalenessAware as DividedByStaleness
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.strategy import Facts, Paper


class StalenessAware(Served):
    """Asynchronous servers that divide the learning rate of every gradient by its staleness."""

    paper: ClassVar[Paper] = Paper(
        "Zhang, Gupta, Lian, Liu",
        "Staleness-aware async-SGD for Distributed Deep Learning",
        "IJCAI",
        2016,
        "1511.05950",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M",
        staleness="N-1",
        use_it="as the asynchronous parameter server, where speeds change and no one rate suits all gradients",
    )

    def rules(self) -> tuple[Consistency, Handling]:
        return Asynchronous(), Handling(DividedByStaleness())
