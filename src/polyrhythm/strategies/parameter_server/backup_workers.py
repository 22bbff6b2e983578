"""Synchronous SGD with backup workers.

Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, arXiv 1604.00981.

    w' = w - lr * (1/N) * sum of the first N gradients of the current step        N + b workers

b = `spare`. Later gradients of a step are dropped, and their workers continue with the current step. So data
of the slowest workers are seen less often; data are shuffled over all workers every epoch. The text of the
consistency `backup` has details and departures.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polyrhythm.strategies.parameter_server.composition.served import Served
from polyrhythm.strategies.parameter_server.consistency.backup import Backup
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.strategy import Facts, Paper


class BackupWorkers(Served):
    """Lockstep without the slowest: the first gradients of a step make the update, late ones are dropped.

    Attributes:
        spare: number of workers that are not waited for.
    """

    paper: ClassVar[Paper] = Paper(
        "Chen, Pan, Monga, Bengio, Jozefowicz",
        "Revisiting Distributed Synchronous SGD",
        "ICLR workshop",
        2016,
        "1604.00981",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M",
        staleness="0",
        use_it="lockstep accuracy, with a few stragglers or workers that may be lost",
    )

    spare: int = Field(default=1, ge=0)

    def rules(self) -> tuple[Consistency, Handling]:
        return Backup(spare=self.spare), Handling()
